"""Keys that are set and have no effect, because another key switches off what they belong to.

They are reported and not refused: flags often change a file in which such keys stay behind (`llama3_1b --no-use-rope-scaling`).
The keys of `[model]` also identify a run: if they were refused, a run that has one could not continue.
"""

from holdfast.config import Config, section_of


def unused_keys(config: Config) -> list[str]:
    """A warning for each key that differs from its default and has no effect."""
    groups = _switched_off(config)
    found = [(key, reason) for keys, reason in groups for key in keys.split() if _is_set(config, key)]
    return [f"warning: --{key.replace('_', '-')} has no effect: {reason}" for key, reason in found]


def _is_set(config: Config, key: str) -> bool:
    section = str(section_of(key))
    return bool(getattr(getattr(config, section), key) != getattr(getattr(Config(), section), key))


def _switched_off(config: Config) -> list[tuple[str, str]]:
    """Keys that nothing reads under this configuration, and the reason."""
    model, optimizer, train, log = config.model, config.optimizer, config.train, config.log
    rope = model.position_embedding_type == "rope"
    scaling = model.rope_scaling_type if model.use_rope_scaling else None
    conditions = [
        (rope, "rotary_base", "it needs --position-embedding-type rope"),
        (scaling, "rope_scaling_type rope_scaling_factor", "it needs --use-rope-scaling"),
        (scaling == "llama3", "rope_low_freq_factor rope_high_freq_factor", "it is a key of rope_scaling_type llama3"),
        (
            scaling == "yarn",
            "yarn_beta_fast yarn_beta_slow yarn_attention_factor",
            "it is a key of rope_scaling_type yarn",
        ),
        (model.model_type == "bert" or not model.swiglu, "openai_gelu", "the MLP of --swiglu has no GELU"),
        (model.disable_bias_linear, "add_qkv_bias", "without --disable-bias-linear all linear layers have a bias"),
        (
            model.model_type == "bert",
            "bert_variant bert_no_binary_head masked_lm_prob short_seq_prob bert_sentence_order bert_whole_word_mask "
            "bert_max_ngrams",
            "it is a key of BERT",
        ),
        (train.load, "finetune no_load_optim", "it needs --load"),
        (train.fp8, "fp8_recipe", "it needs --fp8"),
        (train.fp16, "initial_loss_scale min_loss_scale loss_scale_window hysteresis", "it needs --fp16"),
        (
            config.parallel.tensor_model_parallel_size > 1,
            "sequence_parallel",
            "it needs --tensor-model-parallel-size above 1",
        ),
        (optimizer.optimizer == "muon", "muon_momentum muon_num_ns_steps", "it needs --optimizer muon"),
        (optimizer.lr_decay_style == "WSD", "lr_wsd_decay_iters lr_wsd_decay_style", "it needs --lr-decay-style WSD"),
        (optimizer.lr_decay_style == "polynomial", "lr_poly_power", "it needs --lr-decay-style polynomial"),
        (train.train_samples, "lr_decay_samples lr_warmup_samples", "the length of the run is train_iters"),
        (train.train_samples is None, "lr_decay_iters", "the length of the run is train_samples"),
        (
            optimizer.lr_warmup_fraction is None,
            "lr_warmup_iters lr_warmup_samples",
            "lr_warmup_fraction sets the length of the warm-up",
        ),
        (
            train.train_samples is None or not optimizer.lr_warmup_samples,
            "lr_warmup_iters",
            "lr_warmup_samples sets the length of the warm-up",
        ),
        (log.wandb_project, "wandb_exp_name wandb_entity", "it needs --wandb-project"),
        (log.mlflow_experiment, "mlflow_tracking_uri", "it needs --mlflow-experiment"),
        (log.metrics_port is not None, "metrics_host", "it needs --metrics-port"),
    ]
    return [(keys, reason) for used, keys, reason in conditions if not used]
