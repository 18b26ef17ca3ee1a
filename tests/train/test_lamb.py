"""LAMB against an implementation in float64 NumPy that was written apart from it, and over real ranks against one."""

import copy

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from holdfast.train.lamb import Lamb
from tests.gloo import spawn_ranks

SHAPES = [(8, 5), (5,), (3, 4, 2), (6,)]
STEPS = 50


class NumpyLamb:
    """One parameter at a time, in float64, straight from the formulas. The last two parameters have no decay."""

    def __init__(self, parameters: list[np.ndarray], lr: float, weight_decay: float) -> None:
        self.parameters, self.lr = parameters, lr
        self.decay = [weight_decay, weight_decay, 0.0, 0.0]
        self.m = [np.zeros_like(p) for p in parameters]
        self.v = [np.zeros_like(p) for p in parameters]
        self.t = 0

    def step(self, gradients: list[np.ndarray]) -> None:
        self.t += 1
        beta1, beta2, eps = 0.9, 0.999, 1e-6
        for i, gradient in enumerate(gradients):
            self.m[i] = beta1 * self.m[i] + (1 - beta1) * gradient
            self.v[i] = beta2 * self.v[i] + (1 - beta2) * gradient**2
            m, v = self.m[i] / (1 - beta1**self.t), self.v[i] / (1 - beta2**self.t)
            update = m / (np.sqrt(v) + eps) + self.decay[i] * self.parameters[i]
            ratio = 1.0
            if self.decay[i]:
                length, update_length = np.linalg.norm(self.parameters[i]), np.linalg.norm(update)
                if length > 0 and update_length > 0:
                    ratio = length / update_length
            self.parameters[i] = self.parameters[i] - self.lr * ratio * update


def initial() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    values = [random.standard_normal(shape) for shape in SHAPES]
    # A parameter that starts at zero, as biases do, has no length to step by.
    values[1][:] = 0.0
    return values


def gradients_of(step: int) -> list[np.ndarray]:
    random = np.random.default_rng(100 + step)
    return [random.standard_normal(shape) * 10.0 ** random.integers(-3, 2) for shape in SHAPES]


def optimizer_for(tensors: list[torch.nn.Parameter], lr: float, weight_decay: float) -> Lamb:
    groups = [{"params": tensors[:2], "weight_decay": weight_decay}, {"params": tensors[2:], "weight_decay": 0.0}]
    return Lamb(groups, lr=lr, betas=(0.9, 0.999), eps=1e-6)


@pytest.mark.parametrize("weight_decay", [0.01, 0.0])
def test_fifty_steps_equal_numpy_in_float64(weight_decay: float) -> None:
    expected = NumpyLamb(initial(), 0.02, weight_decay)
    tensors = [torch.nn.Parameter(torch.from_numpy(value)) for value in initial()]
    lamb = optimizer_for(tensors, 0.02, weight_decay)
    for step in range(STEPS):
        for tensor, gradient in zip(tensors, gradients_of(step), strict=True):
            tensor.grad = torch.from_numpy(gradient)
        lamb.step()
        expected.step(gradients_of(step))
    for tensor, value in zip(tensors, expected.parameters, strict=True):
        np.testing.assert_allclose(tensor.detach().numpy(), value, rtol=1e-10, atol=1e-10)


def test_state_is_named_as_adam_s_and_resumes_to_the_bit() -> None:
    def run(lamb: Lamb, tensors: list[torch.nn.Parameter], steps: range) -> None:
        for step in steps:
            for tensor, gradient in zip(tensors, gradients_of(step), strict=True):
                tensor.grad = torch.from_numpy(gradient).float()
            lamb.step()

    tensors = [torch.nn.Parameter(torch.from_numpy(value).float()) for value in initial()]
    lamb = optimizer_for(tensors, 0.02, 0.01)
    run(lamb, tensors, range(5))
    assert set(lamb.state[tensors[0]]) == {"exp_avg", "exp_avg_sq", "step"}
    copies = [torch.nn.Parameter(tensor.detach().clone()) for tensor in tensors]
    resumed = optimizer_for(copies, 0.02, 0.01)
    resumed.load_state_dict(copy.deepcopy(lamb.state_dict()))
    run(lamb, tensors, range(5, 10))
    run(resumed, copies, range(5, 10))
    for tensor, other in zip(tensors, copies, strict=True):
        assert torch.equal(tensor, other)


def test_parameters_without_gradient_stay() -> None:
    with_gradient, without = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    lamb = Lamb([with_gradient, without], lr=0.1)
    with_gradient.grad = torch.ones(3)
    lamb.step()
    assert torch.equal(without, torch.ones(3))
    assert without not in lamb.state
    assert not torch.equal(with_gradient, torch.ones(3))


def step_in_shards() -> list[np.ndarray]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    # As tensor parallelism and FSDP2 cut together: rows twice, one axis, rows and columns, nothing.
    cuts = [
        (mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        (mesh["shard"], [Shard(0)]),
        (mesh, [Shard(0), Shard(1)]),
        None,
    ]

    def cut_up(value: np.ndarray, cut: object) -> torch.Tensor:
        whole = torch.from_numpy(value)
        return whole if cut is None else distribute_tensor(whole, *cut, src_data_rank=None)

    tensors = [torch.nn.Parameter(cut_up(value, cut)) for value, cut in zip(initial(), cuts, strict=True)]
    lamb = optimizer_for(tensors, 0.02, 0.01)
    for step in range(STEPS):
        for tensor, cut, gradient in zip(tensors, cuts, gradients_of(step), strict=True):
            tensor.grad = cut_up(gradient, cut)
        lamb.step()
    whole = [tensor.full_tensor() if cut else tensor for tensor, cut in zip(tensors, cuts, strict=True)]
    dist.destroy_process_group()
    return [tensor.detach().numpy() for tensor in whole]


@pytest.mark.distributed
def test_sharded_parameters_step_as_whole_ones() -> None:
    found, *_ = spawn_ranks(4, step_in_shards)
    expected = NumpyLamb(initial(), 0.02, 0.01)
    for step in range(STEPS):
        expected.step(gradients_of(step))
    for tensor, value in zip(found, expected.parameters, strict=True):
        np.testing.assert_allclose(tensor, value, rtol=1e-10, atol=1e-10)
