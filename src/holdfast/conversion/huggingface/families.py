"""Every model class of transformers that is converted, as data: names of tensors, keys of config.json, fixed options.

A new family is an entry of FAMILIES. `names.py` and `config.py` read the table in both directions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from holdfast.conversion.model import OUTPUT_LAYER, WORD_EMBEDDINGS


@dataclass(frozen=True, kw_only=True)
class ModelClass:
    """One model class. Fields are those of Architecture, keys those of config.json."""

    model_class: str
    stem: str
    """In front of every name but the head's."""
    layers: str
    """In front of a layer's number."""
    top: Mapping[str, str]
    """Canonical name → its name, outside the layers."""
    inside: Mapping[str, str]
    """Canonical module → its name, inside a layer."""
    qkv: tuple[str, ...] = ()
    """Names of query, key and value; one name: all three joined. Empty: `inside` has one matrix in the canonical row order."""
    transposed: bool = False
    """Matrices are stored as [in, out] (Conv1D)."""
    sizes: Mapping[str, str]
    """Field → key of an integer."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    """Field → what transformers takes where the key is absent, if it does not derive it from the others."""
    reals: Mapping[str, tuple[str, float]]
    """Field → key of a number, and its value where the key is absent."""
    bounds: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Field → key of a number that null switches off (0 here), and its value where the key is absent."""
    flags: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    """Field → key of a switch, and its value where the key is absent."""
    bias_keys: tuple[str, ...] = ()
    """Keys that switch the biases of all linear layers, all of them alike."""
    always: Mapping[str, Any] = field(default_factory=dict)
    """Field → the only value that the class has."""
    only: Mapping[str, Any] = field(default_factory=dict)
    """Key → the only value that is converted, which is also its default."""
    activation: str | None = None
    """Key of the kind of GELU."""
    rotary: tuple[str, str, float] | None = None
    """Keys of the base and of the rotated fraction in older files, and the default of the fraction."""
    window: Literal["all", "switched", "alternating"] | None = None
    """Layers that sliding_window applies to: all; none unless use_sliding_window is set; every other one unless layer_types
    says otherwise."""
    tied: bool = False
    """Whether the output matrix is the embedding where tie_word_embeddings is absent."""


KINDS = ("weight", "bias")


def _top(words: str, final: str, output: str) -> dict[str, str]:
    norm = {f"decoder.final_layernorm.{kind}": f"{final}.{kind}" for kind in KINDS}
    return {WORD_EMBEDDINGS: words, **norm, OUTPUT_LAYER: output}


