"""Hook of mkdocs: adds the pages of the reference, made from the options dataclasses, when the site is built.

`holdfast VERB --help` prints the same texts, so the pages cannot differ from the program.
"""

import inspect
from dataclasses import MISSING
from itertools import groupby

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from holdfast.cli import VERBS, load
from holdfast.command_line.flags import Flag, flags_of, options_of
from holdfast.command_line.help import default_of, flags_by_heading, spellings, usage_of
from holdfast.config import Config
from holdfast.system.field_docs import field_docs

KEYS = "configuration keys"


def pages() -> dict[str, str]:
    """Title → content: a page for each first word of the verbs, and one for the keys of a configuration."""
    found = {
        word: "\n\n".join([f"# holdfast {word}", *(verb_section(verb) for verb in verbs)])
        for word, verbs in groupby(VERBS, key=lambda verb: verb.split()[0])
    }
    return found | {KEYS: keys_page()}


def verb_section(verb: str) -> str:
    target, summary = VERBS[verb]
    options = options_of(load(target))
    flags = flags_of(options)
    needed = [usage_of(flag) for flag in flags if not flag.named or flag.default is MISSING]
    heading = [f"## holdfast {verb}"] if " " in verb else []
    parts = [*heading, f"{summary[0].upper()}{summary[1:]}.", f"    holdfast {verb} {' '.join([*needed, '[flags]'])}"]
    parts += [
        _indent(part) if part.startswith("  ") else part for part in (inspect.getdoc(options) or "").split("\n\n")
    ]
    groups, docs = flags_by_heading(options), field_docs(options)
    for title, group in groups.items():
        if not title.startswith("["):
            rows = [(_code(flag), docs[flag.name], flag) for flag in group]
            parts += [f"{'###' if heading else '##'} {title}", _table("flag", rows)]
    if any(title.startswith("[") for title in groups):
        parts.append(f"Every [key of the configuration]({_file(KEYS)}) is a flag too: `num_layers` is `--num-layers`.")
    return "\n\n".join(parts)


def keys_page() -> str:
    docs = field_docs(Config)
    parts = [
        "# Configuration keys",
        "A key `num_layers` of the TOML file is the flag `--num-layers` on the command line.",
    ]
    for section, group in flags_by_heading(Config).items():
        rows = [(f"`{flag.name}`", docs[flag.name], flag) for flag in group]
        parts += [f"## {section}", _table("key", rows)]
    return "\n\n".join(parts)


def _table(first: str, rows: list[tuple[str, str, Flag]]) -> str:
    lines = [f"| {first} | meaning | default |", "| --- | --- | --- |"]
    for name, doc, flag in rows:
        values = f" One of: {', '.join(f'`{choice}`' for choice in flag.choices)}." if flag.choices else ""
        default = default_of(flag).strip("()").removeprefix("default: ")
        lines.append(f"| {name} | {_cell(doc)}{values} | {f'`{default}`' if default else ''} |")
    return "\n".join(lines)


def _code(flag: Flag) -> str:
    value = "" if flag.kind is bool or flag.choices else f" {flag.metavar}"
    return f"`{spellings(flag)}{value}{' ...' if flag.multiple else ''}`" if flag.named else f"`{usage_of(flag)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _indent(text: str) -> str:
    return "\n".join(f"    {line.removeprefix('  ')}" for line in text.splitlines())


def _file(title: str) -> str:
    return f"{title.replace(' ', '-')}.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav += [{"Reference": [{title: f"reference/{_file(title)}"} for title in pages()]}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for title, content in pages().items():
        files.append(File.generated(config, f"reference/{_file(title)}", content=content))
    return files
