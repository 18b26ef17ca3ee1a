"""Options of the GPT module, one entry per family: what tests of the module and of training share."""

LLAMA = {
    "swiglu": True, "position_embedding_type": "rope", "normalization": "RMSNorm", "num_query_groups": 2,
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
}  # fmt: skip
FAMILIES = {
    "llama3": LLAMA | {"use_rope_scaling": True, "original_max_position_embeddings": 8},
    "qwen2": LLAMA | {"add_qkv_bias": True, "use_rope_scaling": True, "rope_scaling_type": "yarn"},
    "qwen3": LLAMA | {"qk_layernorm": True, "kv_channels": 16, "untie_embeddings_and_output_weights": False},
    "mistral": LLAMA | {"window_size": (4, 0)},
    "gemma2": {
        "geglu": True, "openai_gelu": True, "position_embedding_type": "rope", "normalization": "RMSNorm",
        "num_query_groups": 2, "kv_channels": 16, "disable_bias_linear": True, "apply_layernorm_1p": True,
        "post_block_norm": True, "scale_embeddings": True, "query_pre_attn_scalar": 24, "window_size": (4, 0),
        "window_attn_skip_freq": (2,), "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    },
    "gpt-neox": {
        "position_embedding_type": "rope", "rotary_percent": 0.5, "use_parallel_residual": True,
        "untie_embeddings_and_output_weights": True,
    },
}  # fmt: skip
