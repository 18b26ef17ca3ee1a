"""The rank grid as arithmetic, without torch: coordinates of ranks, layers of stages, checks of sizes.

Ranks are numbered as Megatron numbers them: tensor changes fastest, then data, pipeline slowest. The grid's axes are (pipeline,
replica, shard, tensor); replica × shard is the data-parallel size.
"""

from dataclasses import dataclass

from holdfast.config import Config, ModelConfig, ParallelConfig, TrainConfig, model_problems
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import count_of

AXES = ("pipeline", "replica", "shard", "tensor")
PIPELINE_KEYS = (
    "num_virtual_stages_per_pipeline_rank", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
)  # fmt: skip
UPDATE_SHARDING = {"optim": "optimizer", "optim_grads": "optimizer and gradients"}


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the grid's axes."""

    pipeline: int
    replica: int
    shard: int
    tensor: int
    virtual: int = 1
    sharding: str = "no_shard"
    """data_parallel_sharding_strategy. Of `optim` and `optim_grads` the replica axis holds all data-parallel ranks."""

    @property
    def world(self) -> int:
        return self.pipeline * self.replica * self.shard * self.tensor

    @property
    def data(self) -> int:
        return self.replica * self.shard

    @property
    def shards_updates(self) -> bool:
        """Whether each replica updates a part of the parameters only (ZeRO-1 and ZeRO-2)."""
        return self.replica > 1 and self.sharding in UPDATE_SHARDING

    def sizes(self) -> tuple[int, ...]:
        return (self.pipeline, self.replica, self.shard, self.tensor)

    def coordinate(self, rank: int) -> dict[str, int]:
        found = {}
        for axis, size in reversed(list(zip(AXES, self.sizes(), strict=True))):
            found[axis], rank = rank % size, rank // size
        return {axis: found[axis] for axis in AXES}

    def words(self) -> str:
        parts = [
            count_of(self.world, "rank"),
            f"tensor {self.tensor}",
            f"pipeline {self.pipeline}" + (f" × {self.virtual} virtual" if self.virtual > 1 else ""),
            f"data {self.data}"
            + (f" ({count_of(self.replica, 'replica')} × {self.shard} shards)" if self.shard > 1 else "")
            + (f" ({UPDATE_SHARDING[self.sharding]} sharded)" if self.shards_updates else ""),
        ]
        return ", ".join(parts)


