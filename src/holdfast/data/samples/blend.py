"""Several datasets as one: `--data-path 0.3 a 0.7 b`, drawn in Megatron's order.

At every step the dataset that is furthest behind its share is drawn from, the first of them on a tie. Megatron runs that rule
in a compiled loop; here many stretches of the sequence are computed side by side. Each stretch starts from a guess of how much
was drawn before it, and is computed again while the stretch in front of it ends elsewhere than guessed. The rule forgets
quickly where it came from, so two rounds nearly always suffice, and the end is exact by construction, not by luck: no stretch
is accepted whose start is not the end of the one before.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from holdfast.data.indexed import IndexedDataset, pair_paths
from holdfast.data.samples.index_cache import index_folder, open_index
from holdfast.data.samples.splits import SPLITS, split_ranges
from holdfast.system.errors import HoldfastError, UsageError

# Samples per dataset beyond its share, so that rounding never leaves the blend one short (Megatron's default).
SURPLUS = 0.005
STRETCH_LENGTH = 4096
STRETCHES = 4096


class Samples(Protocol):
    """A fixed sequence of training samples; sample i is the same whenever and wherever it is asked for."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the samples and their order, as JSON."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


S = TypeVar("S", bound=Samples)


@dataclass(frozen=True)
class DataPath:
    """What `--data-path` names. Without weights, datasets are blended by their sizes."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_data_path(data_path: Sequence[str]) -> DataPath:
    """Reads `PREFIX...` or `WEIGHT PREFIX WEIGHT PREFIX ...`, and checks that the files are there."""
    words = split_blend([word.strip() for word in data_path])
    if not words:
        raise UsageError("data_path is empty: give the prefix of a .bin/.idx pair, or WEIGHT PREFIX WEIGHT PREFIX ...")
    weights = [weight for word in words[0::2] if (weight := _number(word)) is not None]
    if len(words) == 2 * len(weights):
        names = words[1::2]
        for weight, name in zip(weights, names, strict=True):
            if not 0 < weight < math.inf:
                raise UsageError(f"data_path: the weight of {name} is {weight}; it must be a positive number")
    else:
        names, weights = words, []
    for name in names:
        _check_present(name, words)
    return DataPath(tuple(str(pair_paths(name)[0])[: -len(".bin")] for name in names), tuple(weights) or None)


def split_blend(words: Sequence[str]) -> Sequence[str]:
    """The words; a single one that holds a weight or a dataset is a blend, and is divided. Another one is a path with blanks."""
    if len(words) != 1 or IndexedDataset.exists(words[0]):
        return words
    parts = words[0].split()
    is_blend = any(_number(part) is not None or IndexedDataset.exists(part) for part in parts)
    return parts if is_blend or not parts else words


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_present(prefix: str, words: Sequence[str]) -> None:
    for path in pair_paths(prefix):
        if not path.is_file():
            if any(_number(word) is not None for word in words):
                detail = f"'{' '.join(words)}' is neither WEIGHT PREFIX WEIGHT PREFIX ... nor prefixes alone"
            else:
                detail = "data_path is the path without .bin/.idx, such as my-corpus_text_document"
            raise HoldfastError(f"data_path: {path} does not exist; {detail}")


def normalize(weights: Sequence[float]) -> list[float]:
    values = np.array(weights, dtype=np.float64)
    return [float(value) for value in values / np.sum(values)]


class BlendedSamples:
    """Sample i is sample `sample_index[i]` of dataset `dataset_index[i]`."""

    def __init__(
        self, parts: Sequence[Samples], weights: Sequence[float], size: int | None, split: str, cache_dir: Path
    ) -> None:
        self.parts = list(parts)
        shares = normalize(weights)
        limits = [len(part) for part in parts] if size is None else None
        self.identity: dict[str, Any] = {"parts": [part.identity for part in parts], "shares": shares, "size": size}

        def build(folder: Path) -> None:
            build_blend_index(folder, shares, size, limits)

        arrays = open_index(cache_dir, f"blend-{split}", self.identity, build)
        self.dataset_index, self.sample_index, self.drawn = arrays["dataset"], arrays["sample"], arrays["drawn"]
        for number, (part, count) in enumerate(zip(parts, self.drawn.tolist(), strict=True)):
            if count > len(part):
                raise HoldfastError(
                    f"the {split} blend draws {count} samples from dataset {number + 1}, which has {len(part)}: "
                    f"change the weights a little, or ask for a few more samples"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> Any:
        return self.parts[int(self.dataset_index[index])][int(self.sample_index[index])]


def build_blend_index(
    folder: Path, shares: Sequence[float], size: int | None, limits: Sequence[int] | None = None
) -> None:
    """Writes `dataset.npy` and `sample.npy`: `size` draws by `shares`, or all of `limits` where those are given; and `drawn.npy`:
    how many samples each dataset gives.
    """
    total = size if limits is None else sum(limits)
    assert total is not None
    dataset = np.lib.format.open_memmap(folder / "dataset.npy", mode="w+", dtype=np.int16, shape=(total,))
    sample = np.lib.format.open_memmap(folder / "sample.npy", mode="w+", dtype=np.int64, shape=(total,))
    np.save(folder / "drawn.npy", fill_blend_index(dataset, sample, shares, limits))
    dataset.flush()
    sample.flush()


def fill_blend_index(
    dataset: npt.NDArray[np.int16],
    sample: npt.NDArray[np.int64],
    shares: Sequence[float],
    limits: Sequence[int] | None = None,
) -> npt.NDArray[np.int64]:
    """Draws until the arrays are full; returns how many samples each dataset has given."""
    total, done = len(dataset), 0
    weights = np.array(shares, dtype=np.float64)
    ceiling = None if limits is None else np.array(limits, dtype=np.int64)
    drawn = np.zeros(len(weights), dtype=np.int64)
    while done < total:
        left = total - done
        length = min(STRETCH_LENGTH, max(256, math.isqrt(left)), left)
        stretches = min(STRETCHES, left // length)
        end = done + length * stretches
        drawn = _draw_side_by_side(dataset[done:end], sample[done:end], weights, ceiling, drawn, done, length)
        done = end
    return drawn


def _draw_side_by_side(
    dataset: npt.NDArray[np.int16],
    sample: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    ceiling: npt.NDArray[np.int64] | None,
    drawn: npt.NDArray[np.int64],
    first: int,
    length: int,
) -> npt.NDArray[np.int64]:
    """Fills the slices, which begin at draw `first` with `drawn` samples taken; returns how many are taken at their end."""
    stretches = len(dataset) // length
    steps = first + length * np.arange(stretches, dtype=np.int64)
    starts = _guess_drawn(weights, steps)
    starts[0] = drawn
    ends = np.empty_like(starts)
    choices = dataset.reshape(stretches, length)
    ranks = sample.reshape(stretches, length)
    wrong = np.arange(stretches)
    while len(wrong):
        counts = starts[wrong].copy()
        chosen, rank = _draw(counts, steps[wrong], weights, ceiling, length)
        choices[wrong], ranks[wrong], ends[wrong] = chosen, rank, counts
        wrong = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        starts[wrong] = ends[wrong - 1]
    last: npt.NDArray[np.int64] = ends[-1]
    return last


def _guess_drawn(weights: npt.NDArray[np.float64], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each dataset's share of so many steps, rounded to whole samples that add up to them (largest remainders go up)."""
    exact = np.outer(steps, weights)
    counts: npt.NDArray[np.int64] = np.floor(exact).astype(np.int64)
    missing = steps - counts.sum(axis=1)
    order = np.argsort(counts - exact, axis=1, kind="stable")
    np.put_along_axis(
        counts, order, np.take_along_axis(counts, order, 1) + (np.arange(len(weights)) < missing[:, None]), 1
    )
    return counts


