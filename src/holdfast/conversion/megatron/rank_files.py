"""The rank files of a Megatron checkpoint: found in a zip, a file, an iteration folder or a run, and opened as data.

The invariant: all ranks of the grid are there, once, and of one iteration and version.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.conversion.files.budget import MAX_FILES, MAX_TENSORS, Budget
from holdfast.conversion.files.pickles import plain, plain_attributes
from holdfast.conversion.files.torch_reader import StoredTensor, TorchFile, describe, load_torch
from holdfast.conversion.files.zips import Region, is_zip, map_file, open_member, read_directory
from holdfast.system.errors import HoldfastError

MAX_NAME = 1000
"""Characters of a parameter's name."""
RANK_FILE = re.compile(r"(?:^|.*/)mp_rank_(\d\d)(?:_(\d{3}))?(?:_(\d{3}))?/(?:model_optim_rng|model_rng)\.pt$")
ZIP_MEMBER = re.compile(
    r"^(?:[^/]+/)?(release|iter_\d{7})/mp_rank_\d\d(?:_\d{3}){0,2}/(?:model_optim_rng|model_rng)\.pt$"
)


@dataclass(frozen=True)
class RankFile:
    """One rank's file: its place in the grid and its content."""

    tensor_rank: int
    stage: int
    file: TorchFile

    @property
    def content(self) -> Mapping[str, Any]:
        if not isinstance(self.file.tree, dict):
            raise HoldfastError(f"{self.file.name} holds {describe(self.file.tree)}, not a checkpoint")
        return self.file.tree

    @property
    def args(self) -> dict[str, Any]:
        return plain_attributes(self.content.get("args"))

    def chunks(self) -> list[Any]:
        """The model, or with the interleaved schedule its parts in order."""
        if "model" in self.content:
            return [self.content["model"]]
        parts: list[Any] = []
        while f"model{len(parts)}" in self.content:
            parts.append(self.content[f"model{len(parts)}"])
        if not parts:
            raise HoldfastError(f"{self.file.name} has no 'model': it is not a Megatron checkpoint")
        return parts


def find_rank_files(path: Path, budget: Budget) -> list[tuple[int, int, Region]]:
    """The files of all ranks, as (tensor rank, stage, bytes)."""
    if path.is_dir():
        folder = iteration_folder(path)
        found = [(file, RANK_FILE.match(file.as_posix())) for file in sorted(folder.glob("mp_rank_*/model*rng.pt"))]
        if len(found) > MAX_FILES:
            raise HoldfastError(f"{folder} has {len(found):,} rank files; more than {MAX_FILES:,} are not read")
        places = [(int(m[1]), int(m[2] or 0), map_file(file)) for file, m in found if m]
    else:
        region = map_file(path)
        members = read_directory(region, budget) if is_zip(region) else {}
        inner = {name: member for name, member in members.items() if ZIP_MEMBER.match(name)}
        if not inner:
            return [(0, 0, region)]
        if len({ZIP_MEMBER.match(name)[1] for name in inner}) > 1:  # type: ignore[index]
            raise HoldfastError(f"{path} holds more than one iteration; unpack one of them")
        places = []
        for name, member in sorted(inner.items()):
            match = RANK_FILE.match(name)
            assert match
            content = open_member(region, member)
            if member.method == 0:
                budget.unchecked[content.name] = (content, member.crc)
            places.append((int(match[1]), int(match[2] or 0), content))
    if not places:
        raise HoldfastError(f"{path} has no mp_rank_*/model_optim_rng.pt")
    grid = {(rank, stage) for rank, stage, _ in places}
    if len(grid) != len(places):
        raise HoldfastError(f"{path} has two files for one rank (expert parallelism is not supported)")
    ranks, stages = 1 + max(rank for rank, _ in grid), 1 + max(stage for _, stage in grid)
    for stage in range(stages):
        for rank in range(ranks):
            if (rank, stage) not in grid:
                raise HoldfastError(f"{path}: the file of tensor rank {rank}, pipeline stage {stage} is missing")
    return places


def iteration_folder(path: Path) -> Path:
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        return path
    with tracker.open("rb") as file:
        word = file.read(64).decode("latin-1").strip()
    if word == "release":
        return path / "release"
    if not re.fullmatch(r"\d{1,9}", word):
        raise HoldfastError(f"{tracker} holds {word!r}, where an iteration or 'release' is expected")
    return path / f"iter_{int(word):07d}"


def read_ranks(path: Path, budget: Budget) -> list[RankFile]:
    files = find_rank_files(path, budget)
    ranks = [RankFile(rank, stage, load_torch(region, budget)) for rank, stage, region in files]
    first = ranks[0]
    for rank in ranks:
        for key in ("iteration", "total_iters", "checkpoint_version"):
            here, there = plain(rank.content.get(key)), plain(first.content.get(key))
            if here != there:
                raise HoldfastError(
                    f"{rank.file.name} has {key} {here}, but {first.file.name} has {there}: the ranks do not belong together"
                )
    if "checkpoint_version" in first.content and not isinstance(first.content["checkpoint_version"], int | float):
        raise HoldfastError(f"{first.file.name}: checkpoint_version is {describe(first.content['checkpoint_version'])}")
    return ranks


def flatten(tree: Any, file: str) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a nested state dict under dotted names. Anything else where a tensor is expected is an error.

    Counts entries as it reaches them: nested dicts that share their content can hold any number of names.
    """
    entries = 0

    def walk(tree: Any, prefix: str, depth: int) -> Iterator[tuple[str, StoredTensor]]:
        nonlocal entries
        if not isinstance(tree, dict) or depth > 8:
            raise HoldfastError(f"{file}: {prefix or 'model'} is {describe(tree)}, where weights are expected")
        for key, value in tree.items():
            entries += 1
            if entries > MAX_TENSORS:
                raise HoldfastError(f"{file} has more than {MAX_TENSORS:,} parameters, the most that are read")
            if not isinstance(key, str) or len(prefix) + len(key) > MAX_NAME:
                raise HoldfastError(f"{file}: {prefix or 'model'} holds a name that is not text, or too long")
            name = f"{prefix}.{key}" if prefix else key
            if isinstance(value, StoredTensor):
                yield name, value
            elif isinstance(value, dict):
                yield from walk(value, name, depth + 1)
            elif not name.endswith("_extra_state"):
                raise HoldfastError(f"{file}: {name} is {describe(value)}, where a tensor is expected")

    return walk(tree, "", 0)
