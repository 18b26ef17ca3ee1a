"""One launch updates all parameters as torch's AdamW does, and the copies in the compute type follow every change of them."""

import weakref

import pytest
import torch
from torch.nn import Parameter

from holdfast.models.products import compute_weight, refresh_copies
from holdfast.train.fused_adamw import FusedAdamW

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
SIZES = ((3, 700), (17,), (1024,))
"""More than a block, less than one, exactly one."""


def parameters(device: torch.device) -> list[Parameter]:
    return [Parameter(torch.randn(size, device=device)) for size in SIZES]


def groups(of: list[Parameter]) -> list[dict]:
    return [{"params": of[:1], "weight_decay": 0.1}, {"params": of[1:], "weight_decay": 0.0}]


def step(optimizer: torch.optim.Optimizer, device: torch.device, skipped: bool) -> None:
    """With gradients divided by 2 to unscale and by 3 to clip, or not at all."""
    if isinstance(optimizer, FusedAdamW):
        norm = torch.tensor(torch.inf if skipped else 1.5, dtype=torch.float64, device=device)
        optimizer.clip_next(norm, 0.5, 2.0)
        optimizer.step()
        return
    optimizer.grad_scale = torch.tensor(6.0, device=device)
    optimizer.found_inf = torch.tensor(float(skipped), device=device)
    optimizer.step()


def compare_with_torch(ours: list[Parameter], dtype: torch.dtype) -> None:
    """Four steps, one of them skipped; `dtype`: of the copies."""
    device = ours[0].device
    theirs = [Parameter(parameter.detach().clone()) for parameter in ours]
    fused, plain = FusedAdamW(groups(ours), **SETTINGS), torch.optim.AdamW(groups(theirs), **SETTINGS)
    fused.write_copies(dtype)
    for number in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in (fused, plain):
            step(optimizer, device, skipped=number == 2)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(a.compute_copy, a.detach().to(dtype))
        assert fused.state[a]["step"] == plain.state[b]["step"] == 3
        for moment in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(fused.state[a][moment], plain.state[b][moment], rtol=1e-5, atol=1e-6)


def test_parameters_change_as_by_torch(device):
    compare_with_torch(parameters(device), torch.float16)


def test_a_state_that_was_loaded_and_gradients_that_moved_are_used(device):
    ours = parameters(device)
    theirs = [Parameter(parameter.detach().clone()) for parameter in ours]
    fused, plain = FusedAdamW(groups(ours), **SETTINGS), torch.optim.AdamW(groups(theirs), **SETTINGS)

    def both(new_gradients: bool) -> None:
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a) if new_gradients or a.grad is None else a.grad.normal_()
            b.grad = a.grad.clone()
        for optimizer in (fused, plain):
            step(optimizer, device, skipped=False)

    both(True)
    both(False)
    for a, b in zip((fused, plain), (fused.state_dict(), plain.state_dict()), strict=True):
        for state in b["state"].values():
            state["exp_avg"] = state["exp_avg"] * 3
            state["step"] = state["step"] + 5
        a.load_state_dict(b)
    both(False)  # the same gradient tensors, another state
    both(True)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert fused.state[a]["step"] == plain.state[b]["step"] == 9


def test_a_step_without_a_norm_neither_clips_nor_skips(device):
    ours, theirs = Parameter(torch.ones(3, device=device)), Parameter(torch.ones(3, device=device))
    ours.grad, theirs.grad = torch.full_like(ours, 2.0), torch.full_like(theirs, 2.0)
    FusedAdamW([ours], **SETTINGS).step()
    torch.optim.AdamW([theirs], **SETTINGS).step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_gradients_of_the_last_step_are_freed(device):
    """They would be there twice during the next pass."""
    weight = Parameter(torch.ones(3, device=device))
    optimizer = FusedAdamW([weight], **SETTINGS)
    weight.grad = torch.ones_like(weight)
    gradient = weakref.ref(weight.grad)
    step(optimizer, device, skipped=False)
    optimizer.zero_grad(set_to_none=True)
    assert gradient() is None


@pytest.mark.parametrize("part", ["transposed", "not aligned"])
def test_gradients_may_be_parts_of_other_tensors(device, part):
    ours = Parameter(torch.ones(6, 5, device=device))
    theirs = Parameter(ours.detach().clone())
    buffer = torch.randn(31, device=device)
    ours.grad = buffer[:30].view(5, 6).T if part == "transposed" else buffer[1:].view(6, 5)
    theirs.grad = ours.grad.contiguous()
    step(FusedAdamW([ours], **SETTINGS), device, skipped=False)
    step(torch.optim.AdamW([theirs], **SETTINGS), device, skipped=False)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("skipped", [True, False])
def test_copies_are_current_after_the_first_step_even_if_it_is_skipped(device, skipped):
    weights = parameters(device)
    optimizer = FusedAdamW(groups(weights), **SETTINGS)
    optimizer.write_copies(torch.float16)
    with torch.no_grad():  # initial values and loaded weights come after the optimizer was built
        for weight in weights:
            weight.normal_()
            weight.grad = torch.ones_like(weight)
    step(optimizer, device, skipped)
    for weight in weights:
        assert compute_weight(weight, torch.float16) is weight.compute_copy
        assert torch.equal(weight.compute_copy, weight.detach().half())


def test_a_copy_at_a_fixed_address_follows_weights_that_were_loaded(device):
    weights = parameters(device)
    FusedAdamW(groups(weights), **SETTINGS).write_copies(torch.float16)
    addresses = [weight.compute_copy.data_ptr() for weight in weights]
    with torch.no_grad():
        weights[1].fill_(3.0)
    refresh_copies(weights)
    assert weights[1].compute_copy.eq(3.0).all()
    assert torch.equal(weights[0].compute_copy, weights[0].detach().half())
    assert addresses == [weight.compute_copy.data_ptr() for weight in weights]
