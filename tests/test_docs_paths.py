"""Every file, module, link and flag that the documentation names exists, and its import table is the one that is tested."""

import re
from pathlib import Path

import pytest

from holdfast.cli import VERBS, find_verb, load
from holdfast.command_line.flags import flags_of, options_of
from holdfast.system.errors import UsageError
from tests.test_imports import ALL, MAY_SEE, MECHANICS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "holdfast"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("src", "tests", "docs", "configs", "deploy", "examples")


def named_paths(text: str) -> set[str]:
    """Paths of the repository, and paths below src/holdfast with a folder in them, such as `train/step.py`."""
    in_repository = re.findall(rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*[\w/])", text)
    in_source = re.findall(r"`([a-z_]+/[a-z_/]*\w+\.py)`", text)
    return {*in_repository, *in_source}


def named_modules(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w./-])holdfast((?:\.[a-z_]\w*)+)(?![\w/(])", text))


def module_exists(name: str) -> bool:
    """Whether the dotted name is a module of Holdfast, or a name that a module contains."""
    *parts, last = name.strip(".").split(".")
    folder = SOURCE.joinpath(*parts)
    module = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if (folder / last).is_dir() or (folder / f"{last}.py").is_file():
        return True
    return module.is_file() and re.search(rf"\b{last}\b", module.read_text()) is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_names_exists(page):
    text = page.read_text()
    missing = {path for path in named_paths(text) if not (ROOT / path).exists() and not (SOURCE / path).exists()}
    missing |= {f"holdfast{name}" for name in named_modules(text) if not module_exists(name)}
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    missing |= {target for target in targets if target and not (page.parent / target).exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_external_links_of_a_page_are_well_formed(page):
    links = re.findall(r"\]\((\w+://[^)]*)\)", page.read_text())
    assert [link for link in links if not re.fullmatch(r"https://(?:[\w-]+\.)+[a-z]+(?:/[\w./%#?=&~+-]*)?", link)] == []


def documented_commands(text: str) -> list[tuple[list[str], list[str]]]:
    """Verbs (two for `launch slurm train`) and flags of the commands in code spans and code blocks."""
    found = []
    for line in re.findall(r"(?:^(?:    )?|`|\$ )holdfast ([^`#|&\n]+)", text.replace("\\\n", " "), re.MULTILINE):
        words = line.split()
        try:
            verb, rest = find_verb(words)
        except UsageError:
            continue  # "holdfast VERB", or prose
        inner = [word for word in rest[:1] if word in VERBS and verb.startswith("launch ")]
        found.append(([verb, *inner], re.findall(r"(?<!\S)--([a-z][\w-]*)", line)))
    return found


def flag_names(verb: str) -> set[str]:
    names = {flag.name.replace("_", "-") for flag in flags_of(options_of(load(VERBS[verb][0])))}
    return names | {f"no-{name}" for name in names} | {"help"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_flags_of_documented_commands_exist(page):
    unknown = {
        f"holdfast {' '.join(verbs)} --{flag}"
        for verbs, flags in documented_commands(page.read_text())
        for flag in flags
        if not any(flag in flag_names(verb) for verb in verbs)
    }
    assert unknown <= {
        "holdfast train --num-layer",
        "holdfast train --block_size",
        "holdfast train --block",
    }  # error messages


def test_the_architecture_page_has_the_table_of_imports_that_is_tested():
    text = (ROOT / "docs" / "architecture.md").read_text()
    (table,) = re.findall(r"\| package \| may import \|\n\| --- \| --- \|\n((?:\|.*\|\n)+)", text)
    stated = {}
    for row in table.splitlines():
        packages, allowed = (cell.strip() for cell in row.strip("|").split("|"))
        names = set(re.findall(r"`(\w+)`", allowed))
        if allowed.startswith("all except"):
            names = ALL - names
        elif allowed.startswith("shared"):
            names |= MECHANICS
        stated |= dict.fromkeys(re.findall(r"`(\w+)`", packages), names)
    assert stated == MAY_SEE


def test_the_names_in_the_table_of_typical_changes_exist():
    text = (ROOT / "docs" / "architecture.md").read_text()
    (table,) = re.findall(r"\| change \| starts in \|\n\| --- \| --- \|\n((?:\|.*\|\n)+)", text)
    starts = re.findall(r"\| `([\w/]+\.py)`: .*?(?:`([\w.]+)`.*)?\|\n", table)
    assert len(starts) == 10
    for file, name in starts:
        content = (SOURCE / file).read_text()
        assert all(re.search(rf"\b{part}\b", content) for part in name.split(".")), f"{file}: {name}"
