"""Which kernels the fused layers call: measured on the run's own shape at its start, remembered per device and shape.

The answers are in the folder `kernels` of the cache, one file each, so that a resumed run calls the kernels that it called
before, and runs that measure at the same time lose none.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast.assets.cache import cache_folder
from holdfast.config import Config
from holdfast.models import activation_products
from holdfast.models.attention_backends import BACKENDS, candidates, milliseconds
from holdfast.models.attention_kernels import Asked
from holdfast.models.layers import Shape
from holdfast.models.segments import Segments
from holdfast.parallel.mesh import Grid
from holdfast.parallel.tensor import transformer_layers
from holdfast.system.atomic_files import publish_text
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import log

SLOWER = 1.1


def choose_kernels(config: Config, stages: Sequence[nn.Module], grid: Grid, dtype: torch.dtype) -> None:
    """Gives the fused layers of the stages their kernels: the configuration's, or the fastest ones."""
    layers = [layer for stage in stages for layer in transformer_layers(stage) if getattr(layer, "fused", False)]
    if layers and grid.device.type == "cuda":
        _choose_attention(config, layers, grid, dtype)
        _choose_mlp(config, layers, grid, dtype)


def _choose_attention(config: Config, layers: Sequence[Any], grid: Grid, dtype: torch.dtype) -> None:
    model, shape = config.model, Shape.of(config.model)
    sizes = (config.train.micro_batch_size, model.num_attention_heads, config.data.seq_length, shape.head)
    asked, kind = _asked(config, dtype, grid.device)
    names = candidates(sizes, shape.groups, asked, grid.device)
    allowed = [name for name in names if BACKENDS[name].repeats or not config.train.deterministic]
    key = f"{_device(grid)}, attention {sizes}, {kind}, {shape.groups} groups, {dtype}, {' '.join(names)}"
    chosen, times = fastest(
        "--attention-backend",
        config.train.attention_backend,
        key,
        lambda: milliseconds(sizes, shape.groups, asked, dtype, grid.device),
        allowed,
    )
    if grid.rank == 0:
        log(f"attention by {chosen}; forward and backward of a layer in ms: {_list(times)}")
    for layer in layers:
        layer.self_attention.backend = chosen


def _choose_mlp(config: Config, layers: Sequence[Any], grid: Grid, dtype: torch.dtype) -> None:
    """GELU in the products' epilogue, where the package for that is installed and the layers have such a GELU."""
    mlp, wanted = layers[0].mlp, config.train.mlp_backend
    usable = activation_products.usable() and not mlp.gated and mlp.approximate == "tanh"
    if wanted == "auto" and (not usable or config.train.deterministic):
        return
    rows = config.train.micro_batch_size * config.data.seq_length
    sizes = rows, config.model.hidden_size, Shape.of(config.model).ffn
    chosen, times = fastest(
        "--mlp-backend",
        wanted,
        f"{_device(grid)}, MLP {sizes}, {dtype}, quack {usable}",
        lambda: activation_products.milliseconds(*sizes, dtype, grid.device),
        [activation_products.SEPARATE, *([activation_products.QUACK] if usable else [])],
    )
    if grid.rank == 0:
        log(f"GELU by {chosen} kernels; with its products, forward and backward of a layer in ms: {_list(times)}")
    for layer in layers:
        layer.mlp.epilogue = chosen == activation_products.QUACK


def _device(grid: Grid) -> str:
    return f"{torch.cuda.get_device_name(grid.device)}, torch {torch.__version__}"


def _asked(config: Config, dtype: torch.dtype, device: torch.device) -> tuple[Asked, str]:
    """What the layers compute beside q, k and v, with values of no meaning, and its name."""
    batch, tokens = config.train.micro_batch_size, config.data.seq_length
    if config.model.model_type != "gpt":  # samples are padded
        return Asked(torch.zeros(batch, 1, 1, tokens, dtype=dtype, device=device), False), "bidirectional, padded"
    window = config.model.window_size if tokens > max(config.model.window_size, default=tokens) + 1 else ()
    if config.data.reset_attention_mask or config.data.packing == "best-fit":
        halves = torch.arange(tokens, device=device) * 2 // tokens  # documents of half a sample
        return Asked(None, True, Segments.of(halves.expand(batch, -1), window)), f"documents, window {window}"
    if window:
        return Asked(None, True, Segments.rows(batch, tokens, window, device)), f"window {window}"
    return Asked(None, True), "causal"


def fastest(
    flag: str, wanted: str, key: str, measure: Callable[[], dict[str, float]], allowed: Collection[str]
) -> tuple[str, dict[str, float]]:
    """The kernel to use, and the times of all that may be used. `wanted` is "auto" or what the user chose with `flag`."""
    times = _known(key, allowed)
    if not times:
        measured = measure()
        _remember(key, measured)
        times = {name: ms for name, ms in measured.items() if name in allowed}
    if wanted in times:
        return wanted, times
    if wanted != "auto" or not times:
        raise HoldfastError(f"{flag} {wanted} cannot compute {key}: choose {_list(times)}")
    return min(times, key=lambda name: times[name]), times


def _list(times: dict[str, float]) -> str:
    return (
        ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(times.items(), key=lambda one: one[1]))
        or "--no-compile, which needs none"
    )


@dataclass(frozen=True)
class GraphChoice:
    """Whether a pass runs as a CUDA graph, unless the user says it. The graph also spares the host, and single passes vary by a
    few percent, so it has to be clearly slower to be left out."""

    key: str
    rank: int

    @staticmethod
    def of(config: Config, grid: Grid) -> "GraphChoice | None":
        if grid.device.type != "cuda":
            return None
        train, data = config.train, config.data
        batch = train.micro_batch_size, data.seq_length, data.reset_attention_mask, data.packing
        types = train.bf16, train.fp16, train.fp8 and train.fp8_recipe
        digest = hashlib.sha256(repr(config.model).encode()).hexdigest()[:16]
        others = train.recompute_granularity, train.deterministic
        return GraphChoice(f"{_device(grid)}, pass of model {digest}, {batch}, {types}, {others}", grid.rank)

    def known(self) -> bool | None:
        """What was measured before; None if nothing was."""
        times = _known(self.key, ("eager", "graph"))
        return None if len(times) < 2 else times["graph"] <= SLOWER * times["eager"]

    def decide(self, eager: float, graph: float) -> bool:
        """Whether to use the graph, from the milliseconds of a pass without and with it."""
        if self.rank == 0:
            log(f"forward and backward: {eager:.1f} ms kernel by kernel, {graph:.1f} ms as a CUDA graph")
        _remember(self.key, {"eager": eager, "graph": graph})
        return graph <= SLOWER * eager


def _file(key: str) -> Path:
    return cache_folder() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def _known(key: str, allowed: Collection[str]) -> dict[str, float]:
    """The kept times of what may be used; empty if there are none, or something else was kept."""
    try:
        kept = json.loads(_file(key).read_text())
    except (OSError, ValueError):
        return {}
    times = kept.get("ms") if isinstance(kept, dict) and kept.get("what") == key else None
    if not isinstance(times, dict):
        return {}
    return {name: ms for name, ms in times.items() if name in allowed and isinstance(ms, int | float)}


def _remember(key: str, times: dict[str, float]) -> None:
    """Best effort: a run that cannot write there measures again next time."""
    try:
        _file(key).parent.mkdir(parents=True, exist_ok=True)
        publish_text(_file(key), json.dumps({"what": key, "ms": times}, indent=1))
    except (OSError, HoldfastError) as error:
        log(f"the measured kernel times are not kept: {error}")
