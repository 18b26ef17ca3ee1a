"""The optimizer step against torch's own clipping and AdamW, and what happens to gradients that are not finite."""

import math

import pytest
import torch

from holdfast.config import OptimizerConfig
from holdfast.train.lamb import Lamb
from holdfast.train.optim import LossScale, build_optimizer, clip_and_step


def model_with_gradients(factor: float) -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * factor
    return model


def norm_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.stack([p.grad.double().square().sum() for p in model.parameters()]).sum().sqrt()


@pytest.mark.parametrize(("factor", "scale"), [(1.0, 1.0), (1e-4, 1.0), (512.0, 1024.0)])
def test_clipping_and_stepping_equal_torch_on_unscaled_gradients(factor, scale):
    ours, theirs = model_with_gradients(factor), model_with_gradients(factor / scale)
    optimizer = build_optimizer([ours], OptimizerConfig(lr=0.1, weight_decay=0.3), torch.float32)
    weights = [p for p in theirs.parameters() if p.ndim > 1]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": weights, "weight_decay": 0.3}]
    oracle = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.999), foreach=False, fused=False)
    clip_and_step(optimizer, norm_of(ours) / scale, 1.0, scale)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    oracle.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["adam", "lamb"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_moments_nor_the_step_count(kind, bad):
    model = model_with_gradients(1.0)
    adam = build_optimizer([model], OptimizerConfig(lr=0.1), torch.float32)
    optimizer = adam if kind == "adam" else Lamb(model.parameters(), lr=0.1)
    clip_and_step(optimizer, norm_of(model), 1.0, 1.0)
    before = [p.detach().clone() for p in model.parameters()]
    state = [{key: value.clone() for key, value in optimizer.state[p].items()} for p in model.parameters()]
    next(model.parameters()).grad[0, 0] = bad
    clip_and_step(optimizer, norm_of(model), 1.0, 1.0)
    for parameter, old, moments in zip(model.parameters(), before, state, strict=True):
        assert torch.equal(parameter, old)
        for key, value in moments.items():
            assert torch.equal(optimizer.state[parameter][key], value), key
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip_and_step(optimizer, norm_of(model), 1.0, 1.0)
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_the_loss_scale_halves_after_two_overflows_and_doubles_after_a_window_of_good_steps():
    scale = LossScale(1024.0, 1.0, window=3, hysteresis=2)
    seen = []
    for overflow in (True, True, False, False, False, True):
        scale.update(overflow)
        seen.append(scale.scale)
    assert seen == [1024.0, 512.0, 512.0, 512.0, 1024.0, 1024.0]
