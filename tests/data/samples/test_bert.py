"""BERT samples: the sentences of Megatron's mapping, the shares of masked tokens, and sameness wherever they are read."""

from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.data.indexed import IndexedDataset
from holdfast.data.loader import BertBatches
from holdfast.data.samples.bert import BertRules, BertSamples, BertVocabulary, build_bert_splits, trim_pair
from holdfast.data.samples.bert_index import MappingRules, map_epoch
from holdfast.data.samples.masking import Masking
from holdfast.data.samples.stateless_random import random_words, uniform
from holdfast.system.errors import HoldfastError, UsageError
from holdfast.tokenizers import build_tokenizer
from tests.data.megatron_oracle import megatron_bert_samples, write_sequences

VOCABULARY = BertVocabulary(
    size=1000, cls=2, sep=3, mask=4, pad=0, continues=np.array([number % 3 == 0 for number in range(1000)])
)


def write_sentences(prefix: Path, documents: int = 150, seed: int = 0, longest: int = 40) -> str:
    """Documents of 0 to 12 sentences; token ids name their document, so that a segment shows its origin."""
    random = np.random.default_rng(seed)
    sentences = random.integers(0, 13, documents)
    lengths = random.integers(1, longest, int(sentences.sum()))
    tokens = np.repeat(5 + np.repeat(np.arange(documents), sentences) % 900, lengths).astype(np.uint16)
    return write_sequences(prefix, tokens, lengths.tolist(), [0, *np.cumsum(sentences).tolist()])


