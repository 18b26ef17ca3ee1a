"""The reference on the documentation site has every verb, flag and configuration key."""

import importlib.util
from pathlib import Path

from holdfast.cli import VERBS, load
from holdfast.command_line.flags import flags_of, options_of
from holdfast.config import Config

HOOK = Path(__file__).parents[1] / "docs" / "reference.py"


def test_the_reference_has_every_verb_flag_and_key():
    spec = importlib.util.spec_from_file_location("reference", HOOK)
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    pages = hook.pages()
    keys = {flag.name for flag in flags_of(Config)}
    assert all(f"| `{key}` |" in pages[hook.KEYS] for key in keys)
    for verb, (target, _) in VERBS.items():
        page = pages[verb.split()[0]]
        flags = [flag for flag in flags_of(options_of(load(target))) if flag.named and flag.name not in keys]
        assert f"holdfast {verb}" in page
        assert [flag.option for flag in flags if flag.option not in page] == []
