"""Which of Megatron's args reach the model's function: every one is understood, harmless, or refused by name.

The invariant: no arg is ignored by oversight. The names are those of all releases up to core 0.19; an unknown
name passes only with a value that switches nothing on (None, False, 0, empty), or if the user lists it in --ignore-args.
"""

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from holdfast.system.errors import HoldfastError

UNDERSTOOD = frozenset(
    """
    add_bias_linear add_position_embedding add_qkv_bias attention_dropout bert_binary_head bias_activation_fusion
    bias_gelu_fusion decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers disable_bias_linear
    encoder_num_layers ffn_hidden_size gated_linear_unit group_query_attention hidden_dropout hidden_size kv_channels
    layernorm_epsilon make_vocab_size_divisible_by max_position_embeddings model_parallel_size norm_epsilon normalization
    num_attention_heads num_layers num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage num_query_groups
    openai_gelu orig_vocab_size padded_vocab_size pipeline_model_parallel_size position_embedding_type qk_layernorm
    rope_scaling_factor rotary_base rotary_percent rotary_seq_len_interpolation_factor swiglu tensor_model_parallel_size
    tokenizer_type true_vocab_size untie_embeddings_and_output_weights use_rope_scaling use_rotary_position_embeddings
    window_attn_skip_freq window_size yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int yarn_mscale
    yarn_mscale_all_dim yarn_original_max_position_embeddings yarn_rotary_scaling_factor
    """.split()
)
"""Read by `architecture_from_args`, or checked against the tensors."""

REFUSED = frozenset(
    """
    activation_func activation_func_clamp_value apply_layernorm_1p apply_residual_connection_post_layernorm
    attention_output_gate decoder_num_layers embed_layernorm enable_mhc_connections experimental_attention_variant
    glu_linear_offset heterogeneous_block_specs heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
    hybrid_attention_ratio hybrid_layer_pattern hybrid_mlp_ratio hybrid_override_pattern is_hybrid_model
    layernorm_zero_centered_gamma linear_attention_freq mtp_num_layers multi_latent_attention no_rope_freq num_experts
    num_moe_experts onnx_safe qk_l2_norm quick_geglu retro_add_retriever rotary_interleaved
    softmax_scale softmax_type spec squared_relu use_mup
    use_rotary_position_embeddings_2d
    """.split()
)
"""Switches to another function, which no target can express. Off: None, False or 0."""

REFUSED_OFF = {"softmax_type": "vanilla"}
"""Values other than None, False and 0 that mean off."""

