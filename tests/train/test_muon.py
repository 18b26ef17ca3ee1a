"""Muon against float64 NumPy written apart from it, against torch's own, and over real ranks against one."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.config import ModelConfig, OptimizerConfig
from holdfast.models.gpt import GPT
from holdfast.train.muon import Muon
from holdfast.train.optim import build_optimizer, clip_and_step
from tests.gloo import spawn_ranks

SHAPES = [(8, 5), (5, 12), (6, 6), (7, 3)]
STEPS = 6
LR, DECAY = 0.02, 0.1


def numpy_steps(steps: int) -> list[np.ndarray]:
    values, buffers = initial(), [np.zeros(shape) for shape in SHAPES]
    for step in range(steps):
        for i, gradient in enumerate(gradients_of(step)):
            buffers[i] = 0.95 * buffers[i] + 0.05 * gradient
            x = 0.05 * gradient + 0.95 * buffers[i]
            x = x / max(np.linalg.norm(x), 1e-7)
            for _ in range(5):
                square = x @ x.T
                x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
            size = 0.2 * math.sqrt(max(SHAPES[i]))
            values[i] = values[i] * (1 - LR * DECAY) - LR * size * x
    return values


def initial() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(shape) for shape in SHAPES]


def gradients_of(step: int) -> list[np.ndarray]:
    random = np.random.default_rng(100 + step)
    return [random.standard_normal(shape) * 10.0 ** random.integers(-3, 2) for shape in SHAPES]


def optimizer_for(tensors: list[torch.nn.Parameter]) -> Muon:
    return Muon([{"params": tensors, "weight_decay": DECAY, "muon": True}], lr=LR)


def test_steps_equal_numpy_in_float64() -> None:
    tensors = [torch.nn.Parameter(torch.from_numpy(value)) for value in initial()]
    muon = optimizer_for(tensors)
    for step in range(STEPS):
        for tensor, gradient in zip(tensors, gradients_of(step), strict=True):
            tensor.grad = torch.from_numpy(gradient)
        muon.step()
    for tensor, value in zip(tensors, numpy_steps(STEPS), strict=True):
        np.testing.assert_allclose(tensor.detach().numpy(), value, rtol=1e-9, atol=1e-9)


def test_a_step_is_torch_s_within_bf16() -> None:
    values = [torch.from_numpy(value).float() for value in initial()]
    ours, theirs = ([torch.nn.Parameter(value.clone()) for value in values] for _ in range(2))
    oracle = torch.optim.Muon(theirs, lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for tensors in (ours, theirs):
        for tensor, gradient in zip(tensors, gradients_of(0), strict=True):
            tensor.grad = torch.from_numpy(gradient).float()
    optimizer_for(ours).step()
    oracle.step()
    for before, one, other in zip(values, ours, theirs, strict=True):
        # torch computes in bf16, and a quintic polynomial magnifies its rounding
        assert (one - other).norm() < 0.03 * (other - before).norm()


def step_in_shards() -> list[np.ndarray]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    # As tensor parallelism and FSDP2 cut together: rows twice, rows and columns, rows unevenly, nothing.
    cuts = [(mesh, [_StridedShard(0, split_factor=2), Shard(0)]), (mesh, [Shard(0), Shard(1)]), None]
    cuts.append((mesh["shard"], [Shard(0)]))

    def cut_up(value: np.ndarray, cut: object) -> torch.Tensor:
        whole = torch.from_numpy(value)
        return whole if cut is None else distribute_tensor(whole, *cut, src_data_rank=None)

    tensors = [torch.nn.Parameter(cut_up(value, cut)) for value, cut in zip(initial(), cuts, strict=True)]
    muon = optimizer_for(tensors)
    for step in range(STEPS):
        for tensor, cut, gradient in zip(tensors, cuts, gradients_of(step), strict=True):
            tensor.grad = cut_up(gradient, cut)
        muon.step()
    whole = [tensor.full_tensor() if cut else tensor for tensor, cut in zip(tensors, cuts, strict=True)]
    dist.destroy_process_group()
    return [tensor.detach().numpy() for tensor in whole]


@pytest.mark.distributed
def test_sharded_matrices_step_as_whole_ones() -> None:
    for found in spawn_ranks(4, step_in_shards):
        for tensor, value in zip(found, numpy_steps(STEPS), strict=True):
            np.testing.assert_allclose(tensor, value, rtol=1e-9, atol=1e-9)


def model_with_gradients() -> GPT:
    torch.manual_seed(1)
    model = GPT(
        ModelConfig(num_layers=2, hidden_size=16, num_attention_heads=2, untie_embeddings_and_output_weights=True),
        vocab_size=32, padded_vocab_size=32, max_positions=8,
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
        parameter.grad = torch.randn_like(parameter)
    return model


def test_matrices_of_the_layers_get_muon_and_everything_else_adamw() -> None:
    model = model_with_gradients()
    optimizer = build_optimizer([model], OptimizerConfig(optimizer="muon", lr=0.1), torch.float32)
    clip_and_step(optimizer, torch.tensor(1.0), 1.0, 1.0)
    keys = {name: set(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        matrix = ".layers." in name and parameter.ndim == 2
        assert keys[name] == ({"momentum_buffer"} if matrix else {"step", "exp_avg", "exp_avg_sq"}), name
    decays = {group["weight_decay"] for group in optimizer.param_groups if group.get("muon")}
    assert decays == {0.01}


def test_a_gradient_that_is_not_finite_changes_nothing_and_the_scale_divides() -> None:
    model, scaled = model_with_gradients(), model_with_gradients()
    options = OptimizerConfig(optimizer="muon", lr=0.1)
    plain, other = build_optimizer([model], options, torch.float32), build_optimizer([scaled], options, torch.float32)
    clip_and_step(plain, torch.tensor(0.5), 1.0, 1.0)
    for parameter in scaled.parameters():
        assert parameter.grad is not None
        parameter.grad *= 64
    clip_and_step(other, torch.tensor(0.5), 1.0, 64.0)
    for one, two in zip(model.parameters(), scaled.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    before = copy.deepcopy((model.state_dict(), plain.state_dict()["state"]))
    next(p for p in model.parameters() if p.ndim == 2).grad[0, 0] = math.nan  # type: ignore[index]
    clip_and_step(plain, torch.tensor(math.nan), 1.0, 1.0)
    for old, new in zip(before, (model.state_dict(), plain.state_dict()["state"]), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)
