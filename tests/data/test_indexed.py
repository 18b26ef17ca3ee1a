"""The .bin/.idx reader and writer against the format's definition, Megatron's own writer, and damaged files."""

import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.data.indexed import (
    DTYPES,
    HEADER,
    IndexedDataset,
    IndexedDatasetBuilder,
    IndexPart,
    dtype_for_vocabulary,
    write_index,
)
from holdfast.data.inspection import describe
from holdfast.inspection import DocumentSamples
from holdfast.system.errors import HoldfastError


def build(prefix: Path, documents: list[list[list[int]]], dtype: object = np.uint16) -> None:
    builder = IndexedDatasetBuilder(prefix, dtype)  # type: ignore[arg-type]
    for document in documents:
        builder.add_document([token for sequence in document for token in sequence], [len(s) for s in document])
    builder.finalize()


def test_bytes_follow_the_definition_of_the_format(tmp_path: Path) -> None:
    build(tmp_path / "a", [[[1, 2, 3], [4]], [], [[5]]])
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<5H", 1, 2, 3, 4, 5)
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 3, 1, 1) + struct.pack("<3q", 0, 6, 8) + struct.pack("<4q", 0, 2, 2, 3)
    assert (tmp_path / "a.idx").read_bytes() == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("dtype", DTYPES.values())
def test_equals_megatrons_own_builder_for_every_dtype(tmp_path: Path, dtype: type) -> None:
    oracle = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    documents = [[[1, 2, 3], [4]], [], [[5] * 100], [[7], [8], [9, 10]]]
    theirs = oracle.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        theirs.add_document(np.array([t for s in document for t in s], dtype), [len(s) for s in document])
    theirs.finalize(str(tmp_path / "theirs.idx"))
    build(tmp_path / "ours", documents, dtype)
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"theirs.{ending}").read_bytes()
    read = oracle.IndexedDataset(str(tmp_path / "ours"))
    assert [read[i].tolist() for i in range(len(read))] == [s for document in documents for s in document]


def test_reads_what_megatron_wrote_with_modes(tmp_path: Path) -> None:
    oracle = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    theirs = oracle.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32, multimodal=True)
    theirs.add_document(np.arange(5, dtype=np.int32), [2, 3], [0, 1])
    theirs.finalize(str(tmp_path / "m.idx"))
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset.multimodal
    assert dataset.sequence_modes is not None
    assert dataset.sequence_modes.tolist() == [0, 1]
    assert [s.tolist() for s in dataset] == [[0, 1], [2, 3, 4]]


def test_items_slices_documents_and_parts_of_a_sequence(tmp_path: Path) -> None:
    build(tmp_path / "a", [[[1, 2, 3], [4]], [], [[5, 6]]])
    dataset = IndexedDataset(tmp_path / "a.idx")
    assert len(dataset) == 3
    assert dataset[0].tolist() == [1, 2, 3]
    assert dataset[-1].tolist() == [5, 6]
    assert [s.tolist() for s in dataset[1:]] == [[4], [5, 6]]
    assert dataset.get(0, 1, 1).tolist() == [2]
    assert dataset.get(0, 1).tolist() == [2, 3]
    assert dataset.document_count == 3
    assert [len(dataset.document(i)) for i in range(3)] == [2, 0, 1]
    with pytest.raises(IndexError):
        dataset[3]
    with pytest.raises(IndexError):
        dataset.get(0, 2, 2)
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 9


def test_a_dataset_without_a_single_token_can_be_read(tmp_path: Path) -> None:
    build(tmp_path / "a", [[], []])
    dataset = IndexedDataset(tmp_path / "a")
    assert len(dataset) == 0
    assert dataset.document_count == 2
    dataset.check()


