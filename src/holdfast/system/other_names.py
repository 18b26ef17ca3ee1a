"""Names of settings in other programs: what a user of nanoGPT, NeMo, transformers or Megatron-LM writes, and its name here.

Only names that a search for the nearest name does not find, or finds wrongly.
"""

SAME_MEANING = {
    "n_layer": "num_layers",  # nanoGPT
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "block_size": "seq_length",
    "batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "global_batch_size: micro batch size × accumulation steps × data-parallel ranks",
    "max_iters": "train_iters",
    "learning_rate": "lr",
    "grad_clip": "clip_grad",
    "dtype": "bf16: a switch, as fp16 is; neither means fp32",
    "out_dir": "save",
    "max_steps": "train_iters",  # NeMo, Lightning
    "devices": "nproc_per_node",
    "num_nodes": "nnodes",
    "precision": "bf16: a switch, as fp16 is; neither means fp32",
    "gradient_clip_val": "clip_grad",
    "val_check_interval": "eval_interval",
    "limit_val_batches": "eval_iters",
    "encoder_seq_length": "seq_length",
    "num_hidden_layers": "num_layers",  # transformers
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_query_groups",
    "recompute_activations": "recompute_granularity: selective",  # Megatron-LM
    "checkpoint_activations": "recompute_granularity: full",
    "tensorboard_dir": "tensorboard: a switch; the files are in the run folder",
}
"""Name → our key, and after a colon what to know about the value."""

NOT_NEEDED = {
    *("use_flash_attn", "use_mcore_models", "transformer_impl", "distributed_backend", "ckpt_format", "log_throughput"),
    *("overlap_grad_reduce", "overlap_param_gather", "attention_softmax_in_fp32"),
    *("no_masked_softmax_fusion", "no_bias_gelu_fusion", "no_bias_dropout_fusion", "no_gradient_accumulation_fusion"),
}
"""Switches of Megatron-LM for what is chosen or done here in any case."""

MIXTURE_OF_EXPERTS = {"num_experts", "expert_model_parallel_size", "moe_router_topk", "moe_grouped_gemm"}


def own_name(name: str) -> tuple[str, str]:
    """Our key for a name, and a note about its value; both empty if the name is not known here."""
    key, _, note = SAME_MEANING.get(name.rpartition(".")[2], "").partition(": ")
    return key, note


def reason_to_leave_out(name: str) -> str:
    """Why a setting of Megatron-LM has no key here; empty for other names."""
    if name in NOT_NEEDED:
        return "leave it out: what it switches on is chosen or done in any case"
    return "there is no mixture of experts here" if name in MIXTURE_OF_EXPERTS else ""
