"""Which attention kernel the fused layers call: measured on the run's own shape at its start, remembered per device and shape.

The answers are in `kernels.json` of the cache folder, so that a resumed run calls the kernels that it called before.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.assets.cache import cache_folder
from holdfast.config import Config
from holdfast.models.attention_backends import BACKENDS, milliseconds
from holdfast.models.layers import Shape
from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import transformer_layers
from holdfast.system.atomic_files import publish_text
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

DETERMINISTIC = ("flash", "efficient")
"""cuDNN's gradients of attention are not the same in every call."""


def choose_attention(config: Config, stages: Sequence[nn.Module], grid: Grid, dtype: torch.dtype) -> None:
    """Gives the fused layers of the stages their attention kernel: the configuration's, or the fastest one."""
    attentions: list[Any] = [
        layer.self_attention
        for stage in stages
        for layer in transformer_layers(stage)
        if getattr(layer, "fused", False)
    ]
    if not attentions or grid.device.type != "cuda":
        return
    model, shape = config.model, Shape.of(config.model)
    sizes = (config.train.micro_batch_size, model.num_attention_heads, config.data.seq_length, shape.head)
    causal = model.model_type == "gpt"
    masked = not causal  # BERT's samples are padded
    name = torch.cuda.get_device_name(grid.device)
    kind = f"{'causal' if causal else 'bidirectional'}{', masked' if masked else ''}, {shape.groups} groups, {dtype}"
    key = f"{name}, torch {torch.__version__}, attention {sizes}, {kind}"
    chosen, usable = fastest(
        config.train.attention_backend,
        key,
        lambda: milliseconds(sizes, shape.groups, masked, causal, dtype, grid.device),
        config.train.deterministic,
    )
    if grid.rank == 0:
        log(f"attention by {chosen}; forward and backward of a layer in ms: {_list(usable)}")
    for attention in attentions:
        attention.backend = chosen


def fastest(
    wanted: str, key: str, measure: Callable[[], dict[str, float]], deterministic: bool
) -> tuple[str, dict[str, float]]:
    """The backend to use, and the times of all that may be used. `wanted` is "auto" or the backend that the user chose."""
    times = _known(key)
    if not times:
        times = measure()
        _remember(key, times)
    usable = {name: ms for name, ms in times.items() if name in DETERMINISTIC or not deterministic}
    if wanted in usable:
        return wanted, usable
    if wanted != "auto" or not usable:
        raise HoldfastError(f"--attention-backend {wanted} cannot compute {key}: choose {_list(usable)}")
    return min(usable, key=lambda name: usable[name]), usable


def _list(times: dict[str, float]) -> str:
    return (
        ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda one: one[1]))
        or "--no-compile, which needs none"
    )


def _file() -> Path:
    return cache_folder() / "kernels.json"


def _kept() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _known(key: str) -> dict[str, float]:
    """The kept times of the backends that this version has; empty if there are none, or something else was kept."""
    times = _kept().get(key)
    if not isinstance(times, dict):
        return {}
    return {name: ms for name, ms in times.items() if name in BACKENDS and isinstance(ms, int | float)}


def _remember(key: str, times: dict[str, float]) -> None:
    """Best effort: a run that cannot write there measures again next time."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        publish_text(_file(), json.dumps({**_kept(), key: times}, indent=1))
    except (OSError, HoldfastError) as error:
        log(f"the measured kernel times are not kept: {error}")
