"""GPT samples against megatron-core's GPTDataset, and what a user sees when the data does not do."""

from pathlib import Path

import numpy as np
import pytest

from holdfast.data.indexed import IndexedDataset
from holdfast.data.samples.blend import BlendedSamples
from holdfast.data.samples.gpt import GPTSamples, build_gpt_splits, check_token_range
from holdfast.data.samples.gpt_index import plan_epochs
from holdfast.system.errors import HoldfastError, UsageError
from tests.data.megatron_oracle import megatron_gpt_splits, write_dataset, write_sequences


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Datasets of different characters: short documents, long ones, one only, many."""
    folder = tmp_path_factory.mktemp("corpora")
    random = np.random.default_rng(7)
    return {
        "short": write_dataset(folder / "short", random.integers(1, 12, 300).tolist(), seed=1),
        "long": write_dataset(folder / "long", random.integers(200, 900, 40).tolist(), seed=2),
        "single": write_dataset(folder / "single", [5000], seed=3),
        "many": write_dataset(folder / "many", random.integers(1, 120, 3000).tolist(), seed=4),
        "even": write_dataset(folder / "even", [64] * 100, seed=5),
    }


# data path, split, sequence length, seed, samples: one epoch and many, last epochs above and below the 80% rule, odd splits.
COMBINATIONS = {
    "one epoch of short documents": ("short", "90,9,1", 16, 1234, (50, 2, 0)),
    "part of the last epoch, shuffled apart": ("short", "90,5,5", 16, 1, (240, 20, 9)),
    "most of the last epoch, shuffled with the rest": ("short", "100", 16, 2, (334, 0, 0)),
    "documents longer than samples": ("long", "80,10,10", 32, 42, (2000, 100, 100)),
    "a single document many times": ("single", "1,0,0", 128, 5, (400, 0, 0)),
    "samples longer than an epoch": ("short", "98,1,1", 4096, 3, (7, 3, 2)),
    "many documents, several epochs": ("many", "949,50,1", 64, 1234, (9000, 700, 4)),
    "samples that end where documents end": ("even", "50,25,25", 64, 9, (120, 60, 60)),
    "one epoch asked for by None": ("many", "95,5", 100, 11, (None, None, 0)),
    "blend of two": ("0.3 short 0.7 many", "90,9,1", 32, 1234, (1500, 90, 20)),
    "blend of four with unnormalised weights": ("7 short 1 long 22.5 many 3 even", "98,2,0", 48, 77, (1000, 40, 0)),
    "blend by size": ("short long even", "90,10,0", 24, 8, (400, 50, 0)),
    "blend of one": ("2 long", "9,1,0", 64, 6, (250, 11, 0)),
    "blend exhausted": ("many long short", "70,30,0", 50, 4, (None, None, 0)),
}


def resolve(path: str, corpora: dict[str, str]) -> list[str]:
    return [corpora.get(word, word) for word in path.split()]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_samples_equal_megatron_core(name: str, corpora: dict[str, str]) -> None:
    pytest.importorskip("megatron.core")
    path, split, seq_length, seed, samples = COMBINATIONS[name]
    data_path = resolve(path, corpora)
    # The oracle never ends where a split has no documents, and None means one epoch to it as to us.
    ours = build_gpt_splits(data_path, split, seq_length, seed, samples)
    theirs = megatron_gpt_splits(data_path, split, seq_length, seed, samples)
    for wanted, mine, oracle in zip(samples, ours, theirs, strict=True):
        if wanted == 0:
            assert mine is None
            continue
        assert len(mine) == len(oracle)
        assert_same_index(mine, oracle)
        for number in np.linspace(0, len(mine) - 1, 40).astype(int).tolist():
            expected = oracle[number]
            np.testing.assert_array_equal(mine[number][:-1], expected["tokens"].numpy())
            np.testing.assert_array_equal(mine[number][1:], expected["labels"].numpy())


def assert_same_index(mine: object, oracle: object) -> None:
    if isinstance(mine, BlendedSamples):
        pairs = [(mine.dataset_index, oracle.dataset_index), (mine.sample_index, oracle.dataset_sample_index)]
        for part, other in zip(mine.parts, oracle.datasets, strict=True):
            assert_same_index(part, other)
    else:
        assert isinstance(mine, GPTSamples)
        pairs = [
            (mine.document_index, oracle.document_index),
            (mine.sample_index, oracle.sample_index),
            (mine.shuffle_index, oracle.shuffle_index),
        ]
    for array, expected in pairs:
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)


# Frozen from megatron-core 0.16.1, for places where it is not installed: 5 documents of 3, 7, 4, 6 and 5 tokens, sequence
# length 4, seed 99; 14 samples use little of the last epoch, 17 most of it.
FROZEN = {
    14: (
        [3, 0, 4, 2, 1, 2, 0, 4, 3, 1, 0, 3, 2, 1, 4],
        [
            [0, 0],
            [0, 4],
            [1, 2],
            [2, 3],
            [3, 2],
            [4, 2],
            [4, 6],
            [5, 3],
            [7, 0],
            [7, 4],
            [8, 3],
            [9, 1],
            [9, 5],
            [10, 2],
            [11, 3],
            [12, 1],
            [13, 1],
            [13, 5],
            [14, 2],
        ],
        [9, 8, 2, 11, 4, 6, 3, 5, 0, 10, 1, 7, 14, 13, 15, 17, 12, 16],
    ),
    17: (
        [0, 1, 0, 3, 4, 2, 0, 4, 2, 1, 2, 3, 4, 3, 1],
        [
            [0, 0],
            [1, 1],
            [1, 5],
            [2, 2],
            [3, 3],
            [4, 1],
            [5, 0],
            [6, 0],
            [7, 1],
            [8, 0],
            [9, 0],
            [9, 4],
            [10, 1],
            [11, 1],
            [11, 5],
            [12, 3],
            [13, 2],
            [14, 0],
            [14, 4],
        ],
        [3, 8, 16, 12, 5, 9, 10, 15, 2, 7, 4, 14, 6, 11, 13, 0, 1, 17],
    ),
}


@pytest.mark.parametrize("num_samples", FROZEN)
def test_small_index_is_the_frozen_one(num_samples: int, tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "small", [3, 7, 4, 6, 5])
    samples = GPTSamples(data, num_samples=num_samples, seq_length=4, seed=99)
    documents, places, order = FROZEN[num_samples]
    assert samples.document_index.tolist() == documents
    assert samples.sample_index.tolist() == places
    assert samples.shuffle_index.tolist() == order


def test_frozen_tables_cover_both_ways_of_the_last_epoch() -> None:
    tokens = 25
    assert plan_epochs(tokens, 4, 14).final_is_separate
    assert not plan_epochs(tokens, 4, 17).final_is_separate


def test_consecutive_samples_share_one_token_and_cover_the_documents(corpora: dict[str, str]) -> None:
    samples = GPTSamples(corpora["many"], num_samples=None, seq_length=64, seed=1)
    line = np.concatenate([samples.data[document] for document in samples.document_index.tolist()])
    for number, position in enumerate(samples.shuffle_index[:200].tolist()):
        np.testing.assert_array_equal(samples[number], line[position * 64 : position * 64 + 65])


def test_empty_sequences_are_passed_over(tmp_path: Path) -> None:
    tokens = np.arange(40, dtype=np.uint16)
    data = write_sequences(tmp_path / "holes", tokens, [0, 10, 0, 0, 15, 0, 15, 0], list(range(9)))
    for seed in range(8):
        samples = GPTSamples(data, num_samples=None, seq_length=6, seed=seed)
        line = np.concatenate([samples.data[document] for document in samples.document_index.tolist()])
        for number, position in enumerate(samples.shuffle_index.tolist()):
            np.testing.assert_array_equal(samples[number], line[position * 6 : position * 6 + 7])


def test_index_is_kept_beside_the_data_and_built_again_for_new_data(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "corpus", [20] * 10, seed=1)
    first = GPTSamples(data, num_samples=30, seq_length=8, seed=1)
    (folder,) = (tmp_path / "corpus.index").iterdir()
    inode = folder.stat().st_ino
    again = GPTSamples(data, num_samples=30, seq_length=8, seed=1)
    assert folder.stat().st_ino == inode
    np.testing.assert_array_equal(first.shuffle_index, again.shuffle_index)
    assert isinstance(again.sample_index, np.memmap)

    write_dataset(tmp_path / "corpus", [10] * 20, seed=1)
    changed = GPTSamples(data, num_samples=30, seq_length=8, seed=1)
    assert len(changed.document_index) != len(first.document_index)


def test_cache_dir_holds_the_index_when_given(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "corpus", [20] * 10)
    build_gpt_splits((data,), "90,10", 8, 1, (5, 2, 0), cache_dir=tmp_path / "elsewhere")
    assert not (tmp_path / "corpus.index").exists()
    assert sorted(folder.name[:9] for folder in (tmp_path / "elsewhere").iterdir()) == ["gpt-train", "gpt-valid"]


@pytest.mark.parametrize(
    ("data_path", "split", "samples", "error", "message"),
    [
        (("corpus",), "99,1,0", (5, 5, 0), HoldfastError, "0 tokens in 0 of 10 documents .* valid split"),
        (("nowhere",), "1", (5, 0, 0), HoldfastError, "nowhere.bin does not exist"),
        (("0.3", "corpus", "x"), "1", (5, 0, 0), HoldfastError, "'0.3 corpus x' is neither WEIGHT PREFIX"),
        (("0,3", "corpus", "0.7", "corpus"), "1", (5, 0, 0), HoldfastError, "0,3.bin does not exist; '0,3 corpus"),
        (("-1", "corpus", "2", "corpus"), "1", (5, 0, 0), UsageError, "the weight of corpus is -1.0"),
        ((), "1", (5, 0, 0), UsageError, "data_path is empty"),
        (("corpus",), "1,2,3,4", (5, 0, 0), UsageError, "split '1,2,3,4'"),
        (("corpus",), "most,rest", (5, 0, 0), UsageError, "split 'most,rest'"),
        (("corpus",), "0,0,0", (5, 0, 0), UsageError, "split '0,0,0'"),
        (("corpus",), "1.2.3", (5, 0, 0), UsageError, "split '1.2.3'"),
    ],
)
def test_wrong_data_is_explained(
    data_path: tuple[str, ...],
    split: str,
    samples: tuple[int, int, int],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_dataset(Path("corpus"), [20] * 10)
    with pytest.raises(error, match=message):
        build_gpt_splits(data_path, split, 8, 1, samples)


def test_blend_may_be_one_string_as_a_shell_quotes_it(tmp_path: Path) -> None:
    a, b = (write_dataset(tmp_path / name, [20] * 10) for name in "ab")
    quoted, _, _ = build_gpt_splits((f"0.3 {a} 0.7 {b}.idx",), "1", 8, 1, (20, 0, 0))
    words, _, _ = build_gpt_splits(("0.3", a, "0.7", b), "1", 8, 1, (20, 0, 0))
    assert quoted.identity == words.identity


def test_tokens_outside_the_vocabulary_are_found_wherever_they_lie(tmp_path: Path) -> None:
    data = IndexedDataset(write_dataset(tmp_path / "small", [1000] * 5, vocab_size=500))
    assert check_token_range(data, 500) == 5000
    with pytest.raises(HoldfastError, match="holds token id 499, but the vocabulary has 499 tokens"):
        check_token_range(data, 499)

    tokens = np.zeros(5_000_000, dtype=np.int32)
    tokens[-1] = 70000
    large = IndexedDataset(write_sequences(tmp_path / "large", tokens, [len(tokens)], [0, 1]))
    with pytest.raises(HoldfastError, match="70000"):
        check_token_range(large, 50257)
    assert check_token_range(large, 70001) == 64 * 65536
