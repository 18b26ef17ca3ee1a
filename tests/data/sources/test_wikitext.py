"""Wiki markup becomes the text that a reader sees, and no markup makes the cleaner slow."""

import time

import pytest

from holdfast.data.sources.wikitext import plain_text

CASES = {
    "links": ("A [[cat]], two [[cat]]s, a [[Felis catus|house cat]] and [[:Category:Cats]].",
              "A cat, two cats, a house cat and Category:Cats."),
    "outside links": ("See [https://example.org the site] [http://example.org/x] or [//example.org here].",
                      "See the site or here."),
    "image with links in its caption": ("Before. [[File:Cat.jpg|thumb|A [[cat]] by [[Ann|Ann [[B]]]]]] After.", "Before. After."),
    "categories and languages": ("Text.\n[[Category:Cats]]\n[[de:Katze]]\n[[image:x.png|thumb]]", "Text."),
    "nested templates": ("A {{convert|5|km|{{nested|{{deep}}}}}}b {{{1|param}}}c.", "A b c."),
    "template over lines": ("{{Infobox\n| name = {{PAGENAME}}\n| image = [[File:X.jpg]]\n}}\n'''Cats''' are.", "Cats are."),
    "brackets that a template leaves": ("Rome ({{lang|it|Roma}}; {{IPA|x}}) and Oslo ({{x}}, born 1048) .",
                                        "Rome and Oslo (born 1048)."),
    "references": ('One.<ref>Book, p. 3.</ref> Two.<ref name="a" /> Three.<ref name="b">[[X]] {{cite}}</ref><references/>',
                   "One. Two. Three."),
    "reference that never closes": ("One.<ref>lost Two.<ref>gone</ref> Three.", "One.lost Two. Three."),
    "table": ("Before.\n{| class=x\n|-\n| a || b\n{|\n| inner\n|}\n| c\n|}\nAfter.", "Before.\n\nAfter."),
    "html table": ("Before.<table><tr><td>x</td></tr></table> After.", "Before. After."),
    "headings and rules": ("Intro.\n== History ==\nText.\n----\n=== More ===\nEnd.", "Intro.\n\nText.\n\nEnd."),
    "lists": ("* one\n** two\n# three\n; term: meaning\n: indented", "one\n\ntwo\n\nthree\n\nterm: meaning\n\nindented"),
    "bold and italic": ("'''Bold''', ''italic'', '''''both''''' and l'eau.", "Bold, italic, both and l'eau."),
    "entities": ("5&nbsp;km &ndash; a&nbsp;&amp;&nbsp;b &lt;tag&gt; &#233;", "5 km – a & b <tag> é"),
    "comments": ("A<!-- hidden [[link]] {{ --> b.<!-- open", "A b."),
    "nowiki": ("Write <nowiki>[[link]] or {{x}}</nowiki> so.", "Write [[link]] or {{x}} so."),
    "nowiki that never closes": ("A <nowiki>x</nowiki> b <nowiki>c", "A x b c"),
    "tags": ("H<sub>2</sub>O, <span style='x'>red</span>,<br/>next <math>x^2 < y</math>line.", "H2O, red,\n\nnext line."),
    "switches": ("__NOTOC__Text. __FORCETOC__", "Text."),
    "braces that never close": ("Set {{a is text.\nNext.", "Set a is text.\n\nNext."),
    "braces that never opened": ("A }} b.", "A b."),
    "link that never closes": ("A [[b c.", "A b c."),
    "table that never ends": ("Before.\n{| class=x\n| cell\nText after it.", "Before.\n\nText after it."),
    "only markup": ("{{Disambig}}\n[[Category:X]]\n<references />", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_markup_becomes_text(name: str) -> None:
    markup, expected = CASES[name]
    assert plain_text(markup) == expected


def test_namespaces_of_other_languages_are_left_out() -> None:
    markup = "Text [[Datei:Katze.jpg|mini|Eine [[Katze]]]].[[Kategorie:Katzen]]"
    assert plain_text(markup, {"file", "image", "category", "datei", "kategorie"}) == "Text."


@pytest.mark.parametrize(
    "piece",
    ["{{", "}}", "[[", "]]", "[[a|", "<ref>", "<nowiki>", "<!--", "{|\n", "|}\n", "=", "= a\n", "'''", "( ,", "(", "[http://x ",
     "{{{", "[[[[", "<a", "&amp", " ,", "__A", "* ", "\x00", "\x001\x00"],
)  # fmt: skip
def test_hostile_markup_ends_in_good_time(piece: str) -> None:
    # Anything quadratic would take far longer; the bound is of CPU time, far above what linear work takes.
    started = time.process_time()
    plain_text(piece * 50_000 + "x")
    plain_text(piece * 25_000 + "x" + "]]}}</ref>" * 1000)
    assert time.process_time() - started < 60
