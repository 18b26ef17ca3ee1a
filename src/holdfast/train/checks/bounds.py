"""The range of every numeric key of the configuration, checked before any rank starts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.config import Config, OptimizerConfig, config_keys
from holdfast.system.errors import UsageError


@dataclass(frozen=True)
class Bound:
    """A range: the words of its error message and its test."""

    words: str
    holds: Callable[[float], bool]


AT_LEAST_1 = Bound("must be at least 1", lambda value: value >= 1)
AT_LEAST_0 = Bound("must be at least 0", lambda value: value >= 0)
ABOVE_0 = Bound("must be above 0", lambda value: value > 0)
BELOW_1 = Bound("must be at least 0 and below 1", lambda value: 0 <= value < 1)
SEED = Bound("must be between 0 and 4294967295", lambda value: 0 <= value < 2**32)  # NumPy's range
PORT = Bound("must be between 0 and 65535", lambda value: 0 <= value <= 65535)
SHARE = Bound("must be between 0 and 1", lambda value: 0 <= value <= 1)
UP_TO_1 = Bound("must be above 0 and at most 1", lambda value: 0 < value <= 1)

_KEYS = {
    AT_LEAST_1: "num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups kv_channels "
    "max_position_embeddings vocab_size make_vocab_size_divisible_by seq_length bert_max_ngrams train_iters train_samples "
    "micro_batch_size global_batch_size keep_last keep_every lr_decay_iters lr_decay_samples loss_scale_window hysteresis "
    "tensor_model_parallel_size pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank context_parallel_size "
    "data_parallel_replicas nproc_per_node nnodes log_interval muon_num_ns_steps rope_scaling_factor "
    "original_max_position_embeddings query_pre_attn_scalar",
    AT_LEAST_0: "num_workers eval_interval eval_iters eval_samples save_interval rampup_batch_size lr min_lr "
    "lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters weight_decay clip_grad node_rank max_restarts snapshot_interval "
    "hang_timeout decoupled_lr decoupled_min_lr decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers window_size "
    "z_loss window_attn_skip_freq attn_logit_softcapping final_logit_softcapping",
    ABOVE_0: "rotary_base rope_low_freq_factor rope_high_freq_factor yarn_beta_fast yarn_beta_slow yarn_attention_factor "
    "norm_epsilon init_method_std lr_poly_power adam_eps initial_loss_scale min_loss_scale "
    "distributed_timeout_minutes spike_guard",
    BELOW_1: "hidden_dropout attention_dropout adam_beta1 adam_beta2 muon_momentum",
    SEED: "seed",
    PORT: "metrics_port",
    UP_TO_1: "rotary_percent",
    SHARE: "masked_lm_prob short_seq_prob lr_warmup_fraction snapshot_max_slowdown",
}
BOUNDS = {key: bound for bound, keys in _KEYS.items() for key in keys.split()}


def check_bounds(config: Config) -> None:
    """Raises one UsageError that names every key out of its range."""
    problems = []
    for section, keys in config_keys().items():
        for key in keys:
            if key in BOUNDS:
                problems += _problems(key, getattr(getattr(config, section), key))
    if config.parallel.node_rank >= config.parallel.nnodes > 0:
        problems.append(f"--node-rank {config.parallel.node_rank} must be below --nnodes {config.parallel.nnodes}")
    problems += _rate_problems(config.optimizer)
    if config.parallel.standby and config.train.save is None:
        problems.append("--standby needs --save: spare processes continue from the snapshots of a run folder")
    problems += _rewind_problems(config)
    if problems:
        raise UsageError("; ".join(problems))


def _rewind_problems(config: Config) -> list[str]:
    if config.optimizer.spike_action != "rewind":
        return []
    problems = []
    if config.optimizer.spike_guard is None:
        problems.append("--spike-action rewind needs --spike-guard, the threshold of a spike")
    if config.train.save is None:
        problems.append("--spike-action rewind needs --save: memory snapshots belong to a run folder")
    if config.snapshot.snapshot_interval < 2:
        problems.append(
            f"--spike-action rewind goes back to the newest memory snapshot: with --snapshot-interval "
            f"{config.snapshot.snapshot_interval} there is none before the last step; give the number of steps to go back"
        )
    return problems


def _rate_problems(options: OptimizerConfig) -> list[str]:
    problems = []
    if options.min_lr > options.lr >= 0:
        problems.append(f"--min-lr {options.min_lr:g} must not exceed --lr {options.lr:g}")
    floor = options.min_lr if options.decoupled_min_lr is None else options.decoupled_min_lr
    if options.decoupled_lr is not None and floor > options.decoupled_lr >= 0:
        problems.append(f"--decoupled-min-lr {floor:g} must not exceed --decoupled-lr {options.decoupled_lr:g}")
    if options.decoupled_lr is None and options.decoupled_min_lr is not None:
        problems.append("--decoupled-min-lr needs --decoupled-lr")
    return problems


def _problems(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    flag = "--" + key.replace("_", "-")
    values = value if isinstance(value, tuple) else (value,)
    bound = BOUNDS[key]
    # Integers are always finite, and may be too large for a float.
    wrong = [x for x in values if not ((isinstance(x, int) or math.isfinite(x)) and bound.holds(x))]
    return [f"{flag} {x if isinstance(x, int) else format(x, 'g')} {bound.words}" for x in wrong]
