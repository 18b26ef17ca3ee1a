"""The range of every numeric key of the configuration, checked before any rank starts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.config import Config, config_keys
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
SHARE = Bound("must be between 0 and 1", lambda value: 0 <= value <= 1)

_KEYS = {
    AT_LEAST_1: "num_layers hidden_size num_attention_heads ffn_hidden_size num_query_groups kv_channels "
    "max_position_embeddings vocab_size make_vocab_size_divisible_by seq_length bert_max_ngrams train_iters train_samples "
    "micro_batch_size global_batch_size keep_last keep_every lr_decay_iters lr_decay_samples loss_scale_window hysteresis "
    "tensor_model_parallel_size pipeline_model_parallel_size num_virtual_stages_per_pipeline_rank context_parallel_size "
    "data_parallel_replicas nproc_per_node nnodes log_interval",
    AT_LEAST_0: "num_workers seed eval_interval eval_iters save_interval rampup_batch_size lr min_lr lr_warmup_iters "
    "lr_warmup_samples lr_wsd_decay_iters weight_decay clip_grad node_rank max_restarts snapshot_interval hang_timeout "
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers",
    ABOVE_0: "rotary_base norm_epsilon init_method_std lr_poly_power adam_eps initial_loss_scale min_loss_scale "
    "distributed_timeout_minutes",
    BELOW_1: "hidden_dropout attention_dropout adam_beta1 adam_beta2",
    SHARE: "masked_lm_prob short_seq_prob lr_warmup_fraction",
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
    if config.optimizer.min_lr > config.optimizer.lr >= 0:
        problems.append(f"--min-lr {config.optimizer.min_lr:g} must not exceed --lr {config.optimizer.lr:g}")
    if problems:
        raise UsageError("; ".join(problems))


def _problems(key: str, value: Any) -> list[str]:
    if value is None:
        return []
    flag = "--" + key.replace("_", "-")
    values = value if isinstance(value, tuple) else (value,)
    bound = BOUNDS[key]
    return [
        f"{flag} {number:g} {bound.words}" for number in values if not (math.isfinite(number) and bound.holds(number))
    ]
