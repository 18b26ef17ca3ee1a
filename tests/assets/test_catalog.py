"""The catalog against files whose bytes we have."""

import hashlib
import os
from pathlib import Path

import pytest

from holdfast.assets.catalog import CATALOG, file_spec, file_specs
from holdfast.system.errors import UsageError

DATA = Path(os.environ.get("HOLDFAST_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


@pytest.mark.parametrize(("role", "file"), [("vocab", "vocab.json"), ("merges", "merges.txt")])
def test_gpt2_is_what_openai_published(role, file):
    original = DATA / "gpt2" / file
    if not original.exists():
        pytest.skip("the real GPT-2 files are not on this machine")
    content, wanted = original.read_bytes(), CATALOG["gpt2"].files[role]
    assert (len(content), hashlib.sha256(content).hexdigest()) == (wanted.size, wanted.sha256)


def test_a_name_a_part_of_it_and_a_known_url_all_lead_to_the_checksum():
    vocab = CATALOG["gpt2"].files["vocab"]
    assert list(file_specs("gpt2")) == ["vocab", "merges"]
    for text in ("gpt2/vocab", "gpt2/gpt2-vocab.json", vocab.url):
        assert file_spec(text) == vocab
    assert file_spec("gpt2", "merges") == CATALOG["gpt2"].files["merges"]
    with pytest.raises(UsageError, match="perhaps you meant gpt2"):
        file_spec("gtp2")


def test_every_entry_is_usable():
    for known in CATALOG.values():
        for wanted in known.files.values():
            assert wanted.url.startswith("https://") and wanted.name and "/" not in wanted.name
            assert wanted.sha256 is None or (len(wanted.sha256) == 64 and wanted.size)
    urls = [wanted.url for known in CATALOG.values() for wanted in known.files.values()]
    assert len(urls) == len(set(urls))


def test_the_wikipedia_dump_is_the_one_that_all_workers_read_and_the_docs_name():
    dump = file_spec("enwiki")
    assert "multistream" in dump.url and dump.url.endswith(f"/{dump.name}")
    assert dump.name in (Path(__file__).parents[2] / "docs" / "data.md").read_text()