def make(data: str, **changes: object) -> BertSamples:
    options = {"num_samples": 1000, "seq_length": 64, "seed": 1234, "vocabulary": VOCABULARY, **changes}
    return BertSamples(data, **options)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_sentences(tmp_path_factory.mktemp("bert") / "corpus_text_sentence")


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("max_tokens", [5, 61, 509])
def test_sentence_ranges_equal_megatrons_without_short_sequences(
    max_tokens: int, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers = pytest.importorskip("megatron.core.datasets.helpers")
    monkeypatch.setattr("holdfast.data.samples.bert_index.CHUNK", 100)
    # Now and then a sentence of more than 512 tokens, for which its document is left out.
    data = IndexedDataset(write_sentences(tmp_path / "corpus", documents=300, longest=530))
    ends, lengths = np.array(data.document_indices), np.array(data.sequence_lengths)
    assert (lengths > 512).any()
    theirs = helpers.build_mapping(ends, lengths, 1, 10**9, max_tokens, 0.0, 7, False, least)
    ours = map_epoch(lengths, ends, 0, MappingRules(max_tokens, 0.0, least, 7))
    np.testing.assert_array_equal(ours, theirs[np.argsort(theirs[:, 0])])


def test_short_sequences_have_the_asked_share_and_all_lengths(data: str) -> None:
    samples = make(data, num_samples=20000, rules=BertRules(short_seq_prob=0.3))
    targets = samples.mapping[:, 2].astype(np.int64)
    short = targets < 61
    expected = 0.3 * 59 / 60
    assert abs(short.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(targets))
    assert (targets.min(), targets.max()) == (2, 61)
    assert len(np.unique(targets)) == 60


def test_epochs_follow_until_there_are_enough_samples_and_differ(data: str) -> None:
    one = make(data, num_samples=None)
    many = make(data, num_samples=len(one) * 3 + 1)
    assert len(many) >= len(one) * 3 + 1
    rows = many.mapping.tolist()
    # The same sentences come again, with other short sequences, in one shuffle.
    assert len({tuple(row) for row in rows}) > 1.05 * len(one)
    assert rows != sorted(rows)


def test_items_are_shaped_like_megatron_cores(data: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    oracle = megatron_bert_samples(data, 300, 64, 5, tmp_path)
    rules = BertRules(short_seq_prob=0.0, sentence_order=True)
    samples = make(data, num_samples=300, seed=5, rules=rules, cache_dir=tmp_path)
    np.testing.assert_array_equal(
        np.sort(samples.mapping.view("u4,u4,u4").ravel()), np.sort(oracle.sample_index.view("u4,u4,u4").ravel())
    )
    theirs = {tuple(row): number for number, row in enumerate(oracle.sample_index.tolist())}
    for number in range(50):
        mine, other = samples[number], oracle[theirs[tuple(samples.mapping[number].tolist())]]
        assert mine.keys() == other.keys()
        for key, value in mine.items():
            assert np.shape(value) == np.shape(other[key])
            assert np.asarray(value).dtype == np.asarray(other[key]).dtype
        # The sentences are the same, so are their number of tokens and the special ones around them.
        assert mine["padding_mask"].sum() == other["padding_mask"].sum()
        assert mine["truncated"] == other["truncated"]
        assert abs(int(mine["loss_mask"].sum()) - int(other["loss_mask"].sum())) <= 1
        for item in (mine, other):
            filled = int(item["padding_mask"].sum())
            first_end = int(np.flatnonzero(item["types"] == 1)[0]) - 1 if item["types"].any() else filled - 1
            assert item["text"][0] == VOCABULARY.cls
            assert item["text"][first_end] == item["text"][filled - 1] == VOCABULARY.sep
            assert (item["types"][: first_end + 1] == 0).all()
            assert (item["types"][first_end + 1 : filled] == 1).all()
            assert (item["text"][filled:] == 0).all()
            assert ((item["labels"] == -1) == (item["loss_mask"] == 0)).all()


def unmasked(sample: dict[str, np.ndarray]) -> np.ndarray:
    return np.where(sample["loss_mask"] == 1, sample["labels"], sample["text"])


def segments(sample: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    tokens, inside = unmasked(sample), sample["padding_mask"] == 1
    first = tokens[(sample["types"] == 0) & inside]
    return first[1:-1], tokens[sample["types"] == 1][:-1]


@pytest.mark.parametrize(
    "masking",
    [
        pytest.param(Masking(), id="tokens"),
        pytest.param(Masking(whole_word=True), id="words", marks=pytest.mark.slow),
        pytest.param(Masking(max_ngrams=3), id="n-grams", marks=pytest.mark.slow),
        pytest.param(Masking(whole_word=True, max_ngrams=3), id="n-grams of words"),
    ],
)
def test_statistics_of_100k_masked_tokens_are_bert_s(masking: Masking, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    lengths = random.integers(5, 40, 1500).tolist()
    tokens = random.integers(5, 1000, sum(lengths)).astype(np.uint16)
    data = write_sequences(tmp_path / "random", tokens, lengths, list(range(0, 1501, 10)))
    samples = make(data, num_samples=7000, seq_length=128, rules=BertRules(masking=masking))
    maskable = masked = mask_ids = kept = followed = 0
    for number in range(7000):
        sample = samples[number]
        chosen = sample["loss_mask"] == 1
        maskable += int(sample["padding_mask"].sum()) - 3
        masked += int(chosen.sum())
        mask_ids += int((sample["text"][chosen] == VOCABULARY.mask).sum())
        kept += int((sample["text"][chosen] == sample["labels"][chosen]).sum())
        followed += 1 - sample["is_random"]
        if number < 200 and masking == Masking(whole_word=True):
            assert_words_are_whole(sample, chosen)
    assert masked > 100_000
    assert_share(masked, maskable, 0.15, slack=0.001 if masking.whole_word else 0.0003)
    # A random token is [MASK] or the original with probability 1/1000 each.
    assert_share(mask_ids, masked, 0.8 + 0.1 / 1000)
    assert_share(kept, masked, 0.1 + 0.1 / 1000)
    assert_share(followed, 7000, 0.5)


def assert_share(count: int, total: int, expected: float, slack: float = 0.0) -> None:
    """Within four standard deviations of a binomial; slack for very short samples, which get one mask at least."""
    assert abs(count / total - expected) < 4 * np.sqrt(expected * (1 - expected) / total) + slack


def assert_words_are_whole(sample: dict[str, np.ndarray], chosen: np.ndarray) -> None:
    tokens = unmasked(sample)
    continues = VOCABULARY.continues[tokens] & (sample["padding_mask"] == 1)
    inside = (tokens != VOCABULARY.cls) & (tokens != VOCABULARY.sep)
    joined = continues[1:] & inside[1:] & inside[:-1]
    assert (chosen[1:][joined] == chosen[:-1][joined]).all()


def test_random_second_segments_are_of_other_documents(data: str) -> None:
    samples = make(data)
    kinds = []
    for number in range(400):
        sample = samples[number]
        first, second = segments(sample)
        # All tokens of a document carry one id in this corpus.
        assert len(np.unique(first)) == len(np.unique(second)) == 1
        assert (first[0] != second[0]) == bool(sample["is_random"])
        kinds.append(sample["is_random"])
    assert 0 < sum(kinds) < 400


def test_sentence_order_swaps_the_segments(tmp_path: Path) -> None:
    # One document whose tokens rise: whatever comes later has the larger ids.
    data = write_sequences(tmp_path / "rising", np.arange(5, 905, dtype=np.uint16), [10] * 90, [0, 90])
    samples = make(data, num_samples=200, rules=BertRules(sentence_order=True))
    for number in range(200):
        sample = samples[number]
        first, second = segments(sample)
        assert (first[0] > second[0]) == bool(sample["is_random"])


def test_without_binary_head_there_is_one_segment(data: str) -> None:
    samples = make(data, rules=BertRules(binary_head=False))
    for number in range(50):
        sample = samples[number]
        assert not sample["types"].any()
        assert np.count_nonzero(unmasked(sample)[sample["padding_mask"] == 1] == VOCABULARY.sep) == 1


def test_sample_is_the_same_in_any_order_on_any_rank_and_after_resume(data: str, tmp_path: Path) -> None:
    samples = make(data)
    expected = {number: samples[number] for number in range(24)}
    fresh = make(data, cache_dir=tmp_path)
    for number in reversed(range(24)):
        for key, value in fresh[number].items():
            np.testing.assert_array_equal(value, expected[number][key])
    seen: dict[int, np.ndarray] = {}
    for rank in range(3):
        with BertBatches(
            make(data), 2, most=20, data_parallel_rank=rank, data_parallel_size=3, pin_memory=False
        ) as batches:
            for step in (12, 0):
                rows = batches.sample_numbers(step, 12)
                for row, batch in zip(rows, batches.get(step, 12), strict=True):
                    assert batch.padding_mask.dtype == torch.bool
                    for number, text, label in zip(row, batch.tokens, batch.is_random, strict=True):
                        seen[number] = text.numpy()
                        assert label == expected[number]["is_random"]
    assert sorted(seen) == list(range(24))
    for number, text in seen.items():
        np.testing.assert_array_equal(text, expected[number]["text"])


def test_other_seed_gives_other_masks_and_other_order(data: str) -> None:
    one, other = make(data), make(data, seed=1235)
    assert one.mapping.tolist() != other.mapping.tolist()
    assert any((one[number]["loss_mask"] != other[number]["loss_mask"]).any() for number in range(5))


def test_no_sample_has_more_predictions_than_stated(data: str) -> None:
    samples = make(data, rules=BertRules(masking=Masking(whole_word=True, max_ngrams=2)))
    assert max(int(samples[number]["loss_mask"].sum()) for number in range(500)) <= samples.max_predictions == 10


def test_pair_is_trimmed_as_by_turns() -> None:
    for length_a, length_b, target in [(10, 3, 9), (3, 10, 4), (8, 8, 5), (9, 8, 2), (4, 4, 8)]:
        a, b = length_a, length_b
        while a + b > target:
            a, b = (a - 1, b) if a > b else (a, b - 1)
        left, right, truncated = trim_pair(np.arange(length_a), np.arange(length_b), target, seed=1, sample=9)
        assert (len(left), len(right)) == (a, b)
        assert truncated == (length_a + length_b > target)
        for part in (left, right):
            assert (np.diff(part) == 1).all()


def test_splits_are_cut_between_documents_and_blend(data: str, tmp_path: Path) -> None:
    train, valid, test = build_bert_splits((data,), "80,20,0", 64, 1, (100, 30, 0), VOCABULARY)
    assert isinstance(train, BertSamples)
    assert isinstance(valid, BertSamples)
    assert test is None
    assert train.document_ends[-1] == valid.document_ends[0]
    other = write_sentences(tmp_path / "other", seed=9)
    blended, _, _ = build_bert_splits(("1", data, "3", other), "1", 64, 1, (100, 0, 0), VOCABULARY)
    assert blended is not None
    assert len(blended) == 100
    assert blended[3]["text"].shape == (64,)


def test_data_that_gives_no_samples_is_explained(tmp_path: Path) -> None:
    tokens = np.full(50, 7, dtype=np.uint16)
    documents = write_sequences(tmp_path / "documents", tokens, [10] * 5, list(range(6)))
    with pytest.raises(HoldfastError, match=r"needs 2 sentences or more.*--split-sentences"):
        make(documents)
    single = write_sequences(tmp_path / "single", tokens, [10] * 5, [0, 5])
    with pytest.raises(HoldfastError, match="needs two documents with text"):
        make(single)
    with pytest.raises(HoldfastError, match="none of its 5 documents is left for the valid split"):
        build_bert_splits((documents,), "99,1,0", 64, 1, (0, 5, 0), VOCABULARY)


def test_vocabulary_comes_from_the_tokenizer(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "run", "##ning", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    vocabulary = BertVocabulary.of(build_tokenizer("BertWordPieceLowerCase", tmp_path / "vocab.txt"))
    assert (vocabulary.pad, vocabulary.cls, vocabulary.sep, vocabulary.mask, vocabulary.size) == (0, 2, 3, 4, 8)
    assert vocabulary.continues.tolist() == [False] * 6 + [True, True]


def test_tokenizer_without_mask_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "<|endoftext|>": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = build_tokenizer("GPT2BPETokenizer", tmp_path / "vocab.json", tmp_path / "merges.txt")
    with pytest.raises(UsageError, match=r"no \[CLS\], \[SEP\], \[MASK\]"):
        BertVocabulary.of(tokenizer)


def test_counters_are_frozen_and_even() -> None:
    # A change of these words would change the samples of every run that is under way.
    assert random_words(1234, 2, 5, 2).tolist() == [[15964261003479434728, 15751022338043238285]]
    np.testing.assert_array_equal(random_words(7, 3, np.array([0, 5, 2**40]), 4)[1:2], random_words(7, 3, 5, 4))
    draws = uniform(random_words(1, 3, np.arange(2000), 50))
    assert abs(draws.mean() - 0.5) < 4 * np.sqrt(1 / 12 / draws.size)
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.1
    assert len(np.unique(draws)) == draws.size