def test_pickles_as_its_path(tmp_path: Path) -> None:
    build(tmp_path / "a", [[[1, 2, 3]]])
    dataset = IndexedDataset(tmp_path / "a")
    copy = pickle.loads(pickle.dumps(dataset))
    assert len(pickle.dumps(dataset)) < 1000
    assert copy[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("size", "dtype"), [(65499, np.uint16), (65500, np.int32), (50257, np.uint16), (256000, np.int32)]
)
def test_dtype_follows_megatrons_rule(size: int, dtype: type) -> None:
    assert dtype_for_vocabulary(size) is dtype


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda idx, _: idx.write_bytes(b"NONSENSE!" + idx.read_bytes()[9:]), "does not begin with MMIDIDX"),
        (lambda idx, _: idx.write_bytes(idx.read_bytes()[:20]), "only 20 bytes"),
        (lambda idx, _: idx.write_bytes(b""), "only 0 bytes"),
        (lambda idx, _: idx.write_bytes(idx.read_bytes()[:-1]), "damaged or was cut short"),
        (lambda idx, _: idx.write_bytes(idx.read_bytes() + b"\0" * 3), "damaged or was cut short"),
        (lambda idx, _: _patch(idx, 9, struct.pack("<Q", 2)), "version 2"),
        (lambda idx, _: _patch(idx, 17, b"\x63"), "token type 99"),
        (lambda idx, _: _patch(idx, 18, struct.pack("<Q", 2**63)), "damaged"),
        (lambda idx, _: _patch(idx, -8, struct.pack("<q", 7)), "do not cover"),
        (lambda _, bin_: bin_.write_bytes(b"\0"), "points up to"),
        (lambda idx, _: idx.unlink(), "does not exist"),
        (lambda _, bin_: bin_.unlink(), "does not exist"),
    ],
)
def test_a_damaged_pair_is_refused_with_its_name(tmp_path: Path, damage: object, message: str) -> None:
    build(tmp_path / "a", [[[1, 2, 3]], [[4]]])
    damage(tmp_path / "a.idx", tmp_path / "a.bin")  # type: ignore[operator]
    with pytest.raises(HoldfastError, match=message) as failure:
        IndexedDataset(tmp_path / "a")
    assert str(tmp_path) in str(failure.value)


def _patch(path: Path, at: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    at = at % len(content)
    content[at : at + len(value)] = value
    path.write_bytes(bytes(content))


def test_check_finds_a_pointer_and_a_document_that_are_wrong(tmp_path: Path) -> None:
    build(tmp_path / "a", [[[1, 2, 3]], [[4]], [[5]]])
    pointers = HEADER.size + 4 * 3
    _patch(tmp_path / "a.idx", pointers + 8, struct.pack("<q", 9999))
    with pytest.raises(HoldfastError, match="sequence 1 points outside"):
        IndexedDataset(tmp_path / "a").check()
    with pytest.raises(HoldfastError, match="sequence 1 points outside"):
        IndexedDataset(tmp_path / "a")[1]
    build(tmp_path / "b", [[[1, 2, 3]], [[4]], [[5]]])
    _patch(tmp_path / "b.idx", pointers + 3 * 8 + 8, struct.pack("<q", 3))
    with pytest.raises(HoldfastError, match="document 1 ends before"):
        IndexedDataset(tmp_path / "b").check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=9), max_size=4), max_size=8), st.data())
def test_random_valid_files_read_back_and_random_damage_never_crashes(documents: list, data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "a")
        build(prefix, documents)
        dataset = IndexedDataset(prefix)
        dataset.check()
        assert [[s.tolist() for s in dataset.document(i)] for i in range(dataset.document_count)] == documents
        idx = Path(folder, "a.idx")
        content = bytearray(idx.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        idx.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
        try:
            damaged = IndexedDataset(prefix)
            damaged.check()
            # Whatever passes the check can be read to the last token.
            for sequence in damaged:
                sequence.tolist()
        except HoldfastError as error:
            assert folder in str(error)


def test_parts_make_one_index_as_if_written_at_once(tmp_path: Path) -> None:
    whole = IndexPart(np.array([3, 1, 2], np.int32), np.array([2, 2, 3]))
    first = IndexPart(np.array([3, 1], np.int32), np.array([2, 2]))
    second = IndexPart(np.array([2], np.int32), np.array([1]))
    write_index(tmp_path / "whole", np.uint16, [whole])
    write_index(tmp_path / "parts", np.uint16, [first, second])
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "parts").read_bytes()


@pytest.mark.parametrize(("dtype", "largest"), [(np.int32, 2**31 - 1), (np.int64, 2**62)])
def test_token_ids_that_no_vocabulary_has_are_described_without_a_table_of_them(
    tmp_path: Path, dtype: object, largest: int
) -> None:
    build(tmp_path / "a", [[[7, 7, largest]]], dtype)
    facts = describe(tmp_path / "a", DocumentSamples()).facts
    assert (facts["largest_id"], facts["distinct_ids"], list(facts["frequent_ids"])) == (largest, 1, [7])
