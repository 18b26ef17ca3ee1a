"""The canonical model between all formats: an architecture, and whole tensors under Holdfast's own parameter names.

The invariant: a Model that passed `check_complete` has exactly the tensors that its architecture requires, with exactly those
shapes; nothing unknown, nothing missing. Query, key and value rows are [query groups, heads per group + 2, head width], gate and
up projections are apart, vocabulary tables have `padded_vocab_size` rows.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from holdfast.config import ModelConfig, model_problems
from holdfast.conversion.files.zips import Region, check_crc
from holdfast.conversion.tensors import DTYPE_NAMES, Tensor, equal
from holdfast.system.errors import HoldfastError

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
SPECIAL_IDS = ("bos_token_id", "eos_token_id")
VOCABULARY_TENSORS = (WORD_EMBEDDINGS, OUTPUT_LAYER, "output_layer.bias")

MAX_VOCAB_MULTIPLE = 1 << 20
"""Beyond this a file is forged: padding rows are written one by one."""
LARGEST_SIZE = 1 << 40
MAX_LAYERS = 1 << 12
MAX_HEADS = 1 << 12
MAX_HEADS_IN_ALL = 1 << 15


def check_heads(layers: int, heads: int) -> None:
    """Refuses numbers that no model has: every head of every layer may become a piece of its own."""
    if layers > MAX_LAYERS or heads > MAX_HEADS or layers * heads > MAX_HEADS_IN_ALL:
        raise HoldfastError(
            f"num_layers = {layers:,} and num_attention_heads = {heads:,}: models have fewer "
            f"(at most {MAX_LAYERS:,}, {MAX_HEADS:,} and together {MAX_HEADS_IN_ALL:,} are read)"
        )


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelConfig):
    """A ModelConfig with every size known, and what only other formats have. `vocab_size` is None where the source has none."""

    # field(): required, although ModelConfig has a default.
    ffn_hidden_size: int = field()
    num_query_groups: int = field()
    kv_channels: int = field()
    max_position_embeddings: int = field()
    padded_vocab_size: int
    """Rows of the vocabulary tables."""
    head_activation: Literal["gelu", "gelu_tanh"] = "gelu"
    """GELU of BERT's language model head, which Megatron keeps exact when the trunk uses the tanh form."""
    token_types: int = 2

    def __post_init__(self) -> None:
        check_heads(self.num_layers, self.num_attention_heads)
        if not 0 < self.make_vocab_size_divisible_by <= MAX_VOCAB_MULTIPLE:
            raise HoldfastError(
                f"make_vocab_size_divisible_by = {self.make_vocab_size_divisible_by}: give 1 to {MAX_VOCAB_MULTIPLE:,}"
            )
        if self.vocab_size is not None and not 0 < self.vocab_size <= self.padded_vocab_size:
            raise HoldfastError(
                f"the vocabulary has {self.vocab_size} tokens, but the embedding has only {self.padded_vocab_size} rows"
            )

    @property
    def stack(self) -> str:
        return "decoder" if self.model_type == "gpt" else "encoder"

    @property
    def activation(self) -> str:
        gelu = "geglu" if self.geglu else "gelu"
        return "swiglu" if self.swiglu else f"{gelu}_tanh" if self.openai_gelu else gelu

    @property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @property
    def bias(self) -> bool:
        return not self.disable_bias_linear

    @property
    def qkv_bias(self) -> bool:
        return self.bias or self.add_qkv_bias

    @property
    def post_norm(self) -> bool:
        """BERT with the norms after each block (the original) instead of before (Megatron)."""
        return self.model_type == "bert" and self.bert_variant == "original"

    def vocabulary(self) -> int:
        if self.vocab_size is None:
            raise HoldfastError(
                f"the true vocabulary size is unknown (the table has {self.padded_vocab_size} rows, padding included): "
                "give --true-vocab-size, or the tokenizer with --vocab-file"
            )
        return self.vocab_size

    def model_config(self) -> ModelConfig:
        """The configuration with which Holdfast builds the same function."""
        return ModelConfig(**{each.name: getattr(self, each.name) for each in fields(ModelConfig)})


