"""Merging gives the bytes that one run would have written."""

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from holdfast.data.indexed import IndexedDataset, IndexedDatasetBuilder
from holdfast.data.merge import merge
from holdfast.system.errors import HoldfastError
from tests.data.corpora import dataset_bytes, pair

PARTS = [[[[1, 2], [3]], []], [[]], [[[4]], [[5, 6, 7], [8]]]]


def build(prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16) -> None:
    builder = IndexedDatasetBuilder(prefix, dtype)
    for document in documents:
        builder.add_document([t for s in document for t in s], [len(s) for s in document])
    builder.finalize()


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    for number, documents in enumerate(PARTS):
        build(tmp_path / f"parts/part{number}", documents)
    return tmp_path / "parts"


def test_a_folder_of_parts_becomes_what_one_run_would_write(tmp_path: Path, parts: Path) -> None:
    merged = merge([parts], tmp_path / "whole")
    assert pair(tmp_path / "whole") == dataset_bytes([document for part in PARTS for document in part])
    assert (merged.parts, merged.documents, merged.sequences) == (3, 5, 5)
    IndexedDataset(tmp_path / "whole").check()


MERGE = """
import os, signal, sys
from holdfast.data import merge
merge.write_index = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
merge.merge([sys.argv[1]], sys.argv[2])
"""


def test_a_merge_removes_what_a_killed_one_left(tmp_path: Path, parts: Path) -> None:
    (tmp_path / "out").mkdir()
    killed = subprocess.run([sys.executable, "-c", MERGE, str(parts), str(tmp_path / "out/whole")])
    assert killed.returncode == -signal.SIGKILL and len(list((tmp_path / "out").iterdir())) == 1
    merge([parts], tmp_path / "out/whole")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["whole.bin", "whole.idx"]


def test_prefixes_are_merged_in_the_given_order(tmp_path: Path, parts: Path) -> None:
    merge([parts / "part2", parts / "part0.bin"], tmp_path / "whole")
    assert pair(tmp_path / "whole") == dataset_bytes([*PARTS[2], *PARTS[0]])


def test_equals_megatrons_own_merging(tmp_path: Path, parts: Path) -> None:
    oracle = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = oracle.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for number in (0, 2):
        theirs.add_index(str(parts / f"part{number}"))
    theirs.finalize(str(tmp_path / "theirs.idx"))
    merge([parts / "part0", parts / "part2"], tmp_path / "ours")
    assert pair(tmp_path / "ours") == pair(tmp_path / "theirs")


def test_modes_are_merged_too(tmp_path: Path) -> None:
    oracle = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    for number in (0, 1):
        builder = oracle.IndexedDatasetBuilder(str(tmp_path / f"m{number}.bin"), dtype=np.int32, multimodal=True)
        builder.add_document(np.arange(5, dtype=np.int32), [2, 3], [number, 1])
        builder.finalize(str(tmp_path / f"m{number}.idx"))
    merge([tmp_path / "m0", tmp_path / "m1"], tmp_path / "whole")
    modes = IndexedDataset(tmp_path / "whole").sequence_modes
    assert modes is not None
    assert modes.tolist() == [0, 1, 1, 1]


def test_a_part_without_modes_is_refused_beside_one_with_modes_also_after_an_empty_one(tmp_path: Path) -> None:
    build(tmp_path / "empty", [])
    build(tmp_path / "plain", [[[4], [5, 6]]])
    build(tmp_path / "modes", [[[1, 2]], [[3]]])
    with (tmp_path / "modes.idx").open("ab") as file:
        file.write(bytes([0, 1]))
    with pytest.raises(HoldfastError, match="one has modes and the other has none"):
        merge([tmp_path / "empty", tmp_path / "modes", tmp_path / "plain"], tmp_path / "whole")
    assert not (tmp_path / "whole.idx").exists()
    merge([tmp_path / "empty", tmp_path / "modes"], tmp_path / "whole")
    assert len(IndexedDataset(tmp_path / "whole")) == 2


def test_different_token_types_are_refused(tmp_path: Path, parts: Path) -> None:
    build(parts / "part3", [[[1]]], np.int32)
    with pytest.raises(HoldfastError, match="part3 has tokens of type int32.*different tokenizers"):
        merge([parts], tmp_path / "whole")
    assert not list(tmp_path.glob("whole*"))


def test_a_damaged_part_and_a_name_that_is_taken_are_refused(tmp_path: Path, parts: Path) -> None:
    merge([parts], tmp_path / "whole")
    with pytest.raises(HoldfastError, match="exists already"):
        merge([parts], tmp_path / "whole")
    with (parts / "part2.bin").open("ab") as file:
        file.write(b"xx")
    with pytest.raises(HoldfastError, match=r"part2.bin does not hold exactly"):
        merge([parts], tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HoldfastError, match=r"holds no \.idx"):
        merge([tmp_path / "empty"], tmp_path / "other")
    assert not list(tmp_path.glob("other*"))
