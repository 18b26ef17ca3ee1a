"""Filling a training state from a checkpoint, in whatever layout the state has now.

The invariant: either every tensor of the state holds verified bytes of one checkpoint afterwards, or all ranks raise the
same error, which names the file or tensor. A rank reads only the row ranges that it needs; together the ranks verify all
of it.
"""

import math
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from holdfast.checkpoint.collective import agree, gather, rank_and_world
from holdfast.checkpoint.folder import checkpoints_in
from holdfast.checkpoint.manifest import Manifest
from holdfast.checkpoint.reader import Checkpoint, open_checkpoint
from holdfast.checkpoint.state import DTYPES, Item, State
from holdfast.errors import HoldfastError
from holdfast.progress import say


def load(path: Path | str, state: State, optimizer: bool = True, weights_only: bool = False) -> dict[str, Any]:
    """Loads a checkpoint into the state's tensors, in place; collective. Returns the shared state, with its `step`.

    `optimizer=False` leaves the optimizer as it is. `weights_only=True` takes the model's tensors alone (fine-tuning):
    their dtype may differ, and of the small state nothing is taken. `state.shared` and, at an unchanged world size,
    `state.per_rank` are replaced by what was saved.
    """
    optimizer = optimizer and not weights_only
    trouble, checkpoint = None, None
    try:
        checkpoint = open_checkpoint(path)
        _fill_all(checkpoint, state, optimizer, weights_only)
        if not weights_only:
            checkpoint.verify(*rank_and_world())
    except Exception as error:
        trouble = error
    agree(trouble)
    assert checkpoint is not None
    manifest = checkpoint.manifest
    _refuse_unused(manifest, state)
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
    """Loads the newest checkpoint of a run that is whole, and says which newer ones were not. None where there is none at all.

    Raises when there are checkpoints and all of them are damaged: starting afresh must be the user's decision.
    """
    rank, _ = rank_and_world()
    # rank 0 decides what is there: a shared file system may show a new folder to one node before another
    candidates: list[str] = gather([str(found) for _, found in checkpoints_in(path)] if rank == 0 else [])[0]
    troubles: list[str] = []
    for candidate in reversed(candidates):
        try:
            shared = load(candidate, state, optimizer, weights_only)
        except HoldfastError as error:
            troubles.append(str(error))
            say(f"checkpoint {candidate} cannot be used, trying the one before: {error}")
            continue
        return Path(candidate), shared
    if troubles:
        raise HoldfastError(f"no checkpoint in {path} can be used: {'; '.join(troubles)}")
    return None


def _fill_all(checkpoint: Checkpoint, state: State, optimizer: bool, any_dtype: bool) -> None:
    if optimizer:
        state.create_optimizer_state(checkpoint.tensors)
    for item in state.items(optimizer):
        if math.prod(item.box.shape):
            _check(checkpoint, item, _true_rows(checkpoint.manifest, state, item.name), any_dtype)
    with torch.no_grad():
        for item in state.items(optimizer):
            if math.prod(item.box.shape):
                _fill(checkpoint, item, _true_rows(checkpoint.manifest, state, item.name))


def _check(checkpoint: Checkpoint, item: Item, true_rows: int | None, any_dtype: bool) -> None:
    if item.name not in checkpoint.manifest.tensors:
        raise HoldfastError(f"{checkpoint.path} has no tensor {item.name}, which this model needs")
    dtype, shape = checkpoint.tensors[item.name]
    wanted = item.box.global_shape
    if shape != wanted and not (true_rows is not None and shape[1:] == wanted[1:]):
        raise HoldfastError(
            f"{item.name} has shape {list(shape)} in {checkpoint.path}, but {list(wanted)} in this model: "
            "the model's configuration differs from the one that was saved"
        )
    if dtype != item.box.dtype and not any_dtype:
        raise HoldfastError(f"{item.name} is {dtype} in {checkpoint.path}, but {item.box.dtype} in this model")


def _fill(checkpoint: Checkpoint, item: Item, true_rows: int | None) -> None:
    offset, shape = item.box.offset, item.box.shape
    dtype, saved = checkpoint.tensors[item.name]
    if saved != item.box.global_shape:
        assert true_rows is not None
        item.local.zero_()
        shape = (max(0, min(shape[0], true_rows - offset[0])), *shape[1:])
    for slices, part in checkpoint.parts(item.name, offset, shape):
        item.local[slices].copy_(_tensor(part, dtype))


def _tensor(part: NDArray[Any], dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(part)
    return tensor if tensor.dtype == DTYPES[dtype] else tensor.view(DTYPES[dtype])


def _true_rows(manifest: Manifest, state: State, name: str) -> int | None:
    """The rows of a padded parameter (or of its optimizer tensors) that mean something; None if it is not padded."""
    kind, _, parameter = name.partition(".")
    if kind == "optimizer":
        parameter = parameter.rpartition(".")[0]
    return state.padded_rows.get(parameter, manifest.padded_rows.get(parameter))


def _refuse_unused(manifest: Manifest, state: State) -> None:
    """A saved tensor that no rank has a place for means that this is another model."""
    used = {name for names in gather([item.name for item in state.items(optimizer=False)]) for name in names}
    unused = [name for name in manifest.tensors if name.startswith("model.") and name not in used]
    if unused:
        few = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if len(unused) > 3 else "")
        raise HoldfastError(
            f"the checkpoint of step {manifest.step} holds tensors that this model does not have: {few}"
        )
