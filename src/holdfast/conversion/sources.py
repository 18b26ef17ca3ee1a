"""Recognises what a path is, and reads it as a Model."""

from collections.abc import Collection
from pathlib import Path

from holdfast.conversion.files.torch_reader import is_torch_file
from holdfast.conversion.files.zips import is_zip, map_file
from holdfast.conversion.huggingface.read import is_huggingface, read_huggingface
from holdfast.conversion.megatron.read import read_megatron
from holdfast.conversion.megatron.torch_dist import is_torch_dist, read_torch_dist, refuse_other_formats
from holdfast.conversion.model import Model
from holdfast.system.errors import HoldfastError


def kind_of(path: Path) -> str | None:
    """megatron, torch_dist, huggingface or holdfast; None if it holds no model."""
    if path.is_file():
        if path.stat().st_size == 0:
            return None
        region = map_file(path)
        return "megatron" if is_zip(region) or is_torch_file(region) else None
    if not path.is_dir():
        return None
    if is_huggingface(path):
        return "huggingface"
    if is_torch_dist(path):
        return "torch_dist"
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*/model*rng.pt")):
        return "megatron"
    from holdfast.conversion.holdfast_checkpoint import is_holdfast

    return "holdfast" if is_holdfast(path) else None


def read_model(
    path: Path, heads: int | None = None, version: float | None = None, ignored: Collection[str] = ()
) -> Model:
    """The model at a path, in any of these formats.

    `heads` and `version` are for Megatron files without them; `ignored` names args of Megatron that may be unknown.
    """
    if not path.exists():
        raise HoldfastError(f"{path}: no such file or folder")
    if not path.is_file() and not path.is_dir():
        raise HoldfastError(f"{path} is not a regular file")
    try:
        model = _read(path, heads, version, ignored)
        found = model.architecture.num_attention_heads
        if heads not in (None, found):
            raise HoldfastError(f"--num-attention-heads {heads} contradicts {path}, which has {found} heads")
        return model
    except HoldfastError as error:
        # Names out of the file are part of many messages, and a file may call a tensor anything, line breaks included.
        message = "".join(character if character.isprintable() else "?" for character in str(error)[:2000])
        raise HoldfastError(message) from None


def _read(path: Path, heads: int | None, version: float | None, ignored: Collection[str]) -> Model:
    kind = kind_of(path)
    if kind == "huggingface":
        return read_huggingface(path)
    if kind == "torch_dist":
        return read_torch_dist(path, heads, ignored)
    if kind == "holdfast":
        from holdfast.conversion.holdfast_checkpoint import read_holdfast

        return read_holdfast(path)
    if path.is_dir():
        refuse_other_formats(path)
    if kind == "megatron":
        return read_megatron(path, heads, version, ignored)
    raise HoldfastError(
        f"{path} is not a checkpoint that Holdfast knows: neither a Megatron file, zip or folder, nor a Hugging Face folder, "
        "nor a run of Holdfast"
    )