def layout_of(parallel: ParallelConfig, world: int | None = None) -> ParallelLayout:
    """The grid of `world` ranks (by default nnodes × nproc_per_node); raises if they cannot be divided."""
    if parallel.context_parallel_size != 1:
        raise HoldfastError(
            "context_parallel_size > 1 is not supported; use sequence_parallel and recompute_granularity for long sequences"
        )
    world = world or parallel.nnodes * parallel.nproc_per_node
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    model = tensor * pipeline
    if model < 1 or world % model:
        raise HoldfastError(
            f"{count_of(world, 'rank')} (nnodes {parallel.nnodes} × nproc_per_node {parallel.nproc_per_node}) cannot be "
            f"divided by tensor {tensor} × pipeline {pipeline} = {model}; use a multiple of {count_of(model, 'rank')}"
        )
    data, sharding = world // model, parallel.data_parallel_sharding_strategy
    if sharding != "optim_grads_params":
        if parallel.data_parallel_replicas > 1:
            does = "shards over" if sharding in UPDATE_SHARDING else "replicates on"
            raise HoldfastError(
                f"data_parallel_replicas {parallel.data_parallel_replicas} applies to data_parallel_sharding_strategy "
                f"optim_grads_params; {sharding} {does} all data-parallel ranks: leave it unset"
            )
        replica = data
    else:
        replica = parallel.data_parallel_replicas
        if data % replica:
            raise HoldfastError(f"data_parallel_replicas = {replica} does not divide the data-parallel size {data}")
    virtual = parallel.num_virtual_stages_per_pipeline_rank
    return ParallelLayout(pipeline, replica, data // replica, tensor, virtual, sharding)


def stage_layers(model: ModelConfig, parallel: ParallelConfig) -> list[range]:
    """The layers of each stage, in order. Stage s belongs to pipeline rank s modulo the pipeline size."""
    stages = parallel.pipeline_model_parallel_size * parallel.num_virtual_stages_per_pipeline_rank
    first, last = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    fixed = {0: first, stages - 1: last}
    fixed = {stage: count for stage, count in fixed.items() if count is not None}
    free = stages - len(fixed)
    rest = model.num_layers - sum(count or 0 for count in fixed.values())
    if (free and (rest < free or rest % free)) or (not free and rest):
        raise HoldfastError(
            f"{model.num_layers} layers cannot be divided into {stages} pipeline stages"
            + (f" with {fixed} fixed" if fixed else "")
            + "; change num_layers, pipeline_model_parallel_size, or give decoder_first_pipeline_num_layers and "
            "decoder_last_pipeline_num_layers"
        )
    counts = [fixed[stage] if stage in fixed else rest // free for stage in range(stages)]
    starts = [sum(count or 0 for count in counts[:stage]) for stage in range(stages)]
    return [range(start, start + (count or 0)) for start, count in zip(starts, counts, strict=True)]


def padded_vocab_size(vocab_size: int, model: ModelConfig, tensor: int) -> int:
    multiple = model.make_vocab_size_divisible_by * tensor
    return -(-vocab_size // multiple) * multiple


def check_layout(config: Config, layout: ParallelLayout) -> None:
    """Raises one error that names every combination of keys that cannot work."""
    model, train, seq_length = config.model, config.train, config.data.seq_length
    heads, tensor = model.num_attention_heads, ("tensor_model_parallel_size", layout.tensor)
    groups = ("num_query_groups", model.num_query_groups) if model.num_query_groups else ("num_attention_heads", heads)
    divisible = [(("num_attention_heads", heads), groups), (groups, tensor)]
    if model.kv_channels is None:
        divisible.append((("hidden_size", model.hidden_size), ("num_attention_heads", heads)))
    divisible.append((("ffn_hidden_size", model.ffn), tensor))
    if config.parallel.sequence_parallel:
        divisible.append((("seq_length", seq_length), tensor))
    problems = [
        f"{key} {value} is not divisible by {by} {divisor}"
        for (key, value), (by, divisor) in divisible
        if value % divisor
    ] + model_problems(model)
    if seq_length > (model.max_position_embeddings or seq_length):
        problems.append(
            f"seq_length {seq_length} is longer than max_position_embeddings {model.max_position_embeddings}"
        )
    if layout.pipeline == 1:
        problems += [
            f"{key} needs pipeline_model_parallel_size > 1"
            for key in PIPELINE_KEYS
            if getattr(config.parallel, key) != getattr(ParallelConfig(), key)
        ]
    if train.fp16 and train.bf16:
        problems.append("fp16 and bf16 exclude each other; set one of them")
    problems += _batch_problems(train, layout)
    if problems:
        raise HoldfastError("; ".join(problems))
    stage_layers(model, config.parallel)


def _batch_problems(train: TrainConfig, layout: ParallelLayout) -> list[str]:
    """Batch sizes that cannot be divided over the data-parallel ranks, or that are too small for the pipeline."""
    if len(train.rampup_batch_size) not in (0, 3):
        return ["rampup_batch_size takes three numbers: START INCREMENT SAMPLES"]
    portion = train.micro_batch_size * layout.data
    sizes = {"global_batch_size": train.global_batch_size or portion}
    if train.rampup_batch_size:
        start, increment, _ = train.rampup_batch_size
        sizes |= {"rampup_batch_size START": start, "rampup_batch_size INCREMENT": increment}
    problems = []
    for key, size in sizes.items():
        if size % portion:
            problems.append(
                f"{key} {size} is not divisible by micro_batch_size {train.micro_batch_size} × data-parallel size {layout.data}"
            )
        elif layout.virtual > 1 and size // portion % layout.pipeline:
            problems.append(
                f"{key} {size} is {count_of(size // portion, 'micro batch')} per data-parallel rank; the interleaved schedule "
                f"needs a multiple of pipeline_model_parallel_size {layout.pipeline}"
            )
        elif size // portion < layout.pipeline and not key.endswith("INCREMENT"):
            problems.append(
                f"{key} {size} is {count_of(size // portion, 'micro batch')} per data-parallel rank, fewer than the "
                f"{layout.pipeline} stages of the pipeline; set it to at least {portion * layout.pipeline}"
            )
    return problems
