"""A source or a target as a function: its forward, from its own files and its own settings, for `--verify`.

The invariant: the reader's results (Model, Architecture) are not used here; settings are read a second time from args,
config.json or the run's configuration.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.checkpoint.reader import Checkpoint, open_checkpoint
from holdfast.config import ModelConfig
from holdfast.conversion.arithmetic import Ids, Rope
from holdfast.conversion.files.budget import Budget
from holdfast.conversion.files.raw_tensors import Array, RawTensor, floats, raw_of, raw_of_stored
from holdfast.conversion.holdfast_checkpoint import config_of
from holdfast.conversion.huggingface.forward import huggingface_forward
from holdfast.conversion.huggingface.names import with_prefixes
from holdfast.conversion.huggingface.read import read_json, read_weights
from holdfast.conversion.megatron.forward import ForwardSettings, MegatronForward, StageTensors, find
from holdfast.conversion.megatron.rank_files import flatten, iteration_folder, read_ranks
from holdfast.conversion.megatron.torch_dist import DistributedCheckpoint, read_args
from holdfast.conversion.sources import kind_of
from holdfast.conversion.stream import drop_pages
from holdfast.conversion.tensors import bits_type


@dataclass(frozen=True)
class ForwardFunction:
    run: Callable[[Ids, int, str | None], dict[str, Array]]
    """Ids, number of logits, and another activation for BERT's head than its own → logits and, for BERT, more."""
    activation: str
    head_activation: str


def open_forward(
    path: Path, rounded: str | None = None, heads: int | None = None, version: float | None = None
) -> ForwardFunction:
    """The function at a path. `rounded`: with every weight rounded to this element type. `heads`, `version`: as for reading."""
    kind = kind_of(path)
    if kind == "huggingface":
        return _huggingface(path, rounded)
    if kind == "holdfast":
        settings, parts = _holdfast(path, rounded)
    elif kind == "torch_dist":
        settings, parts = _torch_dist(path, rounded, heads)
    else:
        settings, parts = _megatron(path, rounded, heads, version)
    return ForwardFunction(MegatronForward(settings, parts).run, settings.activation, settings.head_activation)


def _huggingface(path: Path, rounded: str | None) -> ForwardFunction:
    config = read_json(path / "config.json")
    tensors, regions = read_weights(path, Budget())
    named = with_prefixes(config["model_type"], tensors)
    raw = {name: raw_of(tensor, lambda: drop_pages(regions), rounded) for name, tensor in named.items()}
    stated = config.get("activation_function", config.get("hidden_act", "gelu"))
    activation = "gelu" if stated == "gelu" else "gelu_tanh"
    return ForwardFunction(lambda ids, size, head: huggingface_forward(config, raw, ids, head), activation, activation)


def _megatron(
    path: Path, rounded: str | None, heads: int | None, version: float | None
) -> tuple[ForwardSettings, list[StageTensors]]:
    ranks = read_ranks(path, Budget())
    width, depth = 1 + max(rank.tensor_rank for rank in ranks), 1 + max(rank.stage for rank in ranks)
    place = {(rank.stage, rank.tensor_rank): rank for rank in ranks}
    parts: list[StageTensors] = [
        [
            {
                name: raw_of_stored(stored, rank.file.region.drop_pages, rounded)
                for rank in [place[stage, index]]
                for name, stored in flatten(rank.chunks()[chunk], rank.file.name)
            }
            for index in range(width)
        ]
        for chunk in range(len(ranks[0].chunks()))
        for stage in range(depth)
    ]
    stated = version if version is not None else ranks[0].content.get("checkpoint_version")
    return _settings(ranks[0].args, parts, heads, stated), parts


def _torch_dist(path: Path, rounded: str | None, heads: int | None) -> tuple[ForwardSettings, list[StageTensors]]:
    folder = iteration_folder(path)
    reader = DistributedCheckpoint(folder)
    args, _ = read_args(folder, reader)
    tensors: dict[str, RawTensor] = {}
    for name, shape in reader.shapes.items():
        stack = re.match(r"(.*\blayers\.)(?!\d)(.+)", name)
        for layer in range(shape[0]) if stack else [None]:
            key = name if layer is None or stack is None else f"{stack[1]}{layer}.{stack[2]}"
            tensors[key] = _chunked(reader, name, shape, layer, rounded)
    parts: list[StageTensors] = [[tensors]]
    return _settings(args, parts, heads, 3.0), parts


def _chunked(
    reader: DistributedCheckpoint, name: str, shape: tuple[int, ...], layer: int | None, rounded: str | None
) -> RawTensor:
    """A tensor of a distributed checkpoint, or one layer of a stack, read from its chunks."""
    whole = shape if layer is None else shape[1:]

    def read(start: int, stop: int) -> Array:
        out = np.full((stop - start, *whole[1:]), math.nan)
        for (offsets, _), info in reader.chunks[name]:
            stored = reader.load(info, name)
            bits = stored.view()
            if layer is not None:
                if not offsets[0] <= layer < offsets[0] + bits.shape[0]:
                    continue
                bits = bits[layer - offsets[0]]
            first, *rest = offsets if layer is None else offsets[1:]
            above, below = max(start, first), min(stop, first + bits.shape[0])
            if above < below:
                columns = tuple(slice(at, at + size) for at, size in zip(rest, bits.shape[1:], strict=True))
                out[(slice(above - start, below - start), *columns)] = floats(
                    bits[above - first : below - first], stored.dtype
                )
        return out

    return RawTensor(whole, read, lambda: drop_pages(reader.files.values()), rounded)


