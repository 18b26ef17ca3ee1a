"""Batches for one data-parallel rank, prefetched by threads.

The invariant: what `get` returns is a pure function of (samples, consumed samples, batch size, rank, number of ranks).
Prefetching only predicts the next call; a wrong prediction costs time and changes nothing. No other file of this package
imports torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holdfast.data.samples.blend import Samples
from holdfast.data.samples.packed import PADDING_DOCUMENT
from holdfast.system.errors import HoldfastError, UsageError

# Steps that are read ahead of the one being trained on.
PREFETCHED_STEPS = 2

B = TypeVar("B")
M = TypeVar("M", "MicroBatch", "BertMicroBatch")


@dataclass(frozen=True)
class MicroBatch:
    """B samples of T tokens, in page-locked memory where CUDA is available."""

    tokens: Tensor
    """[B, T] int64."""
    labels: Tensor
    """[B, T] int64, the token after each one."""
    loss_mask: Tensor
    """[B, T] float32, 0 where a token has no loss."""
    position_ids: Tensor | None
    """[B, T] int64, counted from the start of the document; None: 0 to T - 1 everywhere."""
    document_ids: Tensor | None
    """[B, T] int32, neighbouring documents differ; a token attends to earlier ones of its own. None: to all earlier ones."""

    def to(self, device: torch.device | str) -> "MicroBatch":
        return _move_to(self, device)


@dataclass(frozen=True)
class BertMicroBatch:
    """B samples of T tokens for BERT."""

    tokens: Tensor
    """[B, T] int64, masked."""
    tokentype_ids: Tensor
    """[B, T] int64, 0 in the first segment and 1 in the second."""
    labels: Tensor
    """[B, T] int64, the original token where one is to be predicted, -1 elsewhere."""
    loss_mask: Tensor
    """[B, T] float32, 1 where a token is to be predicted."""
    padding_mask: Tensor
    """[B, T] bool, True where there is a token."""
    is_random: Tensor
    """[B] int64, 1 where the second segment does not follow the first."""
    places: Tensor
    """[B, P] int64: where the tokens to predict are. P is the same in all batches; samples with fewer have other places too."""
    place_labels: Tensor
    """[B, P] int64, the labels there, 0 where there is none."""
    place_weights: Tensor
    """[B, P] float32, the loss mask there."""

    def to(self, device: torch.device | str) -> "BertMicroBatch":
        return _move_to(self, device)


def _move_to(batch: M, device: torch.device | str) -> M:
    """A copy on another device; from page-locked memory the copy overlaps with computation."""
    tensors: dict[str, Any] = {field.name: getattr(batch, field.name) for field in fields(batch)}
    moved: dict[str, Any] = {
        name: None if tensor is None else tensor.to(device, non_blocking=True) for name, tensor in tensors.items()
    }
    return replace(batch, **moved)


@dataclass(frozen=True)
class DocumentRules:
    """What an end-of-document token inside a sample does."""

    eod: int | None = None
    """The token's id; needed if any of the rules is on."""
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        if self.eod is None and (self.reset_position_ids or self.reset_attention_mask or self.eod_mask_loss):
            raise UsageError(
                "reset_position_ids, reset_attention_mask and eod_mask_loss need the end-of-document token"
            )


