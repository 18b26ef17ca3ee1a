"""Batches are a pure function of where the run stands, cut over ranks as Megatron cuts them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.data.loader import DocumentRules, GPTBatches, MicroBatch
from holdfast.data.samples.gpt import GPTSamples
from holdfast.system.errors import HoldfastError, UsageError
from tests.data.megatron_oracle import megatron_gpt_splits, write_dataset


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
    return write_dataset(tmp_path_factory.mktemp("loader") / "corpus", lengths, eod=0)


@pytest.fixture(scope="module")
def samples(data: str) -> GPTSamples:
    return GPTSamples(data, num_samples=200, seq_length=32, seed=3)


def megatron_sample_numbers(
    consumed: int, total: int, micro: int, rank: int, ranks: int, steps: int
) -> list[list[int]]:
    """MegatronPretrainingSampler's rule: collect micro × ranks numbers, keep this rank's slice."""
    batches, batch = [], []
    for number in range(consumed, total):
        batch.append(number)
        if len(batch) == micro * ranks:
            batches.append(batch[rank * micro : (rank + 1) * micro])
            batch = []
    return batches[:steps]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_share_a_step_as_in_megatron(samples: GPTSamples, ranks: int, micro: int) -> None:
    for rank in range(ranks):
        batches = GPTBatches(
            samples, micro, data_parallel_rank=rank, data_parallel_size=ranks, num_workers=0, pin_memory=False
        )
        expected = megatron_sample_numbers(24, len(samples), micro, rank, ranks, 12 // (micro * ranks))
        assert [list(row) for row in batches.sample_numbers(24, 12)] == expected
        for row, batch in zip(expected, batches.get(24, 12), strict=True):
            text = np.stack([samples[number] for number in row])
            np.testing.assert_array_equal(batch.tokens.numpy(), text[:, :-1])
            np.testing.assert_array_equal(batch.labels.numpy(), text[:, 1:])
            assert batch.loss_mask.dtype == torch.float32
            assert batch.loss_mask.all()
            assert batch.position_ids is None
            assert batch.document_ids is None


def equal(a: list[MicroBatch], b: list[MicroBatch]) -> bool:
    return len(a) == len(b) and all(torch.equal(x.tokens, y.tokens) for x, y in zip(a, b, strict=True))


def test_prefetching_changes_nothing(samples: GPTSamples) -> None:
    """Steps in order, a batch that grows, a jump back after a failure, the same step twice, the very last samples."""
    calls = [(0, 4), (4, 4), (8, 4), (12, 8), (20, 8), (4, 4), (4, 4), (len(samples) - 4, 4), (0, 4)]
    with (
        GPTBatches(samples, 2, num_workers=0, pin_memory=False) as plain,
        GPTBatches(samples, 2, pin_memory=False) as ahead,
    ):
        for consumed, size in calls:
            assert equal(plain.get(consumed, size), ahead.get(consumed, size))


def test_prefetched_steps_are_read_before_they_are_asked_for(samples: GPTSamples) -> None:
    class Watched:
        identity = samples.identity

        def __init__(self) -> None:
            self.read: list[int] = []

        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> np.ndarray:
            self.read.append(index)
            return samples[index]

    watched = Watched()
    with GPTBatches(watched, 2, num_workers=1, pin_memory=False) as batches:
        batches.get(0, 4)
        batches.get(4, 4)
    # One thread reads in order, and closing cancels only what has not begun; each sample was read once.
    assert watched.read[:8] == list(range(8))
    assert len(set(watched.read)) == len(watched.read)


def test_document_rules_equal_megatron_core(data: str, samples: GPTSamples) -> None:
    pytest.importorskip("megatron.core")
    oracle = megatron_gpt_splits([data], "1", 32, 3, (200, 0, 0), reset=True)[0]
    rules = DocumentRules(eod=0, reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
    causal = torch.tril(torch.ones(32, 32, dtype=torch.bool))
    with GPTBatches(samples, 4, rules=rules, pin_memory=False) as batches:
        (batch,) = batches.get(40, 4)
    assert batch.position_ids is not None
    assert batch.document_ids is not None
    assert batch.document_ids.max() > 0
    for row in range(4):
        expected = oracle[40 + row]
        assert torch.equal(batch.tokens[row], expected["tokens"])
        assert torch.equal(batch.loss_mask[row], expected["loss_mask"])
        assert torch.equal(batch.position_ids[row], expected["position_ids"])
        documents = batch.document_ids[row]
        allowed = causal & (documents[:, None] == documents[None, :])
        assert torch.equal(allowed, ~expected["attention_mask"][0])


def test_document_rules_need_the_token() -> None:
    with pytest.raises(UsageError, match="end-of-document"):
        DocumentRules(reset_attention_mask=True)


def test_end_of_the_samples_is_explained(samples: GPTSamples) -> None:
    with GPTBatches(samples, 2, pin_memory=False) as batches, pytest.raises(HoldfastError, match="there are only"):
        batches.get(len(samples) - 2, 4)


def test_batch_that_ranks_cannot_share_is_refused(samples: GPTSamples) -> None:
    with (
        GPTBatches(samples, 2, data_parallel_size=3, pin_memory=False) as batches,
        pytest.raises(UsageError, match=r"global batch of 8 samples is not a multiple .* 2 × 3"),
    ):
        batches.get(0, 8)


def test_failure_of_a_reading_thread_reaches_the_caller(samples: GPTSamples, tmp_path: Path) -> None:
    class Broken:
        identity = samples.identity

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> np.ndarray:
            raise HoldfastError(f"sample {index} cannot be read")

    with GPTBatches(Broken(), 1, pin_memory=False) as batches, pytest.raises(HoldfastError, match="sample 7 cannot"):
        batches.get(7, 1)


@pytest.mark.gpu
def test_batches_lie_in_page_locked_memory_for_cuda(samples: GPTSamples) -> None:
    with GPTBatches(samples, 2) as batches:
        (batch,) = batches.get(0, 2)
        assert batch.tokens.is_pinned()
        moved = batch.to("cuda")
        assert torch.equal(moved.tokens.cpu(), batch.tokens)
