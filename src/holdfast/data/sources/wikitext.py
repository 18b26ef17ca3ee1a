"""Wiki markup to plain text: what a reader of the article sees as running text, paragraph by paragraph.

Left out are comments, references, templates, tables, images, categories, headings, formulas and other embedded things; links
become their label, lists lose their marks. Every step passes over the text once or a fixed number of times, whatever the markup
looks like: markup may be malformed, so brackets that never close are text, and cost no more than text.
"""

import html
import re
from collections.abc import Collection

# Elements that go with all they hold; of any other element only the tags go.
DROPPED_ELEMENTS = frozenset(
    (
        *("ref", "references", "gallery", "imagemap", "table", "timeline", "graph", "mapframe", "maplink"),
        *("math", "chem", "ce", "score", "hiero", "syntaxhighlight", "source"),
        *("templatedata", "inputbox", "categorytree", "section", "indicator", "style", "script"),
    )
)
# Image and Category links are written in English in every language, besides the local names.
DROPPED_NAMESPACES = frozenset({"file", "image", "category"})
DEEPEST_LINK = 16

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_NOWIKI = re.compile(r"<nowiki\s*/>|<nowiki>(.*?)</nowiki>", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)((?:[\s/][^<>]*)?)>")
_BRACES = re.compile(r"\{{2,}|\}{2,}")
_LINK = re.compile(r"\[\[|\]\]")
_OUTSIDE_LINK = re.compile(r"\[(?:[a-z]{2,8}:)?//[^\s\]\[<>]+(?:[ \t]+([^\]\[\n]*))?\]", re.IGNORECASE)
_QUOTES = re.compile(r"'{2,}")
_SWITCH = re.compile(r"__[A-Z]+__")
_TABLE_BEGIN, _TABLE_END = re.compile(r"[:\s]*\{\|"), re.compile(r"\s*\|\}")
_MARKS = ("*", "#", ":", ";", "=", "----")
_MARK = re.compile(r"[*#:;]+|----+")
_LANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?$")
_BLANKS = re.compile(r"[ \t\u00a0\u2009\u202f]+")
_EMPTY_BRACKETS = re.compile(r" ?\([ ,;:]*\)")
_LOOSE_START = re.compile(r"\([ ,;:]+")
_LOOSE_END = re.compile(r" ([,.](?:\s|$))")
# Stands for the n-th text that is not markup; no article holds these characters, XML forbids them.
_KEPT = "\x00{}\x00"
_KEPT_MARK = re.compile(r"\x00(\d+)\x00")


def plain_text(markup: str, namespaces: Collection[str] = DROPPED_NAMESPACES) -> str:
    """The paragraphs of an article, one blank line between them. `namespaces`: links into them are left out (lower case)."""
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[1] or "")
        return _KEPT.format(len(kept) - 1)

    text = _COMMENT.sub("", markup.replace("\x00", ""))
    # Behind the last end there is nothing to find, and the search would start over at each opening tag.
    end = text.lower().rfind("</nowiki>") + len("</nowiki>")
    text = _NOWIKI.sub(keep, text[:end]) + text[end:]
    text = without_elements(text)
    text = without_templates(text)
    text = without_tables(text)
    text = with_link_labels(text, namespaces)
    text = _OUTSIDE_LINK.sub(lambda match: match[1] or "", text)
    text = _SWITCH.sub("", _QUOTES.sub("", text))
    text = html.unescape(text)
    text = _KEPT_MARK.sub(lambda match: html.unescape(kept[int(match[1])]), text)
    return paragraphs(text)


def without_elements(text: str) -> str:
    """Takes out dropped elements whole, and the tags of all others; a line break stays one."""
    parts: list[str] = []
    at, dropping = 0, ""
    for match in _TAG.finditer(text):
        closes, name, rest = match[1], match[2].lower(), match[3]
        if dropping:
            if name != dropping or rest.endswith("/"):
                continue
            if not closes:
                # The one before never closed: what stands between is text.
                parts.append(text[at : match.start()])
            at = match.end()
            dropping = "" if closes else dropping
            continue
        parts.append(text[at : match.start()])
        at = match.end()
        if name in DROPPED_ELEMENTS and not closes and not rest.endswith("/"):
            dropping = name
        elif name in ("br", "p", "div", "li", "blockquote"):
            parts.append("\n")
    parts.append(_TAG.sub("", text[at:]) if dropping else text[at:])
    return "".join(parts)


def without_templates(text: str) -> str:
    """Takes out the text in double braces, nested to any depth. Braces that never close are taken for text."""
    parts: list[str] = []
    at = depth = begin = 0
    for match in _BRACES.finditer(text):
        braces = match.end() - match.start()
        if match[0][0] == "{":
            if depth == 0:
                begin = match.start()
                parts.append(text[at:begin])
                at = begin
            depth += braces
        elif depth:
            depth -= braces
            if depth <= 1:
                depth, at = 0, match.end()
        else:
            parts.append(text[at : match.start()])
            at = match.end()
    rest = text[at:]
    parts.append(_BRACES.sub("", rest) if depth else rest)
    return "".join(parts)


def without_tables(text: str) -> str:
    """Takes out the lines from `{|` to `|}`, also of tables in tables. A table that never ends is taken for text."""
    if "{|" not in text:
        return text
    lines: list[str] = []
    held: list[str] = []
    depth = 0
    for line in text.split("\n"):
        if _TABLE_BEGIN.match(line):
            depth += 1
        elif depth and (end := _TABLE_END.match(line)):
            depth -= 1
            if not depth:
                held = []
                line = line[end.end() :]
        (held if depth else lines).append(line)
    return "\n".join(lines + [line for line in held if not line.lstrip().startswith(("{|", "|", "!"))])


def with_link_labels(text: str, namespaces: Collection[str]) -> str:
    """`[[target|label]]` and `[[label]]` become the label, which may hold links itself."""
    open_links: list[list[str]] = []
    here: list[str] = []
    at = 0
    for match in _LINK.finditer(text):
        here.append(text[at : match.start()])
        at = match.end()
        if match[0] == "[[":
            if len(open_links) < DEEPEST_LINK:
                open_links.append(here)
                here = []
        elif open_links:
            label = _label("".join(here), namespaces)
            here = open_links.pop()
            here.append(label)
    here.append(text[at:])
    # Links that were never closed: their text stays.
    return "".join(piece for pieces in [*open_links, here] for piece in pieces)


def _label(link: str, namespaces: Collection[str]) -> str:
    target, bar, label = link.partition("|")
    prefix = target.partition(":")[0].strip().lower() if ":" in target else ""
    if prefix in namespaces or (not bar and prefix and _LANGUAGE.match(target.partition(":")[0])):
        return ""
    return label.rpartition("|")[2].strip() or target.strip().removeprefix(":")


def paragraphs(text: str) -> str:
    """Lines without marks and spare blanks, with one blank line between any two; headings and rules are gone."""
    text = _BLANKS.sub(" ", text)
    text = _LOOSE_END.sub(r"\1", _LOOSE_START.sub("(", _EMPTY_BRACKETS.sub("", text)))
    found = []
    for line in text.split("\n"):
        line = line.strip()
        if line.startswith(_MARKS):
            if line[0] == line[-1] == "=" and len(line) > 2:
                continue
            line = line[match.end() :].strip() if (match := _MARK.match(line)) else line
        if line:
            found.append(line)
    return "\n\n".join(found)