class RankBatches(ABC, Generic[B]):
    """`get(consumed_samples, global_batch_size)` gives this rank's micro batches of the step that begins there.

    Sample order within a step is Megatron's: micro batch m of rank r holds the `micro_batch_size` samples from
    `consumed + (m × ranks + r) × micro_batch_size` on.
    """

    def __init__(
        self,
        samples: Samples,
        micro_batch_size: int,
        *,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        num_workers: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        self.samples, self.micro_batch_size = samples, micro_batch_size
        self.rank, self.ranks = data_parallel_rank, data_parallel_size
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._threads = ThreadPoolExecutor(num_workers, "batches") if num_workers else None
        self._prefetched: dict[tuple[int, int], list[Future[B]]] = {}

    @abstractmethod
    def assemble(self, samples: Sequence[Any]) -> B:
        """A micro batch of these samples."""

    def get(self, consumed_samples: int, global_batch_size: int) -> list[B]:
        rows = self.sample_numbers(consumed_samples, global_batch_size)
        if self._threads is None:
            return [self._read(row) for row in rows]
        wanted = [
            (consumed_samples + step * global_batch_size, global_batch_size) for step in range(PREFETCHED_STEPS + 1)
        ]
        for key in [key for key in self._prefetched if key not in wanted]:
            for future in self._prefetched.pop(key):
                future.cancel()
        for start, size in wanted:
            if (start, size) not in self._prefetched and start + size <= len(self.samples):
                self._prefetched[start, size] = [
                    self._threads.submit(self._read, row) for row in self.sample_numbers(start, size)
                ]
        return [future.result() for future in self._prefetched.pop(wanted[0])]

    def sample_numbers(self, consumed_samples: int, global_batch_size: int) -> list[range]:
        """The numbers of the samples in each of this rank's micro batches."""
        chunk = self.micro_batch_size * self.ranks
        if global_batch_size % chunk:
            raise UsageError(
                f"global batch of {global_batch_size} samples is not a multiple of micro batch × data-parallel ranks = "
                f"{self.micro_batch_size} × {self.ranks}"
            )
        if consumed_samples + global_batch_size > len(self.samples):
            raise HoldfastError(
                f"samples {consumed_samples:,} to {consumed_samples + global_batch_size:,} are needed, but there are only "
                f"{len(self.samples):,}: datasets blended without weights are read once; give weights, or train for less"
            )
        first = consumed_samples + self.rank * self.micro_batch_size
        return [
            range(start, start + self.micro_batch_size)
            for start in range(first, consumed_samples + global_batch_size, chunk)
        ]

    def _read(self, row: Sequence[int]) -> B:
        return self.assemble([self.samples[number] for number in row])

    def _tensor(self, array: npt.NDArray[np.generic]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin else tensor

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class GPTBatches(RankBatches[MicroBatch]):
    """Batches of GPT samples."""

    def __init__(
        self, samples: Samples, micro_batch_size: int, *, rules: DocumentRules | None = None, **shared: Any
    ) -> None:
        """`shared`: the keywords of RankBatches."""
        super().__init__(samples, micro_batch_size, **shared)
        self.rules = rules or DocumentRules()

    def assemble(self, samples: Sequence[npt.NDArray[np.int64]]) -> MicroBatch:
        text = np.stack(samples)
        tokens = np.ascontiguousarray(text[:, :-1])
        labels = np.ascontiguousarray(text[:, 1:])
        loss_mask = np.ones(tokens.shape, dtype=np.float32)
        position_ids = document_ids = None
        rules = self.rules
        if rules.eod is not None:
            ends = tokens == rules.eod
            if rules.eod_mask_loss:
                loss_mask[ends] = 0.0
            if rules.reset_position_ids:
                position_ids = self._tensor(positions_in_documents(ends))
            if rules.reset_attention_mask:
                document_ids = self._tensor(documents_of_tokens(ends))
        return MicroBatch(
            self._tensor(tokens), self._tensor(labels), self._tensor(loss_mask), position_ids, document_ids
        )


class PackedBatches(GPTBatches):
    """Batches of packed samples: tokens attend to their own document, count positions in it, and predict its next token."""

    def assemble(self, samples: Sequence[npt.NDArray[np.int64]]) -> MicroBatch:
        text, documents = np.stack(samples, axis=1)
        tokens = np.ascontiguousarray(text[:, :-1])
        ends = documents[:, :-1] != documents[:, 1:]
        predicts = ~ends & (documents[:, :-1] != PADDING_DOCUMENT)
        if self.rules.eod_mask_loss:
            predicts &= tokens != self.rules.eod
        return MicroBatch(
            self._tensor(tokens),
            self._tensor(np.ascontiguousarray(text[:, 1:])),
            self._tensor(predicts.astype(np.float32)),
            self._tensor(positions_in_documents(ends)),
            self._tensor(documents[:, :-1].astype(np.int32)),
        )


class BertBatches(RankBatches[BertMicroBatch]):
    """Batches of BERT samples, of which each predicts at most `most` tokens."""

    def __init__(self, samples: Samples, micro_batch_size: int, *, most: int, **shared: Any) -> None:
        """`shared`: the keywords of RankBatches."""
        super().__init__(samples, micro_batch_size, **shared)
        self._most = most

    def assemble(self, samples: Sequence[Mapping[str, Any]]) -> BertMicroBatch:
        def stack(key: str, dtype: npt.DTypeLike = np.int64) -> npt.NDArray[Any]:
            return np.stack([np.asarray(sample[key], dtype=dtype) for sample in samples])

        labels, loss_mask = stack("labels"), stack("loss_mask", np.float32)
        arrays = {
            "tokens": stack("text"),
            "tokentype_ids": stack("types"),
            "labels": labels,
            "loss_mask": loss_mask,
            "padding_mask": stack("padding_mask", np.bool_),
            "is_random": stack("is_random"),
            **predictions(labels, loss_mask, self._most),
        }
        return BertMicroBatch(**{name: self._tensor(array) for name, array in arrays.items()})


def predictions(
    labels: npt.NDArray[np.int64], loss_mask: npt.NDArray[np.float32], most: int
) -> dict[str, npt.NDArray[Any]]:
    """What the language model head works on: the tokens to predict in order, then others, `most` of each sample."""
    places = np.argsort(-loss_mask, axis=1, kind="stable")[:, :most]
    return {
        "places": places,
        "place_labels": np.maximum(np.take_along_axis(labels, places, 1), 0),
        "place_weights": np.take_along_axis(loss_mask, places, 1),
    }


def documents_of_tokens(ends: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """The number, within its row, of the document each token belongs to; an end-of-document token belongs to its own."""
    documents = np.zeros(ends.shape, dtype=np.int32)
    np.cumsum(ends[:, :-1], axis=1, out=documents[:, 1:])
    return documents


def positions_in_documents(ends: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Each token's distance from the first token of its document in this row."""
    positions = np.broadcast_to(np.arange(ends.shape[1], dtype=np.int64), ends.shape)
    starts = np.zeros(ends.shape, dtype=np.int64)
    starts[:, 1:] = np.where(ends[:, :-1], positions[:, 1:], 0)
    return positions - np.maximum.accumulate(starts, axis=1)
