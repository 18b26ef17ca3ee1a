"""The help of a verb, made from its options dataclass: description, examples, and the flags under their headings."""

import inspect
import shutil
import textwrap
from dataclasses import MISSING
from typing import Any

from holdfast.command_line.flags import ARGUMENTS, NUMBERS, Flag, flags_of
from holdfast.system.field_docs import field_docs

LEAST_WIDTH, WIDTH = 60, 100
COLUMN = 30
LONG_CHOICES = 40


def help_width() -> int:
    """Columns of a help text: those of the terminal, from LEAST_WIDTH to WIDTH."""
    return max(LEAST_WIDTH, min(shutil.get_terminal_size().columns, WIDTH))


def help_text(options: type, prog: str) -> str:
    """The text that `--help` prints."""
    width = help_width()
    flags = flags_of(options)
    docs = field_docs(options)
    needed = [usage_of(flag) for flag in flags if not flag.named or flag.default is MISSING]
    usage = textwrap.wrap(
        " ".join([f"usage: {prog}", *needed, "[flags]"]), width, subsequent_indent="    ", break_on_hyphens=False
    )
    lines = [*usage, "", description(options, width)]
    for heading, group in flags_by_heading(options).items():
        lines += ["", f"{heading}:", *(entry(flag, docs[flag.name], width) for flag in group)]
    return "\n".join(lines)


def flags_by_heading(options: type) -> dict[str, list[Flag]]:
    """Heading → its flags, in the order of the help."""
    flags = [flag for flag in flags_of(options) if "remainder" not in flag.metadata]
    order = [ARGUMENTS, *getattr(options, "HEADINGS", {}).values(), *(flag.heading for flag in flags)]
    found = {heading: [flag for flag in flags if flag.heading == heading] for heading in dict.fromkeys(order)}
    return {heading: group for heading, group in found.items() if group}


def description(options: type, width: int) -> str:
    """The docstring: paragraphs wrapped to the width, indented lines (examples) unchanged."""
    paragraphs = (inspect.getdoc(options) or "").split("\n\n")
    return "\n\n".join(
        text if "\n  " in f"\n{text}" else textwrap.fill(text, width, break_on_hyphens=False) for text in paragraphs
    )


def usage_of(flag: Flag) -> str:
    if "remainder" in flag.metadata:
        return flag.metavar
    shown = flag.metavar + (" ..." if flag.multiple else "")
    if flag.named:
        return f"{flag.option} {shown}"
    return shown if flag.default is MISSING else f"[{shown}]"


def entry(flag: Flag, doc: str, width: int) -> str:
    """One flag: its spellings and value, then the help beside or below it."""
    long = bool(flag.choices) and len(flag.metavar) > LONG_CHOICES
    shown = "NAME" if long else flag.metavar
    words = [doc, f"One of: {', '.join(flag.choices)}." if long else "", default_of(flag)]
    text = textwrap.wrap(" ".join(filter(None, words)), width - COLUMN, break_on_hyphens=False)
    head = f"  {spellings(flag)}" + ("" if flag.kind is bool else f" {shown}") + (" ..." if flag.multiple else "")
    if not flag.named:
        head = f"  {shown}"
    first = head.ljust(COLUMN - 1) + " " if len(head) < COLUMN - 1 else head + "\n" + " " * COLUMN
    return first + ("\n" + " " * COLUMN).join(text)


def spellings(flag: Flag) -> str:
    names = [str(flag.metadata["short"])] if "short" in flag.metadata else []
    names.append(flag.option)
    if flag.kind is bool and flag.default is not False:
        names.append(f"--no-{flag.option[2:]}")
    return ", ".join(names)


def default_of(flag: Flag) -> str:
    if flag.default is MISSING:
        return "(required)"
    plain = flag.default in (None, False, ()) and flag.kind not in NUMBERS
    return "" if plain or flag.default in (None, ()) else f"(default: {shown_value(flag.default)})"


def shown_value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(shown_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