_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
}
GPT2 = ModelClass(
    model_class="GPT2LMHeadModel",
    stem="transformer.",
    layers="transformer.h.",
    top={
        **_top("transformer.wte.weight", "transformer.ln_f", "lm_head.weight"),
        "embedding.position_embeddings.weight": "transformer.wpe.weight",
    },
    inside={
        "input_layernorm": "ln_1",
        "self_attention.linear_proj": "attn.c_proj",
        "pre_mlp_layernorm": "ln_2",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    },
    qkv=("attn.c_attn",),
    transposed=True,
    sizes={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "ffn_hidden_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    reals={
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "hidden_dropout": ("resid_pdrop", 0.1),
        "attention_dropout": ("attn_pdrop", 0.1),
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    activation="activation_function",
    tied=True,
)
LLAMA = ModelClass(
    model_class="LlamaForCausalLM",
    stem="model.",
    layers="model.layers.",
    top=_top("model.embed_tokens.weight", "model.norm", "lm_head.weight"),
    inside={
        "input_layernorm": "input_layernorm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1_gate": "mlp.gate_proj",
        "mlp.linear_fc1_up": "mlp.up_proj",
        "mlp.linear_fc2": "mlp.down_proj",
    },
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    sizes={**_SIZES, "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim"},
    reals={"norm_epsilon": ("rms_norm_eps", 1e-6), "attention_dropout": ("attention_dropout", 0.0)},
    bias_keys=("attention_bias", "mlp_bias"),
    always={"swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"},
    only={"hidden_act": "silu"},
    rotary=("rope_theta", "", 1.0),
)
_UNBIASED = {**LLAMA.always, "disable_bias_linear": True}
MISTRAL = replace(
    LLAMA,
    model_class="MistralForCausalLM",
    defaults={"num_query_groups": 8},
    bias_keys=(),
    always=_UNBIASED,
    window="all",
)
QWEN2 = replace(
    LLAMA,
    model_class="Qwen2ForCausalLM",
    defaults={"num_query_groups": 32},
    bias_keys=(),
    always={**_UNBIASED, "add_qkv_bias": True},
    window="switched",
)
QWEN3 = replace(
    QWEN2,
    model_class="Qwen3ForCausalLM",
    inside={
        **LLAMA.inside,
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
    },
    defaults={"num_query_groups": 32, "kv_channels": 128},
    always={**_UNBIASED, "qk_layernorm": True},
    only={**QWEN2.only, "attention_bias": False},
)
GEMMA2 = replace(
    LLAMA,
    model_class="Gemma2ForCausalLM",
    inside={
        **LLAMA.inside,
        "post_attention_layernorm": "post_attention_layernorm",
        "pre_mlp_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    sizes={**LLAMA.sizes, "query_pre_attn_scalar": "query_pre_attn_scalar"},
    defaults={"num_query_groups": 4, "kv_channels": 256, "query_pre_attn_scalar": 256},
    bounds={
        "attn_logit_softcapping": ("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": ("final_logit_softcapping", 30.0),
    },
    bias_keys=(),
    always={
        **{"geglu": True, "openai_gelu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"},
        **dict.fromkeys(("disable_bias_linear", "apply_layernorm_1p", "post_block_norm", "scale_embeddings"), True),
    },
    only={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "use_bidirectional_attention": None},
    window="alternating",
    tied=True,
)
GPT_NEOX = ModelClass(
    model_class="GPTNeoXForCausalLM",
    stem="gpt_neox.",
    layers="gpt_neox.layers.",
    top=_top("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight"),
    inside={
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": "attention.query_key_value",
        "self_attention.linear_proj": "attention.dense",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": "mlp.dense_h_to_4h",
        "mlp.linear_fc2": "mlp.dense_4h_to_h",
    },
    sizes=_SIZES,
    reals={
        "norm_epsilon": ("layer_norm_eps", 1e-5),
        "hidden_dropout": ("hidden_dropout", 0.0),
        "attention_dropout": ("attention_dropout", 0.0),
    },
    flags={"use_parallel_residual": ("use_parallel_residual", True)},
    always={"position_embedding_type": "rope"},
    only={"attention_bias": True},
    activation="hidden_act",
    rotary=("rotary_emb_base", "rotary_pct", 0.25),
)
MEGATRON_BERT = ModelClass(
    model_class="MegatronBert",
    stem="bert.",
    layers="bert.encoder.layer.",
    top={
        WORD_EMBEDDINGS: "bert.embeddings.word_embeddings.weight",
        "embedding.position_embeddings.weight": "bert.embeddings.position_embeddings.weight",
        "embedding.tokentype_embeddings.weight": "bert.embeddings.token_type_embeddings.weight",
        **{
            f"{ours}.{kind}": f"{theirs}.{kind}"
            for ours, theirs in (
                ("encoder.final_layernorm", "bert.encoder.ln"),
                ("pooler.dense", "bert.pooler.dense"),
                ("lm_head.dense", "cls.predictions.transform.dense"),
                ("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
                ("binary_head", "cls.seq_relationship"),
            )
            for kind in KINDS
        },
        "output_layer.bias": "cls.predictions.bias",
        OUTPUT_LAYER: "cls.predictions.decoder.weight",
    },
    inside={
        "input_layernorm": "attention.ln",
        "self_attention.linear_proj": "attention.output.dense",
        "pre_mlp_layernorm": "ln",
        "mlp.linear_fc1": "intermediate.dense",
        "mlp.linear_fc2": "output.dense",
    },
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    sizes=_SIZES,
    reals={
        "norm_epsilon": ("layer_norm_eps", 1e-12),
        "hidden_dropout": ("hidden_dropout_prob", 0.1),
        "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    },
    always={"model_type": "bert", "bert_variant": "megatron", "untie_embeddings_and_output_weights": False},
    only={"position_embedding_type": "absolute", "is_decoder": False, "add_cross_attention": False},
    activation="hidden_act",
    tied=True,
)
BERT = replace(
    MEGATRON_BERT,
    model_class="Bert",
    top={
        **{ours: theirs for ours, theirs in MEGATRON_BERT.top.items() if "final_layernorm" not in ours},
        **{f"embedding.layernorm.{kind}": f"bert.embeddings.LayerNorm.{kind}" for kind in KINDS},
    },
    inside={
        **{ours: theirs for ours, theirs in MEGATRON_BERT.inside.items() if "layernorm" not in ours},
        "post_attention_layernorm": "attention.output.LayerNorm",
        "post_mlp_layernorm": "output.LayerNorm",
    },
    always={**MEGATRON_BERT.always, "bert_variant": "original"},
)

FAMILIES: dict[str, ModelClass] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gpt_neox": GPT_NEOX,
    "bert": BERT,
    "megatron-bert": MEGATRON_BERT,
}
"""model_type → class. Where several classes compute the same function, the first one is written."""
