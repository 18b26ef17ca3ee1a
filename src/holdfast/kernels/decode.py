"""The kernels of a decoding step as functions over tensors: choice of tiles, grids, dependent launch (`pdl`).

Shapes: B rows (sequences), N outputs, K inputs, G query groups, S cache length, D head width.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from holdfast.kernels import decode_linear as linear_kernels
from holdfast.kernels import decode_matrix as matrix_kernels
from holdfast.kernels.decode_attention import decode_attention, decode_merge
from holdfast.kernels.grid import power_of_two, processors, shared_memory

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
INPUTS = {
    "plain": linear_kernels.PLAIN,
    "LayerNorm": linear_kernels.LAYER_NORM,
    "RMSNorm": linear_kernels.RMS_NORM,
}
OUTPUTS = {
    "store": linear_kernels.STORE,
    "gelu_tanh": linear_kernels.GELU_TANH,
    "gelu": linear_kernels.GELU_ERF,
    "swiglu": linear_kernels.SWIGLU,
    "add": linear_kernels.ADD,
    "partial": linear_kernels.PARTIAL,
}
MAX_SPLITS = 8


@dataclass(frozen=True)
class Weight:
    """A matrix (N, K) and its bias as the kernels read them: in the compute type, or quantized with a scale per row."""

    values: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None


QUANTIZED = {"int8": (torch.uint8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""Type of a quantized weight, and its largest value. Integers are stored with 128 added."""


def quantize(weight: Weight, kind: str) -> Weight:
    """The weight with 8-bit values and a scale per row, so that each row's largest value is kept."""
    dtype, largest = QUANTIZED[kind]
    wide = weight.values.float()
    scale = wide.abs().amax(1).clamp(min=1e-12) / largest
    scaled = wide / scale[:, None]
    return Weight((scaled.round() + 128 if kind == "int8" else scaled).to(dtype), weight.bias, scale)


@dataclass(frozen=True)
class DecodeNorm:
    """LayerNorm or RMSNorm (`kind`); only the first has a shift."""

    kind: str
    gain: Tensor
    shift: Tensor | None
    eps: float


@dataclass(frozen=True)
class Tile:
    """How the product of one row is cut: outputs per program, inputs per iteration."""

    outputs: int
    inputs: int
    warps: int


