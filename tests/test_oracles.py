"""Tests pass over what needs an oracle that is not installed. `make test` installs them all: one that is missing is a failure."""

import importlib
import re
from pathlib import Path

import pytest

SOURCES = [path.read_text() for path in Path(__file__).parent.rglob("*.py")]
ORACLES = sorted(
    {name for source in SOURCES for name in re.findall(r'(?:importorskip|find_spec)\("([\w.]+)"\)', source)}
)


def test_they_are_found_by_how_tests_ask_for_them():
    assert {"transformers", "megatron.core", "tiktoken", "sentencepiece", "pyarrow"} <= set(ORACLES)


@pytest.mark.parametrize("name", ORACLES)
def test_an_oracle_is_there(name):
    importlib.import_module(name)