# Keys of the model that do not decide what the weights compute.
_FREE = (
    "hidden_dropout", "attention_dropout", "init_method_std", "make_vocab_size_divisible_by", "group_query_attention",
)  # fmt: skip
_SCALING = {
    "linear": (),
    "dynamic": ("original_max_position_embeddings",),
    "llama3": ("original_max_position_embeddings", "rope_low_freq_factor", "rope_high_freq_factor"),
    "yarn": ("original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow", "yarn_attention_factor"),
}


def function_of(model: ModelConfig) -> dict[str, Any]:
    """The keys that decide what the weights compute, without those that other keys switch off."""
    rope = model.position_embedding_type == "rope"
    off = {*_FREE, *(("max_position_embeddings",) if rope else ("rotary_base", "rotary_percent"))}
    used = _SCALING[model.rope_scaling_type] if model.use_rope_scaling else ()
    off |= {key for keys in _SCALING.values() for key in keys if key not in used}
    if not model.use_rope_scaling:
        off |= {"rope_scaling_type", "rope_scaling_factor"}
    if model.model_type == "gpt":
        off |= {"bert_variant", "bert_no_binary_head"}
    if not model.disable_bias_linear:
        off.add("add_qkv_bias")
    if model.swiglu:
        off.add("openai_gelu")
    found = {each.name: getattr(model, each.name) for each in fields(ModelConfig) if each.name not in off}
    windowed = tuple(int(bool(model.layer_window(number))) for number in range(model.num_layers))
    found["window_size"] = model.window_size if any(windowed) else ()
    found["window_attn_skip_freq"] = windowed if any(windowed) and not all(windowed) else ()
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    return found | {"query_pre_attn_scalar": model.query_pre_attn_scalar or head}


def yarn_attention_factor(factor: float, mscale: float, mscale_all_dim: float) -> float:
    """The attention factor of YaRN, where a source gives the two scales that it is made of."""
    above, below = (0.1 * scale * math.log(max(1.0, factor)) + 1 for scale in (mscale, mscale_all_dim))
    return above / below


class MappedPages(Protocol):
    def drop_pages(self) -> None: ...


@dataclass
class Model:
    architecture: Architecture
    tensors: dict[str, Tensor]
    origin: str
    """What it was read from, for messages: 'Megatron, version 3.0, TP 2 × PP 1'."""
    iteration: int | None = None
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    """For `inspect`."""
    regions: list[MappedPages] = field(default_factory=list)
    unchecked: dict[str, tuple[Region, int]] = field(default_factory=dict)
    """Parts of the source and the CRC-32 that they must have; compared while the target is written."""
    tokenizer: dict[str, str] = field(default_factory=dict)
    """tokenizer_type, vocab_file, merge_file, tokenizer_model as far as the source names them; digest, if it carries its own."""
    special_ids: dict[str, int | list[int]] = field(default_factory=dict)
    """bos_token_id and eos_token_id as far as the source states them."""
    generation: dict[str, Any] = field(default_factory=dict)
    """generation_config.json of a Hugging Face source."""
    copied_files: dict[str, Path] = field(default_factory=dict)
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

    def norm(name: str, width: int = hidden) -> None:
        shapes[f"{name}.weight"] = (width,)
        if layer_norm:
            shapes[f"{name}.bias"] = (width,)

    if arch.position_embedding_type == "learned_absolute":
        shapes["embedding.position_embeddings.weight"] = (arch.max_position_embeddings, hidden)
    if arch.model_type == "bert":
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
        if arch.qk_layernorm:
            norm(f"{layer}.self_attention.q_layernorm", arch.kv_channels)
            norm(f"{layer}.self_attention.k_layernorm", arch.kv_channels)
        if arch.post_norm or arch.post_block_norm:
            norm(f"{layer}.post_attention_layernorm")
        if not arch.post_norm:
            norm(f"{layer}.pre_mlp_layernorm")
        if arch.gated:
            linear(f"{layer}.mlp.linear_fc1_gate", arch.ffn_hidden_size, hidden, arch.bias)
            linear(f"{layer}.mlp.linear_fc1_up", arch.ffn_hidden_size, hidden, arch.bias)
        else:
            linear(f"{layer}.mlp.linear_fc1", arch.ffn_hidden_size, hidden, arch.bias)
        linear(f"{layer}.mlp.linear_fc2", hidden, arch.ffn_hidden_size, arch.bias)
        if arch.post_norm or arch.post_block_norm:
            norm(f"{layer}.post_mlp_layernorm")
    if not arch.post_norm:
        norm(f"{arch.stack}.final_layernorm")
    if arch.model_type == "bert":
        linear("lm_head.dense", hidden, hidden, True)
        norm("lm_head.layer_norm")
        shapes["output_layer.bias"] = (arch.padded_vocab_size,)
        if not arch.bert_no_binary_head:
            linear("pooler.dense", hidden, hidden, True)
            linear("binary_head", 2, hidden, True)
    if not arch.tied:
        shapes[OUTPUT_LAYER] = (arch.padded_vocab_size, hidden)
    return shapes


