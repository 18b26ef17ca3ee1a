"""The rank grid as arithmetic, without torch: coordinates of ranks, layers of stages, checks of sizes.

Ranks are numbered as Megatron numbers them: tensor changes fastest, then data, pipeline slowest. The grid's axes are (pipeline,
replica, shard, tensor); replica × shard is the data-parallel size.
"""

from dataclasses import dataclass

from holdfast.config import Config, ModelConfig, ParallelConfig
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import count_of

AXES = ("pipeline", "replica", "shard", "tensor")


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the grid's axes."""

    pipeline: int
    replica: int
    shard: int
    tensor: int
    virtual: int = 1

    @property
    def world(self) -> int:
        return self.pipeline * self.replica * self.shard * self.tensor

    @property
    def data(self) -> int:
        return self.replica * self.shard

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
            + (f" ({count_of(self.replica, 'replica')} × {self.shard} shards)" if self.shard > 1 else ""),
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
    data = world // model
    if parallel.data_parallel_sharding_strategy == "no_shard":
        replica = data
    else:
        replica = parallel.data_parallel_replicas
        if data % replica:
            raise HoldfastError(f"data_parallel_replicas = {replica} does not divide the data-parallel size {data}")
    return ParallelLayout(pipeline, replica, data // replica, tensor, parallel.num_virtual_stages_per_pipeline_rank)


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
    portion = train.micro_batch_size * layout.data
    batch = train.global_batch_size or portion
    divisible = [(("num_attention_heads", heads), groups), (groups, tensor)]
    if model.kv_channels is None:
        divisible.append((("hidden_size", model.hidden_size), ("num_attention_heads", heads)))
    if model.ffn_hidden_size:
        divisible.append((("ffn_hidden_size", model.ffn_hidden_size), tensor))
    if config.parallel.sequence_parallel:
        divisible.append((("seq_length", seq_length), tensor))
    problems = [
        f"{key} {value} is not divisible by {by} {divisor}"
        for (key, value), (by, divisor) in divisible
        if value % divisor
    ]
    for size in (batch, *train.rampup_batch_size[:2]):
        if size % portion:
            problems.append(
                f"global_batch_size {size} is not divisible by micro_batch_size {train.micro_batch_size} "
                f"× data-parallel size {layout.data}"
            )
    if seq_length > (model.max_position_embeddings or seq_length):
        problems.append(
            f"seq_length {seq_length} is longer than max_position_embeddings {model.max_position_embeddings}"
        )
    if layout.virtual > 1 and layout.pipeline == 1:
        problems.append("num_virtual_stages_per_pipeline_rank needs pipeline_model_parallel_size > 1")
    if layout.virtual > 1 and batch // portion % layout.pipeline:
        problems.append("the interleaved schedule needs a number of micro batches that the pipeline size divides")
    if train.fp16 and train.bf16:
        problems.append("fp16 and bf16 exclude each other; set one of them")
    if len(train.rampup_batch_size) not in (0, 3):
        problems.append("rampup_batch_size takes three numbers: START INCREMENT SAMPLES")
    if problems:
        raise HoldfastError("; ".join(problems))
    stage_layers(model, config.parallel)
