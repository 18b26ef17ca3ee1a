"""Tiny models of every family that transformers has and Holdfast converts, with random weights."""

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY, POSITIONS = 300, 48
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def rope(kind, theta=500.0, **more):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


FAMILIES = {
    "llama2": (LlamaForCausalLM, LlamaConfig(**SIZES, rms_norm_eps=1e-5)),
    "llama3": (LlamaForCausalLM, LlamaConfig(**GROUPED, **rope("default", 500000.0), rms_norm_eps=1e-5)),
    "llama3.1": (LlamaForCausalLM, LlamaConfig(**GROUPED, **rope("llama3", factor=8.0, **LLAMA3))),
    "llama3.2-tied": (
        LlamaForCausalLM,
        LlamaConfig(
            **GROUPED,
            **rope("llama3", 500000.0, **LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192}),
            tie_word_embeddings=True,
            head_dim=16,
        ),
    ),
    "llama-linear": (LlamaForCausalLM, LlamaConfig(**GROUPED, **rope("linear", factor=2.0))),
    "llama-dynamic": (
        LlamaForCausalLM,
        LlamaConfig(**{**GROUPED, "max_position_embeddings": 12}, **rope("dynamic", factor=4.0)),
    ),
    "llama-yarn": (
        LlamaForCausalLM,
        LlamaConfig(
            **GROUPED,
            **rope(
                "yarn", factor=4.0, original_max_position_embeddings=12, beta_fast=16, mscale=0.8, mscale_all_dim=0.5
            ),
        ),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**GROUPED, **rope("default", 10000.0))),
    "qwen2.5-yarn": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **GROUPED, **rope("yarn", factor=4.0, original_max_position_embeddings=12), tie_word_embeddings=True
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GROUPED, **rope("default", 1e6), head_dim=16, tie_word_embeddings=True)),
    "qwen2-windows": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **GROUPED, **rope("default", 10000.0), use_sliding_window=True, sliding_window=6, max_window_layers=1
        ),
    ),
    "qwen3-windows": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **{**GROUPED, "num_hidden_layers": 3},
            **rope("default", 1e6),
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **{**GROUPED, "num_hidden_layers": 3},
            **rope("default", 10000.0),
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=6,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=3.0,
            pad_token_id=None,
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**GROUPED, **rope("default", 10000.0), sliding_window=6)),
    "gpt-neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, **rope("default", 10000.0, partial_rotary_factor=0.5))),
    "gpt-neox-llama3": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(**SIZES, **rope("llama3", 500.0, factor=4.0, **LLAMA3, partial_rotary_factor=0.75)),
    ),
    "gpt-neox-serial": (
        GPTNeoXForCausalLM,
        GPTNeoXConfig(**SIZES, **rope("default", 10000.0, partial_rotary_factor=1.0), use_parallel_residual=False),
    ),
}


def build_family(name, dtype=torch.float32):
    """The model with random weights, no norm or bias at its usual 1 or 0."""
    kind, config = FAMILIES[name]
    torch.manual_seed(5)
    model = kind(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype).eval()