HARMLESS = frozenset(
    """
    DDP_impl _cpu_offloading_context account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    accumulate_allreduce_grads_in_fp32 activation_func_fp8_input_store activation_offload_fraction
    activations_checkpoint_method activations_checkpoint_num_layers align_grad_reduce align_param_gather
    allow_ambiguous_pad_tokens allow_transformer_engine apply_query_key_layer_scaling apply_rope_fusion
    apply_wd_to_qk_layernorm attention_backend attention_softmax_in_fp32 auto_detect_ckpt_format autocast_dtype
    barrier_with_L1_time batch_invariant_backend batch_invariant_mode batch_p2p_comm batch_p2p_sync batch_size
    bert_embedder_type bert_load beta_fast beta_slow bf16 bias_dropout_fusion bias_swiglu_fusion block_data_path
    cache_mla_latents calc_ft_timeouts calculate_per_token_loss chat_template check_for_large_grads check_for_nan_in_loss
    check_for_nan_in_loss_and_grad check_for_spiky_loss check_weight_hash_across_dp_replicas_interval checkpoint_activations
    checkpoint_num_layers classes_fraction clip_grad clone_scatter_output_in_embedding config_logger_dir
    context_parallel_size cp_comm_type create_all_gather_group create_attention_mask_in_dataloader cross_entropy_fusion_impl
    cross_entropy_loss_fusion curr_iteration dataset_impl deallocate_pipeline_outputs decode_only_cuda_graphs
    decoder_seq_length decoupled_lr decoupled_min_lr decrease_batch_size_if_needed defer_embedding_wgrad_compute
    delay_grad_reduce delay_offload_until_cuda_graph delay_param_gather delay_wgrad_compute
    delta_offload_bytes_across_pp_ranks deprecated_use_mcore_models deterministic_mode disable_bf16_reduced_precision_matmul
    disable_chunked_prefill disable_jit_fuser disable_mamba_mem_eff_path disable_msc_deprecated
    disable_parameter_transpose_cache disable_straggler_on_startup disable_symmetric_registration
    distrib_optim_fully_reshardable_mem_efficient distribute_checkpointed_activations distribute_saved_activations do_test
    do_train do_valid dump_param_to_param_group_map dynamic_loss_scale embedding_init_method embedding_init_method_std
    embedding_path embedding_weights_in_fp32 empty_unused_memory_level enable_autocast enable_chunked_prefill
    enable_cuda_graph enable_experimental enable_ft_package enable_full_sharding_in_hsdp enable_gloo_process_groups
    enable_msc enable_one_logger encoder_pipeline_model_parallel_size encoder_seq_length encoder_tensor_model_parallel_size
    end_weight_decay eod_mask_loss eos_id ep_overlap_early_attn_memory_release error_injection_rate error_injection_type
    evidence_data_path exp_avg_dtype exp_avg_sq_dtype experimental_attention_variant_loss_scale_func
    expert_gtp_weight_remat_size expert_model_parallel_size expert_tensor_parallel_num_weight_shards
    expert_tensor_parallel_size export_te_mcore_model external_cuda_graph faiss_use_gpu fake_process_group filter_warnings
    finalize_model_grads_func fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads finetune
    first_last_layers_bf16 first_pipeline_num_layers flash_attention_version flash_decode fp16 fp16_lm_cross_entropy
    fp32_allreduce fp32_residual_connection fp4 fp8 freeze_all_layers full_validation fully_parallel_load
    fully_parallel_save fused_residual_rmsnorm fused_single_qkv_rope global_batch_size gpu_sniff_test_interval
    grad_reduce_in_bf16 grad_scale_func grad_sync_func gradient_accumulation_fusion gradient_reduce_div_fusion head_lr_mult
    hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes high_priority_a2a_comm_stream
    high_priority_stream_groups hysteresis img_dim img_h img_w indexer_batch_size indexer_log_interval init_method
    init_method_std init_method_xavier_uniform init_model_with_meta_device initial_loss_scale iter_per_epoch iteration
    iterations_to_skip keep_fp8_transpose_cache keep_fp8_transpose_cache_when_using_custom_fsdp kitchen_attention_backend
    kitchen_config_file kitchen_recipe_number kv_lora_rank last_pipeline_num_layers lazy_mpu_init legacy_tokenizer load
    local_rank logging_level logit_dtype loss_scale loss_scale_window lr main_grads_dtype main_params_dtype mask_factor
    mask_prob mask_type masked_softmax_fusion max_seqlen_per_cp_rank max_seqlen_per_dp_cp_rank max_tokens_to_oom
    memory_efficient_layer_norm memory_keys memory_snapshot_path merge_file metadata_path micro_batch_size
    microbatch_group_size_per_vp_stage mid_level_dataset_surplus min_loss_scale min_lr min_offloaded_tensor_size min_scale
    mla_down_proj_fusion mlp_chunks_for_prefill mlp_chunks_for_training mmap_bin_files mmap_warmup mock_data model_type
    modelopt_enabled modules_to_filter most_recent_k mrope_section mscale mscale_all_dim multiple_validation_sets
    no_load_optim no_load_rng no_persist_layer_norm no_save_optim no_save_rng no_sync_func no_weight_decay_cond_type
    null_tokenizer_eod_id null_tokenizer_pad_id num_channels num_classes num_dataset_builder_threads
    num_distributed_optimizer_instances num_floating_point_operations_so_far num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 num_layers_per_virtual_pipeline_stage num_microbatches_with_partial_activation_checkpoints
    num_speculative_tokens num_virtual_stages_per_pipeline_rank num_workers nvtx_ranges object_storage_cache_path
    offload_modules offset_sampling_seed_by_dp_rank optimizer orig_global_batch_size orig_micro_batch_size
    original_max_position_embeddings outer_dp_sharding_strategy output_bert_embeddings output_layer_init_method
    override_ckpt_iteration override_lr_scheduler override_opt_param_scheduler pad_vocab_size param_sync_func params_dtype
    patch_dim per_dataset_sequences_path per_split_data_args_path perform_initialization perform_rl_step persist_layer_norm
    phase_transition_iterations pin_cpu_grads pin_cpu_params pipeline_dtype pipeline_model_parallel_comm_backend
    pipeline_model_parallel_layout pipeline_model_parallel_split_rank pretrained_checkpoint profile q_lora_rank qk_clip
    qk_clip_alpha qk_clip_threshold qk_head_dim qk_pos_emb_head_dim quant_recipe query_in_block_prob rampup_batch_size rank
    record_memory_history record_shapes refit_method relative_attention_max_distance relative_attention_num_buckets
    renormalize_blend_weights replication replication_factor replication_jump report_topk_accuracies reset_attention_mask
    reset_position_ids result_rejected_tracker_filename return_log_probs reuse_grad_buf_for_mxfp8_param_ag
    rope_type rotary_scaling_factor run_workload_inspector_server runtime_time_unit s3_cache_path
    sample_rate save scaled_masked_softmax_fusion scaled_upper_triang_masked_softmax_fusion
    scatter_gather_tensors_in_pipeline seed seq_length sequence_parallel set_level_for_all_loggers sft
    sft_tokenizer_prompt_format sgd_momentum sharp_enabled_group short_seq_prob skip_prompt_log_probs skip_train
    skipped_train_samples special_tokens split standalone_embedding_stage start_eval_at_iter start_weight_decay
    step_batch_size_schedule stream_ckpt_dequant strict_fsdp_dtensor_load suggested_communication_unit_size
    swin_backbone_type symmetric_ar_type te_precision_config_file te_rng_tracker tensor_parallel_num_weight_shards
    test_data_path test_mode throughput_window_size tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens
    timers titles_data_path torch_fsdp2_reshard_after_forward tp_only_amax_red transformer_impl
    transformer_pipeline_model_parallel_size trust_remote_code use_checkpoint_args use_checkpoint_lr_scheduler
    use_checkpoint_opt_param_scheduler use_contiguous_buffers_in_ddp use_contiguous_buffers_in_local_ddp
    use_cpu_initialization use_custom_fsdp use_dist_ckpt use_dist_ckpt_deprecated use_distributed_optimizer use_flash_attn
    use_flashinfer_fused_rope use_fused_weighted_squared_relu use_gigatoken use_gloo_process_groups
    use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_inference_optimized_layers use_kitchen
    use_kitchen_attention use_layer_wise_distributed_optimizer use_layer_wise_param_layout use_legacy_models
    use_legacy_static_engine use_mamba_mem_eff_path use_mcore_models use_megatron_fsdp use_mp_args_from_checkpoint_args
    use_nsys_profiler use_one_sent_docs use_persistent_ckpt_worker use_precision_aware_optimizer use_pytorch_profiler
    use_ring_exchange_p2p use_sharp use_te_activation_func use_te_rng_tracker use_tokenizer_model_from_checkpoint_args
    use_torch_fsdp2 use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping use_transformer_engine_op_fuser v_head_dim
    valid_data_path validation_set_names variable_seq_lengths verify_integrity virtual_pipeline_model_parallel_size
    vocab_extra_ids vocab_file vocab_size warmup wd_incr_steps weight_decay weight_decay_incr_style wgrad_deferral_limit
    world_size wsd_decay_steps yaml_cfg
    """.split()
)
"""Training, data, layout, precision and kernels: the function in real arithmetic is the same."""