def _settings(args: Mapping[str, Any], parts: list[StageTensors], heads: int | None, version: Any) -> ForwardSettings:
    """Megatron's args as its models take them; for files without args, what Megatron did before it stored them."""
    first = parts[0][0]
    names = [name for part in parts for name in part[0]]
    bert, mcore = any("tokentype" in name for name in names), any("linear_qkv" in name for name in names)
    word = find(first, ["word_embeddings"], "weight")
    hidden = word.shape[1] if word is not None else 0
    count = int(args.get("num_attention_heads") or heads or 16)
    openai = args.get("openai_gelu") is True and not mcore if args else not bert
    fused = args.get("bias_gelu_fusion") is True or args.get("bias_activation_fusion") is True
    trunk = "swiglu" if args.get("swiglu") is True else "gelu_tanh" if openai or fused else "gelu"
    window, skip = args.get("window_size"), args.get("window_attn_skip_freq") or ()
    epsilon = args.get("norm_epsilon")
    epsilon = args.get("layernorm_epsilon") if epsilon is None else epsilon
    return ForwardSettings(
        heads=count,
        groups=int(args["num_query_groups"]) if args.get("group_query_attention") is True else count,
        width=int(args.get("kv_channels") or hidden // count),
        epsilon=1e-5 if epsilon is None else float(epsilon),
        activation=trunk,
        head_activation="gelu_tanh" if openai and args else "gelu",
        rms=args.get("normalization") == "RMSNorm",
        rope=_megatron_rope(args),
        window=int(window[0]) if window and window[0] >= 0 else None,
        skip=(skip,) if isinstance(skip, int) else tuple(skip),
        tied=args.get("untie_embeddings_and_output_weights") is not True,
        bert=bert,
        version=float(version) if version is not None else 3.0 if mcore else 0.0,
    )


def _megatron_rope(args: Mapping[str, Any]) -> Rope | None:
    kind = str(args.get("position_embedding_type")).rsplit(".", 1)[-1]
    if kind not in ("rope", "yarn") and args.get("use_rotary_position_embeddings") is not True:
        return None
    rope = Rope(float(args.get("rotary_base") or 10000), float(args.get("rotary_percent") or 1))
    linear = args.get("rotary_seq_len_interpolation_factor")
    if kind == "yarn":
        factor = float(args["yarn_rotary_scaling_factor"])
        scales = [args.get("yarn_mscale"), args.get("yarn_mscale_all_dim")]
        scales = [1.0, 0.0] if None in scales else scales
        above, below = (0.1 * float(scale) * math.log(factor) + 1 for scale in scales if scale is not None)
        original = float(args["yarn_original_max_position_embeddings"])
        betas = {"fast": float(args["yarn_beta_fast"]), "slow": float(args["yarn_beta_slow"])}
        return replace(rope, kind="yarn", factor=factor, original=original, attention=above / below, **betas)
    if args.get("use_rope_scaling") is True:
        return replace(rope, kind="llama3", factor=float(args.get("rope_scaling_factor") or 8.0))
    return replace(rope, kind="linear", factor=float(linear)) if linear else rope


def _holdfast(path: Path, rounded: str | None) -> tuple[ForwardSettings, list[StageTensors]]:
    checkpoint = open_checkpoint(path, untrusted=True)
    config = config_of(path, checkpoint).model
    tensors = {
        name.removeprefix("model."): _checkpoint_tensor(checkpoint, name, rounded)
        for name in checkpoint.tensors
        if name.startswith("model.")
    }
    gelu = "gelu_tanh" if config.openai_gelu else "gelu"
    settings = ForwardSettings(
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        width=config.kv_channels or config.hidden_size // config.num_attention_heads,
        epsilon=config.norm_epsilon,
        activation="swiglu" if config.swiglu else gelu.replace("gelu", "geglu") if config.geglu else gelu,
        head_activation=gelu,
        rms=config.normalization == "RMSNorm",
        rope=_rope_of(config) if config.position_embedding_type == "rope" else None,
        window=config.window_size[0] if config.window_size else None,
        skip=config.window_attn_skip_freq,
        divisor=config.query_pre_attn_scalar,
        score_bound=config.attn_logit_softcapping,
        logit_bound=config.final_logit_softcapping,
        norm_offset=1.0 if config.apply_layernorm_1p else 0.0,
        word_factor=math.sqrt(config.hidden_size) if config.scale_embeddings else 1.0,
        block_norms=config.post_block_norm,
        parallel=config.use_parallel_residual,
        tied=not config.untie_embeddings_and_output_weights,
        bert=config.model_type == "bert",
        post_norm=config.model_type == "bert" and config.bert_variant == "original",
    )
    return settings, [[tensors]]


def _rope_of(config: ModelConfig) -> Rope:
    return Rope(
        base=config.rotary_base,
        share=config.rotary_percent,
        kind=config.rope_scaling_type if config.use_rope_scaling else "default",
        factor=config.rope_scaling_factor,
        original=config.original_max_position_embeddings,
        low=config.rope_low_freq_factor,
        high=config.rope_high_freq_factor,
        fast=config.yarn_beta_fast,
        slow=config.yarn_beta_slow,
        attention=config.yarn_attention_factor,
    )


def _checkpoint_tensor(checkpoint: Checkpoint, name: str, rounded: str | None) -> RawTensor:
    dtype, shape = checkpoint.tensors[name]

    def read(start: int, stop: int) -> Array:
        return floats(checkpoint.tensor(name, (start, stop)).view(bits_type(dtype)), dtype)

    return RawTensor(tuple(shape), read, checkpoint.drop_pages, rounded)
