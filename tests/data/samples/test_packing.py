"""Best-fit packing: against a plain implementation, each token once per epoch, samples that no rank or resume changes."""

from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.config import ModelConfig
from holdfast.data.loader import DocumentRules, MicroBatch, PackedBatches
from holdfast.data.samples.blend import BlendedSamples
from holdfast.data.samples.gpt import build_gpt_splits
from holdfast.data.samples.packed import PackedSamples, padding_share
from holdfast.data.samples.packing import pack
from holdfast.models.gpt import GPT
from holdfast.system.errors import HoldfastError
from tests.data.megatron_oracle import write_sequences

SEQ_LENGTH, CAPACITY = 16, 17


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The room left in each sample, by trying every sample for every document."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=rooms.__getitem__)] -= length
    return rooms


def plain_first_fit(lengths: list[int], capacity: int) -> int:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        index = next((index for index, room in enumerate(rooms) if room >= length), len(rooms))
        rooms[index:] = rooms[index:] or [capacity]
        rooms[index] -= length
    return len(rooms)


@pytest.mark.parametrize("seed", range(30))
def test_samples_are_filled_as_by_a_plain_best_fit(seed: int) -> None:
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 80))
    lengths = random.integers(1, int(random.integers(1, capacity + 1)) + 1, int(random.integers(1, 300)))
    sample_of, samples = pack(np.bincount(lengths, minlength=2), capacity)
    filled = np.bincount(sample_of, np.sort(lengths)[::-1], minlength=samples)
    assert sorted(capacity - filled) == sorted(plain_best_fit(lengths.tolist(), capacity))
    # Both rules need at most 11/9 of the best number and 4 more; the best is at most what first fit needs.
    assert -(-lengths.sum() // capacity) <= samples <= 11 / 9 * plain_first_fit(lengths.tolist(), capacity) + 4


def write_numbered(prefix: Path, lengths: list[int], first: int = 0) -> str:
    """Documents in which every token of the dataset has a number of its own."""
    tokens = np.arange(first, first + sum(lengths)).astype(np.uint16)
    return write_sequences(prefix, tokens, lengths, list(range(len(lengths) + 1)))


# Empty, of one token, exactly a sample, one more, many samples long, and common ones.
LENGTHS = [
    0,
    5,
    1,
    CAPACITY,
    CAPACITY + 1,
    0,
    400,
    SEQ_LENGTH,
    *np.random.default_rng(5).integers(1, 30, 150).tolist(),
    0,
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_numbered(tmp_path_factory.mktemp("packing") / "corpus", LENGTHS)


def documents_of(sample: np.ndarray) -> list[list[int]]:
    """The documents (or pieces) of a sample; checks that they follow each other, and that padding is at the end."""
    tokens, numbers = sample
    kept = int((numbers >= 0).sum())
    assert (numbers[:kept] >= 0).all() and not tokens[kept:].any()
    assert (np.diff(numbers[:kept]) >= 0).all()
    return [tokens[numbers == number].tolist() for number in range(numbers.max() + 1)]


def test_every_token_of_every_document_is_in_each_epoch_once(data: str) -> None:
    samples = PackedSamples(data, num_samples=400, seq_length=SEQ_LENGTH, seed=3)
    per_epoch = len(samples) // samples.epochs
    assert samples.epochs > 2 and len(samples) >= 400
    ends = np.cumsum(LENGTHS)
    expected = sorted(
        list(range(start, min(start + CAPACITY, end)))
        for start, end in ((s, e) for b, e in zip(ends - LENGTHS, ends, strict=True) for s in range(b, e, CAPACITY))
    )
    orders = []
    for epoch in range(samples.epochs):
        packed = [documents_of(samples[index]) for index in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        assert sorted(piece for pieces in packed for piece in pieces) == expected
        orders.append(packed)
    assert orders[0] != orders[1]
    companions = [{tuple(sorted(map(tuple, pieces))) for pieces in packed if len(pieces) > 1} for packed in orders[:2]]
    assert companions[0] != companions[1]
    padding = sum(int((samples[index][1] < 0).sum()) for index in range(per_epoch))
    assert samples.padding_share == pytest.approx(padding / (per_epoch * CAPACITY)) and 0 < samples.padding_share < 0.05


def test_seed_and_epoch_decide_and_a_longer_run_keeps_its_first_epochs(data: str, tmp_path: Path) -> None:
    def first(count: int, **changes: int) -> list[list[int]]:
        options = {"num_samples": 100, "seed": 3, **changes}
        samples = PackedSamples(data, seq_length=SEQ_LENGTH, cache_dir=tmp_path / f"{changes}", **options)
        return [samples[index][0].tolist() for index in range(count)]

    assert first(100) == first(100, num_samples=1000)
    assert first(100) != first(100, seed=4)
    folders = {path.name for path in (tmp_path / "{}").iterdir()}
    assert (
        first(100) == first(100)
        and {path.name for path in (tmp_path / "{}").iterdir()} == folders
        and len(folders) == 1
    )


@pytest.mark.parametrize(("lengths", "samples"), [([3], 1), ([1], 1), ([0, 0, 2, 0], 1), ([10 * CAPACITY + 1], 11)])
def test_data_smaller_than_a_sample_or_of_one_huge_document_is_padded(
    tmp_path: Path, lengths: list[int], samples: int
) -> None:
    found = PackedSamples(write_numbered(tmp_path / "x", lengths), num_samples=None, seq_length=SEQ_LENGTH, seed=1)
    assert len(found) == samples
    assert sum(len(piece) for index in range(samples) for piece in documents_of(found[index])) == sum(lengths)
    assert found.padding_share == pytest.approx(1 - sum(lengths) / (samples * CAPACITY))
    again = PackedSamples(found.data, num_samples=3 * samples, seq_length=SEQ_LENGTH, seed=1)
    assert len(again) == 3 * samples


def test_empty_documents_alone_are_refused(tmp_path: Path) -> None:
    empty = write_numbered(tmp_path / "empty", [0, 0, 0])
    with pytest.raises(HoldfastError, match=r"3 documents of the train split are empty: change --split"):
        PackedSamples(empty, num_samples=4, seq_length=SEQ_LENGTH, seed=1)


def test_splits_do_not_share_documents_and_blends_draw_by_weight(data: str, tmp_path: Path) -> None:
    other = write_numbered(tmp_path / "other", [12] * 100, first=20_000)  # one to a sample: 5 of 17 tokens are padding
    train, valid, _ = build_gpt_splits((data,), "80,20,0", SEQ_LENGTH, 1, (None, None, 0), packed=True)
    assert train is not None and valid is not None
    seen = [
        {token for index in range(len(s)) for piece in documents_of(s[index]) for token in piece}
        for s in (train, valid)
    ]
    assert not seen[0] & seen[1] and seen[0] | seen[1] == set(range(sum(LENGTHS)))
    blend, _, _ = build_gpt_splits(("0.75", data, "0.25", other), "1", SEQ_LENGTH, 1, (200, 0, 0), packed=True)
    assert isinstance(blend, BlendedSamples)
    drawn = [blend[index] for index in range(len(blend))]
    assert sum(int(sample[0, 0] >= 20_000) for sample in drawn) == pytest.approx(0.25 * len(drawn), abs=1)
    counted = np.mean([(sample[1] < 0).mean() for sample in drawn])
    share = padding_share(blend)
    assert share == pytest.approx(counted, abs=0.01)
    assert padding_share(build_gpt_splits((data,), "1", SEQ_LENGTH, 1, (5, 0, 0))[0]) is None


def fields(batch: MicroBatch) -> list[torch.Tensor | None]:
    return [batch.tokens, batch.labels, batch.loss_mask, batch.position_ids, batch.document_ids]


def test_ranks_and_resumes_see_the_same_samples(data: str) -> None:
    samples = PackedSamples(data, num_samples=400, seq_length=SEQ_LENGTH, seed=3)
    with PackedBatches(samples, 2, pin_memory=False) as alone:
        steps = [alone.get(consumed, 8) for consumed in range(0, 320, 8)]
    reopened = PackedSamples(data, num_samples=400, seq_length=SEQ_LENGTH, seed=3)
    for rank in (0, 1):
        with PackedBatches(
            reopened, 2, data_parallel_rank=rank, data_parallel_size=2, num_workers=0, pin_memory=False
        ) as batches:
            for step in (7, 8, 39):  # begun in the middle, as a resumed run does
                for ours, whole in zip(batches.get(step * 8, 8), steps[step][rank::2], strict=True):
                    assert all(torch.equal(a, b) for a, b in zip(fields(ours), fields(whole), strict=True))


@pytest.mark.parametrize("options", [{}, {"position_embedding_type": "rope", "window_size": (6, 0)}])
def test_losses_and_gradients_are_those_of_each_document_alone(tmp_path: Path, options: dict[str, object]) -> None:
    lengths = np.random.default_rng(2).integers(1, 40, 40).tolist()
    tokens = np.random.default_rng(3).integers(0, 50, sum(lengths)).astype(np.uint16)
    data = write_sequences(tmp_path / "x", tokens, lengths, list(range(len(lengths) + 1)))
    samples = PackedSamples(data, num_samples=None, seq_length=SEQ_LENGTH, seed=3)
    torch.manual_seed(1)
    config = ModelConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0, attention_dropout=0, **options
    )
    model = GPT(
        config, vocab_size=50, padded_vocab_size=64, max_positions=SEQ_LENGTH, dtype=torch.float64
    ).double()  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    whole = len(samples)
    with PackedBatches(samples, whole, num_workers=0, pin_memory=False) as batches:
        (batch,) = batches.get(0, whole)
    assert batch.position_ids is not None and batch.document_ids is not None
    packed = model(batch.tokens, batch.labels, batch.loss_mask.double(), batch.position_ids, batch.document_ids).sum()
    found = torch.autograd.grad(packed, list(model.parameters()))
    alone, predicted, start = torch.zeros((), dtype=torch.float64), 0, 0
    for length in lengths:
        for first in range(0, length, CAPACITY):
            piece = torch.from_numpy(tokens[start + first : start + min(first + CAPACITY, length)].astype(np.int64))[
                None
            ]
            if piece.numel() > 1:
                alone = alone + model(piece[:, :-1], piece[:, 1:]).sum()
                predicted += piece.numel() - 1
        start += length
    assert int(batch.loss_mask.sum()) == predicted
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=0)
    for ours, theirs in zip(found, torch.autograd.grad(alone, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_end_of_document_tokens_lose_their_prediction_on_request(data: str) -> None:
    samples = PackedSamples(data, num_samples=None, seq_length=SEQ_LENGTH, seed=3)
    eod = int(samples[0][0, 2])
    rules = DocumentRules(eod, eod_mask_loss=True)
    with (
        PackedBatches(samples, 1, rules=rules, pin_memory=False) as masked,
        PackedBatches(samples, 1, pin_memory=False) as plain,
    ):
        ((one,), (other,)) = masked.get(0, 1), plain.get(0, 1)
    assert torch.equal(one.loss_mask, other.loss_mask * (one.tokens != eod))
    assert other.loss_mask[0, 2] == 1
