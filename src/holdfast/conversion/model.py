"""The canonical model between all formats: an architecture, and whole tensors under Holdfast's own parameter names.

The invariant: a Model that passed `check_complete` has exactly the tensors that its architecture demands, with exactly those
shapes; nothing unknown, nothing missing. Query, key and value rows are [query groups, heads per group + 2, head width], gate and
up projections are apart, vocabulary tables have `padded_vocab_size` rows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from holdfast.conversion.files.zips import Region, check_crc
from holdfast.conversion.tensors import Tensor
from holdfast.system.errors import HoldfastError

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
FLOATS = ("F64", "F32", "F16", "BF16")
VOCABULARY_TENSORS = (WORD_EMBEDDINGS, OUTPUT_LAYER, "output_layer.bias")


MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 12
MAX_HEADS_IN_ALL = 1 << 15


def check_heads(layers: int, heads: int) -> None:
    """Refuses numbers that no model has: every head of every layer may become a piece of its own."""
    if layers > MAX_LAYERS or heads > MAX_HEADS or layers * heads > MAX_HEADS_IN_ALL:
        raise HoldfastError(
            f"num_layers = {layers:,} and num_attention_heads = {heads:,}: no model has that many "
            f"(at most {MAX_LAYERS:,}, {MAX_HEADS:,} and together {MAX_HEADS_IN_ALL:,} are read)"
        )


@dataclass(frozen=True)
class Architecture:
    """Everything that decides the function, besides the weights."""

    family: Literal["gpt", "bert"]
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    ffn_hidden_size: int
    max_position_embeddings: int
    padded_vocab_size: int
    true_vocab_size: int | None = None
    vocab_multiple: int = 128
    """Megatron pads the vocabulary to a multiple of this × tensor parallel size."""
    norm_epsilon: float = 1e-5
    activation: Literal["gelu", "gelu_tanh", "swiglu"] = "gelu"
    head_activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """GELU of BERT's language model head, which Megatron keeps exact when the trunk uses the tanh form."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    positions: Literal["learned_absolute", "rope"] = "learned_absolute"
    rotary_base: float = 10000.0
    tied: bool = True
    bias: bool = True
    """Biases of all linear layers."""
    qkv_bias: bool = True
    post_norm: bool = False
    """BERT: norms after each block (the original) instead of before (Megatron)."""
    binary_head: bool = True
    """BERT: pooler and next-sentence head."""
    token_types: int = 2
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_heads(self.num_layers, self.num_attention_heads)

    @property
    def stack(self) -> str:
        return "decoder" if self.family == "gpt" else "encoder"

    def vocabulary(self) -> int:
        if self.true_vocab_size is None:
            raise HoldfastError(
                f"the true vocabulary size is unknown (the table has {self.padded_vocab_size} rows, padding included): "
                "give --true-vocab-size, or the tokenizer with --vocab-file"
            )
        return self.true_vocab_size


class Mapped(Protocol):
    def drop_pages(self) -> None: ...


@dataclass
class Model:
    architecture: Architecture
    tensors: dict[str, Tensor]
    origin: str
    """What it was read from, for people: 'Megatron, version 3.0, TP 2 × PP 1'."""
    iteration: int | None = None
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """For `inspect`."""
    regions: list[Mapped] = field(default_factory=list)
    unchecked: dict[str, tuple[Region, int]] = field(default_factory=dict)
    """Parts of the source and the CRC-32 that they must have; compared while the target is written."""
    tokenizer: dict[str, str] = field(default_factory=dict)
    """tokenizer_type, vocab_file, merge_file, tokenizer_model as far as the source names them; digest, if it carries its own."""
    special_ids: dict[str, int | list[int]] = field(default_factory=dict)
    """bos_token_id and eos_token_id as far as the source says them."""
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json of a Hugging Face source."""
    companions: dict[str, Path] = field(default_factory=dict)
    """Files of a Hugging Face source's tokenizer that another Hugging Face folder takes as they are."""
    padding: dict[str, Tensor] = field(default_factory=dict)
    """Rows that Megatron's padding had, from the side file of an earlier conversion."""


def check_sources(model: Model) -> None:
    """Compares every part of the source that has a checksum with it: for reading a model without converting it."""
    for region, crc in model.unchecked.values():
        check_crc(region, crc)


