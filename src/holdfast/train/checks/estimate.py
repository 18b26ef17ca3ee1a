"""`--dry-run`: describes a layout of any number of ranks and estimates its memory, on one machine."""

from holdfast.config import Config
from holdfast.models.flops import flops_per_token
from holdfast.parallel.layout import ParallelLayout, padded_vocab_size, stage_layers
from holdfast.train.model_families import build_stage, family_of
from holdfast.train.schedule import batches_of

TENSOR_SHARDED = (
    "linear_qkv.",
    "linear_fc1",
    "linear_proj.weight",
    "linear_fc2.weight",
    "word_embeddings.",
    "output_layer.",
)


def parameters_per_rank(config: Config, layout: ParallelLayout) -> list[int]:
    """Parameters on one rank of each pipeline rank, after tensor parallelism and sharding."""
    assert config.model.vocab_size is not None
    stages = stage_layers(config.model, config.parallel)
    counts = [0] * layout.pipeline
    for stage in range(len(stages)):
        module = build_stage(config, stage, layout.tensor, config.model.vocab_size)
        for name, parameter in module.named_parameters():
            tensor = layout.tensor if any(piece in name for piece in TENSOR_SHARDED) else 1
            counts[stage % layout.pipeline] += -(-parameter.numel() // (tensor * layout.shard))
    return counts


def bytes_per_parameter(layout: ParallelLayout) -> tuple[float, float]:
    """Bytes of weight and optimizer (two Adam moments), and of the gradient, for each parameter on a rank. All are fp32."""
    shards = layout.replica if layout.shards_updates else 1
    return 4 + 8 / shards, 4 / (shards if layout.sharding == "optim_grads" else 1)


def activation_bytes(config: Config, layout: ParallelLayout) -> int:
    """Bytes kept between forward and backward on the first pipeline rank, without the s² term that fused attention never stores.

    34·s·b·h bytes per layer and micro batch in 16 bits, of which tensor parallelism divides 24 and sequence parallelism all; with
    full recomputation only the layer's input; times the micro batches in flight on the first stage.
    """
    model, train = config.model, config.train
    stages = stage_layers(config.model, config.parallel)
    layers = sum(len(stages[stage]) for stage in range(0, len(stages), layout.pipeline))
    unit = config.data.seq_length * train.micro_batch_size * model.hidden_size
    if train.recompute_granularity == "full":
        factor = 2.0
    else:
        spared = 8 if train.recompute_granularity == "selective" else 0
        divided = (24 - spared) / layout.tensor
        factor = divided + (10 / layout.tensor if config.parallel.sequence_parallel else 10)
    width = 1 if train.bf16 or train.fp16 else 2
    return int(unit * factor * width * layers * layout.pipeline)


def describe(config: Config, layout: ParallelLayout) -> str:
    """The layout in words: parameters, batch, FLOPs, activations, and the layers and memory of each pipeline rank."""
    model, train = config.model, config.train
    assert model.vocab_size is not None and train.global_batch_size is not None
    padded = padded_vocab_size(model.vocab_size, model, layout.tensor)
    stages = stage_layers(model, config.parallel)
    counts = parameters_per_rank(config, layout)
    total = sum(counts) * layout.tensor * layout.shard
    micro = train.global_batch_size // (train.micro_batch_size * layout.data)
    iterations = batches_of(config, layout.data).iterations(train.train_iters)
    tokens = train.global_batch_size * config.data.seq_length
    per_token = flops_per_token(model, config.data.seq_length, padded, family_of(config).predicted)
    lines = [
        f"{layout.words()} on {config.parallel.nnodes} node(s) × {config.parallel.nproc_per_node}",
        f"vocabulary {model.vocab_size:,} padded to {padded:,}; parameters about {total / 1e9:.3f} G",
        f"global batch {train.global_batch_size:,} samples = {micro} micro batches of {train.micro_batch_size} on each of "
        f"{layout.data} data-parallel ranks; {tokens:,} tokens per step, {iterations:,} steps",
        f"FLOPs per token (forward and backward): {per_token / 1e9:,.3f} G",
        f"activations kept on a rank of the first stage: about {activation_bytes(config, layout) / 2**30:.2f} GiB",
    ]
    per_stage = layout.world // layout.pipeline
    state, gradient = bytes_per_parameter(layout)
    for place, count in enumerate(counts):
        own = [stages[stage] for stage in range(place, len(stages), layout.pipeline)]
        layers = ", ".join(f"{stage.start}-{stage.stop - 1}" if len(stage) else "none" for stage in own)
        ranks = f"{place * per_stage}-{(place + 1) * per_stage - 1}" if per_stage > 1 else f"{place}"
        lines.append(
            f"pipeline rank {place} (ranks {ranks}): layers {layers}; per rank {count:,} parameters, "
            f"{count * state / 2**30:.2f} GiB weights and optimizer, {count * gradient / 2**30:.2f} GiB gradients"
        )
    lines += rank_lines(layout)
    return "\n".join(lines)


def rank_lines(layout: ParallelLayout, most: int = 8) -> list[str]:
    """The first ranks and the last one, each with its coordinates."""
    shown = list(range(min(layout.world, most)))
    if layout.world > most:
        shown.append(layout.world - 1)
    lines = []
    for rank in shown:
        place = layout.coordinate(rank)
        data = place["replica"] * layout.shard + place["shard"]
        lines.append(f"rank {rank}: pipeline {place['pipeline']}, data {data}, tensor {place['tensor']}")
        if rank == most - 1 and layout.world > most + 1:
            lines.append("...")
    return lines