def choose_tile(outputs: int, inputs: int, paired: bool, device: torch.device) -> Tile:
    """About four programs per processor; the weights that a program loads before it waits fit into registers."""
    if inputs > 4096:
        return Tile(8, 2048, 8)
    if inputs > 2048:
        return Tile(2 if outputs <= 2048 else 4, 4096, 8)
    columns = power_of_two(inputs)
    wanted = triton.cdiv(outputs, 4 * processors(device)) // (2 if paired else 1)
    block = 1 << max(4, min(wanted, 16)).bit_length() - 1
    return Tile(block, columns, max(1, min(8, block * columns // 4096)))


def choose_splits(rows: int, groups: int, length: int, device: torch.device) -> int:
    """Programs that share the keys of one sequence and group: all of them together occupy the device."""
    wanted = min(processors(device) // (rows * groups), length // 128, MAX_SPLITS)
    return 1 << max(wanted, 1).bit_length() - 1


@dataclass(frozen=True)
class AttentionTile:
    """Keys per iteration and pipeline depth of the loop over keys."""

    keys: int
    stages: int
    warps: int


def choose_attention_tile(programs: int, width: int, device: torch.device) -> AttentionTile:
    """Many programs: few keys at a time in a pipeline. Few: as many keys as possible before the kernel waits."""
    if programs >= 4 * processors(device):
        return AttentionTile(max(8, min(32, 4096 // width)), 3, 4)
    if programs >= processors(device) * 3 // 4:
        return AttentionTile(max(8, min(256, 16384 // width)), 1, 16)
    return AttentionTile(max(8, min(64, 8192 // width)), 1, 4)


def embed(tokens_B: Tensor, positions_B: Tensor, words: Tensor, places: Tensor | None, x: Tensor, pdl: bool) -> None:
    """x (B, K): word and position vectors. The kernel waits for all earlier work, as kernels of torch do."""
    rows, columns = x.shape
    block = power_of_two(columns)
    linear_kernels.decode_embedding[(rows,)](
        tokens_B, positions_B, words, words if places is None else places, x, columns, places is not None, block, pdl,
        num_warps=4,
    )  # fmt: skip


def norm(x: Tensor, norm: DecodeNorm, out: Tensor, partial: Tensor | None, bias: Tensor | None, pdl: bool) -> None:
    """out (B, K): the norm of the residual stream x, after `partial` (parts, B, K) and `bias` were added to it."""
    rows, columns = x.shape
    matrix_kernels.decode_norm[(rows,)](
        x, _or(partial, x), _or(bias, x), norm.gain, _or(norm.shift, norm.gain), out, norm.eps, INPUTS[norm.kind],
        0 if partial is None else len(partial), bias is not None, columns, power_of_two(columns), pdl,
        num_warps=4, **_launch(pdl),
    )  # fmt: skip


def project_qkv(
    x: Tensor, norm: DecodeNorm, weight: Weight, query: Tensor, keys_BGSD: Tensor, values_BGSD: Tensor,
    positions_B: Tensor, rotary: tuple[Tensor, Tensor] | None, pdl: bool,
) -> None:  # fmt: skip
    """query (1, heads, D), and the new key and value in the cache at the position, from rows ordered (G, Q + 2, D).

    `rotary`: cosines and sines (positions, D / 2), fp32.
    """
    columns, outputs = x.shape[1], len(weight.values)
    _, heads, head = query.shape
    tile = choose_tile(outputs, columns, rotary is not None, x.device)
    programs = triton.cdiv(outputs // (1 if rotary is None else 2), tile.outputs)
    cosines, sines = rotary or (x, x)
    linear_kernels.decode_qkv[(programs,)](
        x, norm.gain, _or(norm.shift, x), weight.values, _or(weight.scale, x), _or(weight.bias, x), query, keys_BGSD,
        values_BGSD, positions_B, cosines, sines, outputs, norm.eps, keys_BGSD.stride(0), keys_BGSD.stride(1),
        INPUTS[norm.kind], rotary is not None, weight.scale is not None, weight.bias is not None,
        columns, heads, heads // keys_BGSD.shape[1], head, tile.outputs, tile.inputs, pdl,
        num_warps=tile.warps, **_launch(pdl),
    )  # fmt: skip


def attend(
    query: Tensor, keys_BGSD: Tensor, values_BGSD: Tensor, positions_B: Tensor, out: Tensor, lse: Tensor, pdl: bool
) -> None:
    """out (splits, B, heads · D) and lse (splits, B, heads): each query over the keys up to its position."""
    rows, heads, head = query.shape
    groups, splits = keys_BGSD.shape[1], len(out)
    per_group, width = power_of_two(heads // groups), power_of_two(head)
    tile = choose_attention_tile(rows * groups * splits, per_group * width, query.device)
    decode_attention[(rows, groups, splits)](
        query, keys_BGSD, values_BGSD, positions_B, out, lse, keys_BGSD.stride(0), keys_BGSD.stride(1), head**-0.5,
        groups, heads // groups, head, splits, per_group, tile.keys, width, tile.stages, pdl,
        num_warps=tile.warps, **_launch(pdl),
    )  # fmt: skip


def merge(attended: Tensor, lse: Tensor, out: Tensor, pdl: bool) -> None:
    """out (B, heads · D) from the splits (splits, B, heads · D)."""
    splits, rows, heads = lse.shape
    head = out.shape[1] // heads
    decode_merge[(rows * heads,)](
        attended, lse, out, splits, head, power_of_two(head), pdl, num_warps=1, **_launch(pdl)
    )


def linear(
    x: Tensor, weight: Weight, out: Tensor, pdl: bool, *, output: str = "store", norm: DecodeNorm | None = None,
    twin: Weight | None = None,
) -> None:  # fmt: skip
    """out (1, N) from x (1, K). `output`: a key of OUTPUTS."""
    columns, outputs = x.shape[-1], out.shape[1]
    tile = choose_tile(outputs, columns, twin is not None, x.device)
    gain, shift, eps = (norm.gain, _or(norm.shift, x), norm.eps) if norm else (x, x, 0.0)
    pair = twin or weight
    linear_kernels.decode_linear[(triton.cdiv(outputs, tile.outputs),)](
        x, gain, shift, weight.values, pair.values, _or(weight.scale, x), _or(pair.scale, x),
        _or(weight.bias, x), _or(pair.bias, x), out, outputs, eps,
        INPUTS[norm.kind if norm else "plain"], OUTPUTS[output], weight.scale is not None, weight.bias is not None,
        columns, tile.outputs, tile.inputs, pdl, num_warps=tile.warps, **_launch(pdl),
    )  # fmt: skip


@dataclass(frozen=True)
class MatrixTile:
    """How a product of several rows is cut: outputs per program, inputs per iteration, pipeline depth, order of the factors."""

    outputs: int
    inputs: int
    stages: int
    weights_first: bool
    warps: int = 4


def choose_matrix_tile(rows: int, outputs: int, inputs: int, paired: bool, device: torch.device) -> MatrixTile:
    """`inputs`: those of one part. The pipeline is as deep as shared memory allows, up to what was measured to help."""
    if inputs <= 256:
        block, columns, first = 16 if rows <= 16 else 32, 128, False
    elif rows <= 16:
        block, columns, first = 64, 128, True
    else:
        block, columns, first = (64, 64, False) if outputs > 16384 else (32, 128, False)
    padded = max(16 if first else 64, power_of_two(rows))
    stage = 2 * columns * (padded + block * (2 if paired else 1))
    stages = max(2, min(6 if inputs > 256 else 4, (shared_memory(device) - 4096) // stage))
    return MatrixTile(block, columns, stages, first)


def matrix_rows(rows: int, tile: MatrixTile) -> int:
    """Rows with padding; those of the first factor are 64 at a time."""
    return max(16 if tile.weights_first else 64, power_of_two(rows))


def count_parts(inputs: int, wanted: int) -> int:
    """Parts, `wanted` at most, into which a product divides its inputs."""
    return -(-inputs // power_of_two(-(-inputs // wanted)))


def matrix_qkv(
    x: Tensor, weight: Weight, query: Tensor, keys_BGSD: Tensor, values_BGSD: Tensor, positions_B: Tensor,
    rotary: tuple[Tensor, Tensor] | None, dtype: torch.dtype, pdl: bool,
) -> None:  # fmt: skip
    """As `project_qkv`, for several rows that are already normed."""
    rows, columns = x.shape
    _, heads, head = query.shape
    groups, outputs = keys_BGSD.shape[1], len(weight.values)
    tile = choose_matrix_tile(rows, outputs, columns, rotary is not None, x.device)
    programs = triton.cdiv(outputs // (1 if rotary is None else 2), tile.outputs)
    cosines, sines = rotary or (x, x)
    matrix_kernels.decode_matrix_qkv[(programs,)](
        x, weight.values, _or(weight.scale, x), _or(weight.bias, x), query, keys_BGSD, values_BGSD, positions_B,
        cosines, sines, rows, outputs, keys_BGSD.stride(0), keys_BGSD.stride(1),
        rotary is not None, weight.scale is not None, weight.bias is not None, columns, power_of_two(columns),
        heads, heads // groups, head, TYPES[dtype], matrix_rows(rows, tile), tile.outputs, tile.inputs, tile.stages,
        tile.weights_first, pdl,
        num_warps=tile.warps, **_launch(pdl),
    )  # fmt: skip


def matrix(
    x: Tensor, weight: Weight, out: Tensor, dtype: torch.dtype, pdl: bool, *, output: str = "store",
    twin: Weight | None = None,
) -> None:  # fmt: skip
    """out (B, N) from x (B, K); output "partial" gives the sums (parts, B, N) of as many parts of the inputs as `out` has."""
    rows, columns = x.shape
    outputs = out.shape[-1]
    parts = len(out) if output == "partial" else 1
    span = power_of_two(triton.cdiv(columns, parts))
    tile = choose_matrix_tile(rows, outputs, span, twin is not None, x.device)
    pair = twin or weight
    biased = weight.bias is not None and output != "partial"
    matrix_kernels.decode_matrix[(triton.cdiv(outputs, tile.outputs), triton.cdiv(columns, span))](
        x, weight.values, pair.values, _or(weight.scale, x), _or(pair.scale, x), _or(weight.bias, x), _or(pair.bias, x),
        out, rows, outputs, OUTPUTS[output], weight.scale is not None, biased,
        columns, span, TYPES[dtype], matrix_rows(rows, tile), tile.outputs, min(span, tile.inputs), tile.stages,
        tile.weights_first, pdl,
        num_warps=tile.warps, **_launch(pdl),
    )  # fmt: skip


def _or(tensor: Tensor | None, unused: Tensor) -> Tensor:
    """A pointer for an argument that the kernel does not read."""
    return unused if tensor is None else tensor


def _launch(pdl: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if pdl else {}