def expected_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name → shape of every tensor of the architecture."""
    hidden, layer_norm = arch.hidden_size, arch.normalization == "LayerNorm"
    shapes: dict[str, tuple[int, ...]] = {WORD_EMBEDDINGS: (arch.padded_vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if layer_norm:
            shapes[f"{name}.bias"] = (hidden,)

    if arch.positions == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (arch.max_position_embeddings, hidden)
    if arch.family == "bert":
        shapes["embedding.tokentype_embeddings.weight"] = (arch.token_types, hidden)
    if arch.post_norm:
        norm("embedding.layernorm")
    for index in range(arch.num_layers):
        layer = f"{arch.stack}.layers.{index}"
        if not arch.post_norm:
            norm(f"{layer}.input_layernorm")
        qkv_rows = (arch.num_attention_heads + 2 * arch.num_query_groups) * arch.kv_channels
        linear(f"{layer}.self_attention.linear_qkv", qkv_rows, hidden, arch.qkv_bias)
        linear(f"{layer}.self_attention.linear_proj", hidden, arch.num_attention_heads * arch.kv_channels, arch.bias)
        norm(f"{layer}.{'post_attention_layernorm' if arch.post_norm else 'pre_mlp_layernorm'}")
        if arch.activation == "swiglu":
            linear(f"{layer}.mlp.linear_fc1_gate", arch.ffn_hidden_size, hidden, arch.bias)
            linear(f"{layer}.mlp.linear_fc1_up", arch.ffn_hidden_size, hidden, arch.bias)
        else:
            linear(f"{layer}.mlp.linear_fc1", arch.ffn_hidden_size, hidden, arch.bias)
        linear(f"{layer}.mlp.linear_fc2", hidden, arch.ffn_hidden_size, arch.bias)
        if arch.post_norm:
            norm(f"{layer}.post_mlp_layernorm")
    if not arch.post_norm:
        norm(f"{arch.stack}.final_layernorm")
    if arch.family == "bert":
        linear("lm_head.dense", hidden, hidden, True)
        norm("lm_head.layer_norm")
        shapes["output_layer.bias"] = (arch.padded_vocab_size,)
        if arch.binary_head:
            linear("pooler.dense", hidden, hidden, True)
            linear("binary_head", 2, hidden, True)
    if not arch.tied:
        shapes[OUTPUT_LAYER] = (arch.padded_vocab_size, hidden)
    return shapes


def check_complete(arch: Architecture, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Refuses a model whose tensors are not exactly those of its architecture."""
    expected = expected_shapes(arch)
    unknown = [name for name in tensors if name not in expected]
    missing = [name for name in expected if name not in tensors]
    if unknown:
        raise HoldfastError(f"{origin}: no place for {_list(unknown)} in this architecture")
    if missing:
        raise HoldfastError(f"{origin}: {_list(missing)} is missing")
    if arch.num_attention_heads % arch.num_query_groups:
        raise HoldfastError(
            f"{origin}: {arch.num_query_groups} query groups do not divide {arch.num_attention_heads} heads"
        )
    for name, shape in expected.items():
        if tensors[name].stored not in FLOATS:
            raise HoldfastError(
                f"{origin}: {name} has elements of type {tensors[name].stored}; weights are {', '.join(FLOATS)}"
            )
        if tensors[name].shape != shape:
            raise HoldfastError(
                f"{origin}: {name} has the shape {list(tensors[name].shape)}, but the configuration demands {list(shape)}"
            )


def _list(names: list[str]) -> str:
    rest = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def with_vocabulary(model: Model, true_size: int | None, said_by: str, override: bool = False) -> Model:
    """The model with its true vocabulary size set, refused if it contradicts what is known (`override`: only the rows count)."""
    arch = model.architecture
    if true_size is None:
        return model
    if true_size > arch.padded_vocab_size:
        raise HoldfastError(
            f"{said_by} says {true_size} tokens, but the embedding has only {arch.padded_vocab_size} rows: "
            "this tokenizer does not belong to this model"
        )
    if arch.true_vocab_size not in (None, true_size) and not override:
        raise HoldfastError(
            f"{said_by} says {true_size} tokens, but the model was made for {arch.true_vocab_size}: "
            "this tokenizer does not belong to this model"
        )
    return replace(model, architecture=replace(arch, true_vocab_size=true_size))


def known_special_ids(stated: Mapping[str, Any], size: int) -> dict[str, int | list[int]]:
    """bos_token_id and eos_token_id of a configuration (the latter may be several), where they are ids of the vocabulary."""
    return valid_ids(stated, ("bos_token_id", "eos_token_id"), size)


def valid_ids(stated: Mapping[str, Any], names: Iterable[str], size: int) -> dict[str, int | list[int]]:
    def valid(value: Any) -> bool:
        return type(value) is int and 0 <= value < size

    found: dict[str, int | list[int]] = {}
    for name in names:
        value = stated.get(name)
        if valid(value) or (isinstance(value, list) and 0 < len(value) <= 100 and all(map(valid, value))):
            found[name] = value  # type: ignore[assignment]
    return found


def padded_size(true_size: int, multiple: int) -> int:
    return -(-true_size // multiple) * multiple