def _draw(
    counts: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    weights: npt.NDArray[np.float64],
    ceiling: npt.NDArray[np.int64] | None,
    length: int,
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """`length` draws in each stretch; `counts` [stretches, datasets] moves along."""
    rows = np.arange(len(counts))
    chosen = np.empty((length, len(counts)), dtype=np.int16)
    rank = np.empty((length, len(counts)), dtype=np.int64)
    for step in range(length):
        # Megatron counts its very first step as step 1.
        behind = weights * np.maximum(steps + step, 1)[:, None].astype(np.float64) - counts
        if ceiling is not None:
            behind[counts >= ceiling] = -np.inf
        choice = behind.argmax(axis=1)
        chosen[step], rank[step] = choice, counts[rows, choice]
        counts[rows, choice] += 1
    return chosen.T, rank.T


def build_splits(
    data_path: Sequence[str],
    split: str,
    samples: Sequence[int | None],
    make: Callable[[IndexedDataset, range, int | None, str], S],
    count: Callable[[IndexedDataset], int],
    cache_dir: Path | str | None,
) -> tuple[S | BlendedSamples | None, ...]:
    """The three splits of `--data-path` and `--split`, blended as Megatron blends them.

    `samples` says how many of each are needed (None: one epoch). A split of which 0 samples are needed is None, and so is one
    without a share of the documents. `make(data, documents, samples, name)` gives one split of one dataset, `count(data)` the
    number of its documents.
    """
    parsed = parse_data_path(data_path)
    prefixes, weights = parsed.prefixes, parsed.weights
    blend_folder = index_folder(prefixes[0], cache_dir)

    def splits_of(prefix: str, wanted: Sequence[int | None]) -> list[S | None]:
        data = IndexedDataset(prefix)
        return [
            None if documents is None or number == 0 else make(data, documents, number, name)
            for name, documents, number in zip(SPLITS, split_ranges(split, count(data)), wanted, strict=True)
        ]

    if len(prefixes) == 1 and weights is None:
        return tuple(splits_of(prefixes[0], samples))
    shares = None if weights is None else normalize(weights)
    if shares is not None and None in samples:
        raise UsageError("a weighted blend needs a number of samples")
    parts = [
        splits_of(prefix, _samples_of(None if shares is None else shares[number], samples, SURPLUS))
        for number, prefix in enumerate(prefixes)
    ]
    splits: list[S | BlendedSamples | None] = []
    for number, (name, wanted) in enumerate(zip(SPLITS, samples, strict=True)):
        members = [part[number] for part in parts]
        present = [member for member in members if member is not None]
        if wanted == 0 or not present:
            splits.append(None)
            continue
        assert len(present) == len(members)
        if shares is not None:
            size: int | None = sum(_samples_of(share, samples, 0.0)[number] or 0 for share in shares)
            splits.append(BlendedSamples(present, shares, size, name, blend_folder))
        else:
            sizes = [len(member) for member in present]
            if min(sizes) == 0:
                raise HoldfastError(
                    f"{prefixes[sizes.index(0)]} has too few tokens for one {name} sample: leave it out"
                )
            size = None if wanted is None else min(wanted, sum(sizes))
            splits.append(BlendedSamples(present, sizes, size, name, blend_folder))
    return tuple(splits)


def _samples_of(share: float | None, samples: Sequence[int | None], surplus: float) -> list[int | None]:
    """How many samples of each split one dataset gives; without shares, what one epoch holds."""
    if share is None:
        return [None if wanted != 0 else 0 for wanted in samples]
    return [math.ceil(math.ceil((wanted or 0) * share) * (1 + surplus)) for wanted in samples]