HARMLESS_FAMILIES = tuple(
    """
    adam_ adlr_ app_tag_ async_ biencoder_ ckpt_ consumed_ cpu_offloading cuda_graph_ data_ dataloader_ ddp_ dino_
    dist_ckpt_ distributed_ dsa_ eval_ exit_ fim_ flight_recorder_ fp4_ fp8_ fsdp_ ft_ gdp_ grpo_ gtp_ hybrid_ ict_
    inference_ inprocess_ langrl_ linear_ lion_ load_ log_ logits_ lr_ mamba_ manual_gc megatron_fsdp_ mhc_ moe_ mtp_ muon_
    mup_ nccl_ non_persistent_ one_logger_ optimizer_ otel_ overlap_ profile_ pytorch_profiler_ recompute_ rerun_ retriever_
    retro_ rl_ save_ straggler_ tensorboard_ timing_ tokenizer_ tp_comm_ train_ vision_ wandb_
    """.split()
)
"""Prefixes of harmless args, and of details of functions whose switch is in REFUSED (num_experts for moe_, use_mup for mup_)."""


def refuse_setting(name: str, value: Any) -> NoReturn:
    raise HoldfastError(f"args.{name} = {value} changes the function in a way that cannot be converted exactly")


def check_settings(args: Mapping[str, Any], ignored: Collection[str]) -> list[str]:
    """Refuses args under which Megatron computes another function; gives a note for each unknown one that the user ignores."""
    notes = []
    for name, value in args.items():
        if name in REFUSED:
            if value and value != REFUSED_OFF.get(name):
                refuse_setting(name, value)
        elif name not in UNDERSTOOD and name not in HARMLESS and not name.startswith(HARMLESS_FAMILIES) and value:
            if name not in ignored:
                raise HoldfastError(
                    f"args.{name} = {value} is not an arg that Holdfast knows; if it does not change what the model computes, "
                    f"convert with --ignore-args {name}"
                )
            notes.append(f"args.{name} = {value} ignored (--ignore-args)")
    return notes
