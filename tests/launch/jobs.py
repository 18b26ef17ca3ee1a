"""Jobs for the tests, without a command line and without files."""

from collections.abc import Sequence
from pathlib import Path

from holdfast.config import Config, DataConfig, ParallelConfig, TrainConfig
from holdfast.launch.preprocessing_job import PreprocessingJob
from holdfast.launch.training_job import TrainingJob
from holdfast.parallel.layout import layout_of


def training(
    run: Path, nodes: int = 1, ranks: int = 1, iterations: int = 100, vocab_file: str | None = None
) -> TrainingJob:
    parallel = ParallelConfig(nnodes=nodes, nproc_per_node=ranks)
    train = TrainConfig(save=str(run), train_iters=iterations)
    return TrainingJob(
        Config(train=train, data=DataConfig(vocab_file=vocab_file), parallel=parallel), layout_of(parallel)
    )


def preprocessing(prefix: Path, command: Sequence[str], partitions: int) -> PreprocessingJob:
    return PreprocessingJob(list(command), partitions, str(prefix), {})
