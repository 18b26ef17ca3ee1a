"""Loading a training state from a checkpoint, in whatever layout the state has now.

The invariant: either every tensor of the state holds verified bytes of one checkpoint afterwards, or all ranks raise the
same error, which names the file or tensor. A rank reads only the row ranges that it needs; together the ranks verify all
of it.
"""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from holdfast.checkpoint.collective import agreed, gather, rank_and_world
from holdfast.checkpoint.folder import checkpoints_in
from holdfast.checkpoint.json_state import DTYPES
from holdfast.checkpoint.reader import Tensors, open_checkpoint
from holdfast.checkpoint.state import Item, State
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log


def load(path: Path | str, state: State, optimizer: bool = True, weights_only: bool = False) -> dict[str, Any]:
    """Loads a checkpoint into the state's tensors, in place; collective. Returns the shared state, with its `step`.

    `optimizer=False` leaves the optimizer as it is. `weights_only=True` takes the model's tensors alone (fine-tuning):
    their dtype may differ, and of the small state nothing is taken. `state.shared` and, at an unchanged world size,
    `state.per_rank` are replaced by what was saved.
    """
    with state.undone_on_error():
        return _load(path, state, optimizer and not weights_only, weights_only)


def _load(path: Path | str, state: State, optimizer: bool, weights_only: bool) -> dict[str, Any]:
    with agreed():
        checkpoint = open_checkpoint(path)
        load_into(checkpoint, state, checkpoint.manifest.padded_rows, optimizer, any_dtype=weights_only)
        if not weights_only:
            checkpoint.verify(*rank_and_world())
    manifest = checkpoint.manifest
    refuse_unused(manifest.tensors, state, f"the checkpoint of step {manifest.step}")
    if optimizer:
        state.apply_optimizer_settings(manifest.optimizer_settings)
    shared = {**manifest.shared, "step": manifest.step}
    if not weights_only:
        rank, world = rank_and_world()
        state.shared = manifest.shared
        state.per_rank = manifest.per_rank[rank] if len(manifest.per_rank) == world else {}
    return shared


def load_newest(
    path: Path | str, state: State, optimizer: bool = True, weights_only: bool = False
) -> tuple[Path, dict[str, Any]] | None:
    """Loads the newest checkpoint of a run that is whole, and logs which newer ones are not. None if there is none at all.

    Raises when there are checkpoints and all of them are damaged: a new start is the user's decision.
    """
    rank, _ = rank_and_world()
    # Rank 0 lists them: a shared file system may show a new folder to one node before another.
    candidates: list[str] = gather([str(found) for _, found in checkpoints_in(path)] if rank == 0 else [])[0]
    troubles: list[str] = []
    for candidate in reversed(candidates):
        try:
            shared = load(candidate, state, optimizer, weights_only)
        except HoldfastError as error:
            troubles.append(str(error))
            log(f"checkpoint {candidate} cannot be used; trying the next one: {error}")
            continue
        return Path(candidate), shared
    if troubles:
        raise HoldfastError(f"no checkpoint in {path} can be used: {'; '.join(troubles)}")
    return None


def load_into(
    source: Tensors, state: State, padded_rows: Mapping[str, int], optimizer: bool = True, any_dtype: bool = False
) -> None:
    """Copies this rank's slices of the source's tensors into the state; checks names, shapes and dtypes first. Not collective."""
    if optimizer:
        state.create_optimizer_state(source.tensors)
    known = {**padded_rows, **state.padded_rows}
    items = [item for item in state.items(optimizer) if math.prod(item.box.shape)]
    for item in items:
        _check(source, item, _true_rows(known, item.name), any_dtype)
    with torch.no_grad():
        for item in items:
            _copy(source, item, _true_rows(known, item.name))
    for device in {item.local.device for item in items if item.local.is_cuda}:
        torch.cuda.synchronize(device)


def _check(source: Tensors, item: Item, true_rows: int | None, any_dtype: bool) -> None:
    if item.name not in source.tensors:
        raise HoldfastError(f"{source.origin} has no tensor {item.name}, which this model needs")
    dtype, shape = source.tensors[item.name]
    wanted = item.box.global_shape
    if shape != wanted and not (true_rows is not None and shape[1:] == wanted[1:]):
        raise HoldfastError(
            f"{item.name} has shape {list(shape)} in {source.origin}, but {list(wanted)} in this model: "
            "the model's configuration differs from the one that was saved"
        )
    if dtype != item.box.dtype and not any_dtype:
        raise HoldfastError(f"{item.name} is {dtype} in {source.origin}, but {item.box.dtype} in this model")


def _copy(source: Tensors, item: Item, true_rows: int | None) -> None:
    offset, shape = item.box.offset, item.box.shape
    dtype, saved = source.tensors[item.name]
    if saved != item.box.global_shape:
        assert true_rows is not None
        item.local.zero_()
        shape = (max(0, min(shape[0], true_rows - offset[0])), *shape[1:])
    for slices, part in source.parts(item.name, offset, shape):
        item.local[slices].copy_(_tensor(part, dtype), non_blocking=True)


def _tensor(part: NDArray[Any] | torch.Tensor, dtype: str) -> torch.Tensor:
    tensor = part if isinstance(part, torch.Tensor) else torch.from_numpy(part)
    return tensor if tensor.dtype == DTYPES[dtype] else tensor.view(DTYPES[dtype])


def _true_rows(known: Mapping[str, int], name: str) -> int | None:
    """The rows of a padded parameter (or of its optimizer tensors) that are not padding; None if it is not padded."""
    kind, _, parameter = name.partition(".")
    return known.get(parameter.rpartition(".")[0] if kind == "optimizer" else parameter)


def refuse_unused(tensors: Iterable[str], state: State, what: str, group: Any = None) -> None:
    """Raises if no rank needs a saved tensor: it belongs to another model."""
    used = {name for names in gather([item.name for item in state.items(optimizer=False)], group) for name in names}
    unused = [name for name in tensors if name.startswith("model.") and name not in used]
    if unused:
        few = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        raise HoldfastError(f"{what} holds tensors that this model does not have: {few}")
