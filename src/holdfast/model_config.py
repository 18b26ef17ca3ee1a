"""The `[model]` section of a configuration: the model's family, its shapes and its options.

Llama, Qwen, Mistral, Gemma 2 and GPT-NeoX are options of the one GPT module, under Megatron's names where Megatron has one.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """The model: its family and its shapes."""

    model_type: Literal["gpt", "bert"] = "gpt"
    """Model family: gpt (decoder, predicts the next token) or bert (encoder, predicts masked tokens and sentence pairs)."""
    num_layers: int = 12
    """Number of transformer layers."""
    hidden_size: int = 768
    """Width of the hidden states."""
    num_attention_heads: int = 12
    """Number of attention heads. Must divide hidden_size unless kv_channels is set."""
    ffn_hidden_size: int | None = None
    """Inner width of the MLP. Unset: 4 × hidden_size; gated 8/3 × hidden_size, rounded down to a multiple of 64."""
    num_query_groups: int | None = None
    """Number of key/value heads, each shared by a group of query heads (GQA). Unset: num_attention_heads."""
    group_query_attention: bool = False
    """Megatron's switch for num_query_groups, which has the same effect without it."""
    kv_channels: int | None = None
    """Width of one attention head. Unset: hidden_size / num_attention_heads."""
    max_position_embeddings: int | None = None
    """Longest sequence that the model accepts, in tokens. Unset: seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Position encoding: learned embeddings (GPT-2, GPT-3, BERT) or rotary (Llama)."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Fraction of each head's width that is rotated (GPT-NeoX: 0.25)."""
    use_rope_scaling: bool = False
    """Scale the rotary frequencies for sequences longer than original_max_position_embeddings, as rope_scaling_type does."""
    rope_scaling_type: Literal["llama3", "linear", "dynamic", "yarn"] = "llama3"
    """Rule of use_rope_scaling: llama3 (Llama 3.1 and later), linear, dynamic (NTK, by the current length) or yarn."""
    rope_scaling_factor: float = 8.0
    """Factor of use_rope_scaling: about the longest sequence divided by original_max_position_embeddings."""
    rope_low_freq_factor: float = 1.0
    """llama3: wavelengths above original_max_position_embeddings / this are scaled fully."""
    rope_high_freq_factor: float = 4.0
    """llama3: wavelengths below original_max_position_embeddings / this are not scaled."""
    original_max_position_embeddings: int = 8192
    """llama3, dynamic, yarn: longest sequence before the scaling."""
    yarn_beta_fast: float = 32.0
    """yarn: components that turn at least this often within the original length are not scaled."""
    yarn_beta_slow: float = 1.0
    """yarn: components that turn at most this often within the original length are scaled fully."""
    yarn_attention_factor: float | None = None
    """yarn: factor of the rotated queries and keys. Unset: 0.1 × ln(rope_scaling_factor) + 1."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Norm before each block and after the last layer."""
    norm_epsilon: float = 1e-5
    """Epsilon of the norms."""
    openai_gelu: bool = False
    """Compute GELU by its tanh approximation, as GPT-2 does, instead of exactly."""
    swiglu: bool = False
    """Use a gated MLP with SiLU (Llama) instead of GELU."""
    geglu: bool = False
    """Use a gated MLP with GELU (Gemma), in its tanh form if openai_gelu is set."""
    untie_embeddings_and_output_weights: bool = False
    """Use a separate output matrix instead of the transposed embedding."""
    disable_bias_linear: bool = False
    """Use linear layers without bias (Llama)."""
    add_qkv_bias: bool = False
    """With disable_bias_linear: keep the bias of queries, keys and values (Qwen 2)."""
    qk_layernorm: bool = False
    """Normalize queries and keys per head, before the rotation (Qwen 3)."""
    window_size: tuple[int, ...] = ()
    """LEFT 0: each token attends to itself and the LEFT tokens before it (Mistral 7B: 4095 0). Unset: to all before it."""
    window_attn_skip_freq: tuple[int, ...] = ()
    """Layers without the window. N: every N-th (Gemma 2: 2). Or a number per layer: 1 with the window, 0 without."""
    use_parallel_residual: bool = False
    """Feed attention and MLP the same input and add both results at once (GPT-NeoX)."""
    apply_layernorm_1p: bool = False
    """Norms multiply by 1 + weight instead of weight (Gemma)."""
    post_block_norm: bool = False
    """Normalize the results of attention and MLP too, before they are added (Gemma 2)."""
    scale_embeddings: bool = False
    """Multiply the word embeddings by the square root of hidden_size (Gemma)."""
    query_pre_attn_scalar: int | None = None
    """Attention scores are divided by the square root of this (Gemma 2). Unset: the width of a head."""
    attn_logit_softcapping: float = 0.0
    """Bound of the attention scores s, which become bound × tanh(s / bound) (Gemma 2: 50). 0: no bound."""
    final_logit_softcapping: float = 0.0
    """The same for the logits (Gemma 2: 30)."""
    hidden_dropout: float = 0.0
    """Dropout probability of the embeddings and of each block's output. Megatron's default is 0.1."""
    attention_dropout: float = 0.0
    """Dropout probability of the attention weights. Megatron's default is 0.1."""
    init_method_std: float = 0.02
    """Standard deviation of the initial weights. Output layers of blocks: divided by sqrt(2 × num_layers)."""
    vocab_size: int | None = None
    """Number of tokens in the vocabulary. Unset: taken from the tokenizer."""
    make_vocab_size_divisible_by: int = 128
    """Pad the embedding to a multiple of this × tensor_model_parallel_size rows. Padded rows are never predicted."""
    bert_variant: Literal["megatron", "original"] = "megatron"
    """BERT: norm before each block (megatron) or after it (original)."""
    bert_no_binary_head: bool = False
    """BERT: leave out the pooler and the next-sentence head."""

    @property
    def gated(self) -> bool:
        return self.swiglu or self.geglu

    @property
    def ffn(self) -> int:
        """Inner width of the MLP."""
        return self.ffn_hidden_size or (self.hidden_size * 8 // 3 // 64 * 64 if self.gated else 4 * self.hidden_size)

    def layer_window(self, number: int) -> tuple[int, ...]:
        """window_size of a layer, by its number from 0; () where it attends to all tokens before."""
        skip = self.window_attn_skip_freq
        windowed = not skip or ((number + 1) % max(skip[0], 1) if len(skip) == 1 else skip[number % len(skip)])
        return self.window_size if windowed else ()


# Options that only models/layers.py computes, and no faster form of a layer.
PLAIN_ONLY = (
    "qk_layernorm", "use_parallel_residual", "geglu", "apply_layernorm_1p", "post_block_norm", "scale_embeddings",
    "window_attn_skip_freq", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping",
)  # fmt: skip


def needs_plain_layers(model: ModelConfig) -> bool:
    """Whether the model has an option that only models/layers.py computes."""
    return any(getattr(model, key) for key in PLAIN_ONLY)


def model_problems(model: ModelConfig) -> list[str]:
    """Combinations of the section's keys that no model can have, in words."""
    problems = []
    rope = model.position_embedding_type == "rope"
    head = model.kv_channels or model.hidden_size // model.num_attention_heads
    window, rotated = model.window_size, int(head * model.rotary_percent)
    if window and (len(window) != 2 or window[1] != 0):
        problems.append(f"window_size {' '.join(map(str, window))}: give two numbers, the second 0, such as 4095 0")
    skip = model.window_attn_skip_freq
    per_layer = len(skip) == model.num_layers and set(skip) <= {0, 1}
    if skip and not (window and (per_layer or (len(skip) == 1 and skip[0] > 0))):
        problems.append("window_attn_skip_freq needs window_size, and a number above 0 or a 0 or 1 for each layer")
    if model.swiglu and model.geglu:
        problems.append("swiglu and geglu are two forms of the MLP; set one of them")
    if not model.ffn:
        problems.append(
            f"a gated MLP of hidden_size {model.hidden_size} has no default inner width: give ffn_hidden_size"
        )
    if model.group_query_attention and model.num_query_groups is None:
        problems.append("group_query_attention needs num_query_groups")
    dynamic = model.use_rope_scaling and model.rope_scaling_type == "dynamic"
    least = 4 if dynamic else 2
    if rope and (rotated % 2 or rotated < least):
        problems.append(
            f"rotary_percent {model.rotary_percent:g} of a head of {head} is {rotated}; make it even, at least {least}"
        )
    if model.use_rope_scaling and (model.rope_scaling_factor < 1 or model.rotary_base <= 1):
        problems.append("rope_scaling_factor must be at least 1, and rotary_base above 1")
    if not rope and (model.use_rope_scaling or model.rotary_percent != 1):
        problems.append('use_rope_scaling and rotary_percent need position_embedding_type = "rope"')
    if not 0 < model.rope_low_freq_factor < model.rope_high_freq_factor:
        problems.append("rope_low_freq_factor must be above 0 and below rope_high_freq_factor")
    if not 0 < model.yarn_beta_slow < model.yarn_beta_fast:
        problems.append("yarn_beta_slow must be above 0 and below yarn_beta_fast")
    if model.model_type == "bert":
        gpt_only = (*PLAIN_ONLY, "window_size", "add_qkv_bias")
        problems += [f"{key} applies to GPT; leave it unset for BERT" for key in gpt_only if getattr(model, key)]
    return problems
