"""A pass that cannot be captured as a CUDA graph runs kernel by kernel, with the same losses."""

import pytest
import torch
import torch.distributed as dist

from holdfast.bench.contenders import HoldfastContender, random_batch
from holdfast.config import Config, DataConfig, ModelConfig, TrainConfig
from holdfast.parallel.layout import layout_of
from holdfast.parallel.mesh import build_grid


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the capture of a CPU's pass does not fail")
def test_a_failed_capture_does_not_end_or_change_the_training(one_rank, capfd):
    config = Config(
        model=ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64),
        data=DataConfig(seq_length=16),
        train=TrainConfig(micro_batch_size=2, global_batch_size=2),
    )
    cpu = torch.device("cpu")
    grid = build_grid(layout_of(config.parallel, 1), cpu)
    batches = [random_batch(config, cpu, seed) for seed in range(5)]

    def losses(captures: bool) -> list[float]:
        contender = HoldfastContender(config, grid)
        contender._passes._captures = captures  # on a CPU no graph can be captured
        return [float(contender.step(batch, lambda phase: None)) for batch in batches]

    wanted = losses(captures=False)
    assert "no CUDA graph" not in capfd.readouterr().err
    assert losses(captures=True) == wanted
    assert capfd.readouterr().err.count("warning: no CUDA graph of the pass") == 1