def check_complete(arch: Architecture, tensors: Mapping[str, Tensor], origin: str) -> None:
    """Refuses a model that cannot exist, or whose tensors are not exactly those of its architecture."""
    if problems := model_problems(arch):
        raise HoldfastError(f"{origin}: {'; '.join(problems)}")
    expected = expected_shapes(arch)
    unknown = [name for name in tensors if name not in expected]
    missing = [name for name in expected if name not in tensors]
    if unknown:
        raise HoldfastError(f"{origin}: this architecture has no {_list(unknown)}")
    if missing:
        raise HoldfastError(f"{origin}: {_list(missing)} is missing")
    if arch.num_attention_heads % arch.num_query_groups:
        raise HoldfastError(
            f"{origin}: {arch.num_query_groups} query groups do not divide {arch.num_attention_heads} heads"
        )
    for name, shape in expected.items():
        if tensors[name].stored not in DTYPE_NAMES:
            raise HoldfastError(
                f"{origin}: {name} has elements of type {tensors[name].stored}; weights are {', '.join(DTYPE_NAMES)}"
            )
        if tensors[name].shape != shape:
            raise HoldfastError(
                f"{origin}: {name} has the shape {list(tensors[name].shape)}, but the configuration requires {list(shape)}"
            )


def drop_tied_copy(arch: Architecture, tensors: dict[str, Tensor], copy: str, tied_by: str) -> dict[str, Tensor]:
    """The tensors without the stored `copy` of a tied embedding, which must equal it."""
    if not arch.tied or OUTPUT_LAYER not in tensors:
        return tensors
    if not equal(tensors[OUTPUT_LAYER], tensors[WORD_EMBEDDINGS]):
        raise HoldfastError(f"{copy} differs from the embedding itself, though {tied_by} say that they are tied")
    return {name: tensor for name, tensor in tensors.items() if name != OUTPUT_LAYER}


def _list(names: list[str]) -> str:
    rest = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def with_vocabulary(model: Model, true_size: int | None, stated_by: str, override: bool = False) -> Model:
    """The model with its true vocabulary size set, refused if it contradicts what is known (`override`: only the rows count)."""
    arch = model.architecture
    if true_size is None:
        return model
    if true_size > arch.padded_vocab_size:
        raise HoldfastError(
            f"{stated_by} gives {true_size} tokens, but the embedding has only {arch.padded_vocab_size} rows: "
            "this tokenizer does not belong to this model"
        )
    if arch.vocab_size not in (None, true_size) and not override:
        raise HoldfastError(
            f"{stated_by} gives {true_size} tokens, but the model was made for {arch.vocab_size}: "
            "this tokenizer does not belong to this model"
        )
    return replace(model, architecture=replace(arch, vocab_size=true_size))


def valid_ids(stated: Mapping[str, Any], names: Iterable[str], size: int) -> dict[str, int | list[int]]:
    """The token ids of a configuration (eos_token_id may be several) that the vocabulary has."""

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


def read_size(values: Mapping[str, Any], name: str, where: str) -> int:
    """A size that a source states; `where` precedes its name in the error."""
    value = values.get(name)
    if type(value) is not int or not 0 < value < LARGEST_SIZE:
        raise HoldfastError(f"{where}{name} is {value!r}, where a positive number below {LARGEST_SIZE} is expected")
    return value


def read_real(values: Mapping[str, Any], name: str, default: float, where: str) -> float:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise HoldfastError(f"{where}{name} is {value!r}, where a number is expected")
    return float(value)
