"""The [optimizer] section of the configuration: optimizer, learning rates, extra terms of the loss, loss scale."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate and loss scale."""

    optimizer: Literal["adam", "lamb", "muon"] = "adam"
    """adam (AdamW), lamb for very large batches, or muon: Muon for the matrices of the layers, AdamW for everything else."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    lr_mult: str | None = None
    """Factors on the learning rate by parameter name: PATTERN=FACTOR,... such as embedding=0.1,mlp=2. The first match counts."""
    decoupled_lr: float | None = None
    """Peak learning rate of the word embedding and the output matrix. Unset: lr."""
    decoupled_min_lr: float | None = None
    """With decoupled_lr: its value at the end of the decay. Unset: min_lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD", "polynomial"] = "cosine"
    """Shape of the decay after the warm-up."""
    lr_decay_iters: int | None = None
    """Steps until min_lr is reached. Unset: the whole run."""
    lr_decay_samples: int | None = None
    """Samples until min_lr is reached, with train_samples. Unset: the whole run."""
    lr_warmup_iters: int = 0
    """Steps of linear warm-up."""
    lr_warmup_samples: int = 0
    """Samples of linear warm-up, with train_samples."""
    lr_warmup_fraction: float | None = None
    """Warm-up as a fraction of the decay, instead of lr_warmup_iters."""
    lr_wsd_decay_iters: int | None = None
    """WSD: steps of the final decay."""
    lr_wsd_decay_style: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "exponential"
    """WSD: shape of the final decay."""
    lr_poly_power: float = 0.5
    """Exponent of the polynomial decay (1 - progress)^power. Progress counts from the start of the warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay. Biases and norms have none."""
    adam_beta1: float = 0.9
    """Decay rate of the first moment (Adam and LAMB)."""
    adam_beta2: float = 0.999
    """Decay rate of the second moment (Adam and LAMB)."""
    adam_eps: float = 1e-8
    """Epsilon of Adam and LAMB."""
    muon_momentum: float = 0.95
    """Muon: momentum of the gradient (Nesterov)."""
    muon_num_ns_steps: int = 5
    """Muon: Newton-Schulz iterations per step."""
    z_loss: float = 0.0
    """GPT: coefficient of z-loss, which adds coefficient × log²Z to the loss of each token; 1e-4 is common. 0: none."""
    spike_guard: float | None = None
    """Skip a step whose loss is this many robust standard deviations above the median of the last 128. Unset: never."""
    spike_action: Literal["skip", "rewind"] = "skip"
    """skip: leave out the step. rewind: also go back to the newest memory snapshot (set snapshot_interval to 2 or more)."""
    clip_grad: float = 1.0
    """Clip gradients to this global norm. 0: no clipping."""
    initial_loss_scale: float = 2.0**32
    """fp16: initial loss scale."""
    min_loss_scale: float = 1.0
    """fp16: smallest loss scale."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow before the loss scale doubles."""
    hysteresis: int = 2
    """fp16: overflows before the loss scale halves."""
