"""Each kernel computes what plain torch computes in fp32, forward and backward, at sizes that are not multiples of its tiles."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from holdfast.models.layers import rotate


def near(found: Tensor, wanted: Tensor, tolerance: float | None = None) -> None:
    """Relative error of the whole tensor: of fp32 arithmetic, or of bf16 inputs on the GPU."""
    limit = tolerance or (1e-2 if found.is_cuda else 1e-5)
    assert (found.float() - wanted.float()).norm() <= limit * wanted.float().norm().clamp(min=1e-9)


def random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)


def leaf(x: Tensor) -> Tensor:
    return x.float().detach().clone().requires_grad_()


@pytest.mark.parametrize("width", [96, 1024])
@pytest.mark.parametrize("centred", [True, False])
def test_norm_of_a_sum_and_both_gradients(device, width, centred):
    from holdfast.kernels.norm import norm_backward, norm_forward

    x, branch, dtotal, dout = (random(device, 41, width) for _ in range(4))
    bias, weight, shift = (torch.randn(width, device=device) for _ in range(3))
    X, BRANCH, BIAS, WEIGHT, SHIFT = leaf(x), leaf(branch), leaf(bias), leaf(weight), leaf(shift)
    total = X + BRANCH + BIAS
    normed = F.layer_norm(total, (width,), WEIGHT, SHIFT) if centred else F.rms_norm(total, (width,), WEIGHT, 1e-5)
    (total * dtotal.float() + normed * dout.float()).sum().backward()

    found_total, found, mean, scale = norm_forward(x, weight, shift if centred else None, 1e-5, centred, branch, bias)
    dx, (dweight, dshift, dbias) = norm_backward(dout, dtotal, found_total, weight, mean, scale)
    near(found_total, total)
    near(found, normed)
    near(dx, X.grad)
    near(dweight, WEIGHT.grad)
    near(dbias, BIAS.grad)
    if centred:
        near(dshift, SHIFT.grad)


@pytest.mark.parametrize("centred", [True, False])
def test_a_norm_written_in_fp8(device, site, centred):
    from holdfast.kernels.fp8 import Quantized
    from holdfast.kernels.norm import norm_forward, norm_transposed

    x, weight, shift = random(device, 41, 96), torch.randn(96, device=device) * 4, torch.randn(96, device=device)
    shift = shift if centred else None
    wanted = F.layer_norm(x.float(), (96,), weight, shift) if centred else F.rms_norm(x.float(), (96,), weight, 1e-5)
    total, out, mean, scale = norm_forward(x, weight, shift, 1e-5, centred, None, None, site)
    transposed = norm_transposed(total, weight, shift, mean, scale, site)
    stands_for(Quantized(out, transposed, site.scale), wanted, site)


def test_a_branch_and_its_bias_are_added(device):
    from holdfast.kernels.norm import add_bias

    x, branch, bias = random(device, 5, 96), random(device, 5, 96), torch.randn(96, device=device)
    near(add_bias(x, branch, bias), x.float() + branch.float() + bias)


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu_its_gradient_and_the_bias_gradient(device, approximate):
    from holdfast.kernels.activation import gelu_backward, gelu_forward

    x, dout = random(device, 37, 600), random(device, 37, 600)
    X = leaf(x)
    wanted = F.gelu(X, approximate=approximate)
    wanted.backward(dout.float())
    highest, steepest = (torch.zeros((), device=device) for _ in range(2))
    near(gelu_forward(x, approximate == "tanh", highest), wanted)
    dx, dbias = gelu_backward(dout, x, approximate == "tanh", steepest)
    near(dx, X.grad)
    near(dbias, X.grad.sum(0))
    near(highest, wanted.abs().max())
    near(steepest, X.grad.abs().max())


def test_swiglu_and_its_gradients(device):
    from holdfast.kernels.activation import swiglu_backward, swiglu_forward

    x, dout = random(device, 37, 1200), random(device, 37, 600)
    X = leaf(x)
    gate, up = X.chunk(2, 1)
    wanted = F.silu(gate) * up
    wanted.backward(dout.float())
    highest, steepest = (torch.zeros((), device=device) for _ in range(2))
    near(swiglu_forward(x, highest), wanted)
    near(swiglu_backward(dout, x, steepest), X.grad)
    near(highest, wanted.abs().max())
    near(steepest, X.grad.abs().max())


def test_column_sums(device):
    from holdfast.kernels.column_sums import column_sums, sum_partial

    x = random(device, 77, 600)
    near(column_sums(x), x.float().sum(0))
    partial = torch.randn(150, 3, 70, device=device)
    near(sum_partial(partial), partial.sum(0))


@pytest.mark.parametrize(("groups", "queries"), [(4, 1), (2, 3)])
@pytest.mark.parametrize("rotary", [False, True])
def test_gradients_of_q_k_and_v_in_one_buffer(device, groups, queries, rotary):
    from holdfast.kernels.attention import gather_gradients, rotate_

    batch, tokens, head = 2, 33, 64
    qkv = random(device, batch, tokens, groups * (queries + 2) * head)
    dq = random(device, batch, groups * queries, tokens, head)
    dk = random(device, batch, tokens, groups, head).transpose(1, 2)
    dv = random(device, batch, groups, tokens, head)
    angles = torch.rand(1, 1, tokens, head // 2, device=device).repeat(1, 1, 1, 2)
    turns = (angles.cos(), angles.sin()) if rotary else None
    QKV = leaf(qkv)
    slots = QKV.view(batch, tokens, groups, queries + 2, head)
    q, k, v = slots[..., :queries, :].flatten(2, 3).transpose(1, 2), *slots[..., queries:, :].permute(3, 0, 2, 1, 4)
    if turns:
        q, k = rotate(q, *turns), rotate(k, *turns)
        turned = qkv.clone()
        rotate_(turned, queries, head, turns)
        found = turned.view_as(slots)
        near(found[..., :queries, :].flatten(2, 3).transpose(1, 2), q)
        near(found[..., queries, :].transpose(1, 2), k)
        assert torch.equal(found[..., queries + 1, :], qkv.view_as(slots)[..., queries + 1, :])
    ((q * dq.float()).sum() + (k * dk.float()).sum() + (v * dv.float()).sum()).backward()
    dqkv, dbias = gather_gradients(dq, dk, dv, turns)
    near(dqkv.view_as(qkv), QKV.grad)
    near(dbias, QKV.grad.flatten(0, 1).sum(0))


def test_cross_entropy_over_a_padded_vocabulary(device):
    from holdfast.kernels.cross_entropy import cross_entropy_

    logits, known = random(device, 21, 320) * 3, 301
    labels, weights = torch.randint(0, known, (21,), device=device), torch.rand(21, device=device)
    labels[:4] = logits[:4, :known].argmax(1)
    labels[4], weights[4] = -1, 0.0  # a token that does not count
    LOGITS = leaf(logits)
    wanted = (F.cross_entropy(LOGITS[:, :known], labels.clamp(min=0), reduction="none") * weights).sum()
    wanted.backward()
    loss, hits = cross_entropy_(logits, labels, weights, known)
    near(loss, wanted)
    near(logits, LOGITS.grad)
    assert hits == 4
    assert not logits[:, known:].any()


def test_fp8_operands_stand_for_the_matrix_and_its_transpose(device, monkeypatch):
    from holdfast.kernels.fp8 import E4M3, E5M2, LARGEST, largest_of, quantize

    monkeypatch.setitem(LARGEST, torch.float32, 448.0)
    x = random(device, 96, 160) * 7
    near(largest_of(x), x.abs().max())
    # Triton's interpreter does not convert to fp8
    for kind, rounding in ((E4M3, 0.04), (E5M2, 0.08)) if x.is_cuda else ((torch.float32, 1e-5),):
        found = quantize(x, kind)
        near(found.values.float() * found.scale, x, rounding)
        assert torch.equal(found.transposed.float(), found.values.float().T)
        near(found.values.float().abs().max(), torch.tensor(LARGEST[kind], device=device))
    zeros = quantize(torch.zeros_like(x), kind)
    assert not zeros.values.float().any() and zeros.scale > 0


@pytest.fixture
def site(device, monkeypatch):
    """A site whose scale is known before the matrix is; without a GPU its kind is fp32, because the interpreter has no fp8."""
    from holdfast.kernels import fp8

    kind = fp8.E5M2 if device.type == "cuda" else torch.float32
    monkeypatch.setitem(fp8.LARGEST, torch.float32, 57344.0)
    scale = torch.tensor(8.0 / 57344.0, device=device)
    return fp8.Site(kind, scale, scale.reciprocal(), torch.zeros((), device=device), delayed=True)


def stands_for(found, wanted: Tensor, site) -> None:
    """The quantized matrix and its transpose are `wanted`, cut at the largest value, whose own size is noted."""
    for part in (found.values, found.transposed.T):
        near(part.float() * found.scale, wanted.clamp(-8.0, 8.0), 0.08 if wanted.is_cuda else 1e-5)
    near(site.amax, wanted.abs().max())


def test_a_matrix_is_quantized_with_the_scale_of_the_pass_before(device, site):
    from holdfast.kernels.fp8 import quantize_at

    x = random(device, 75, 130) * 4
    stands_for(quantize_at(x, site, noted=False), x, site)


@pytest.mark.parametrize("forward", [True, False])
def test_gelu_written_in_fp8(device, site, forward):
    from holdfast.kernels.activation_fp8 import gelu_backward_fp8, gelu_forward_fp8

    x, dout = random(device, 75, 130) * 4, random(device, 75, 130)
    X = leaf(x)
    wanted = F.gelu(X, approximate="tanh")
    wanted.backward(dout.float())
    if forward:
        stands_for(gelu_forward_fp8(x, True, site), wanted.detach(), site)
    else:
        found, sums = gelu_backward_fp8(dout, x, True, site)
        stands_for(found, X.grad, site)
        near(sums, X.grad.sum(0))


@pytest.mark.parametrize("forward", [True, False])
def test_swiglu_written_in_fp8(device, site, forward):
    from holdfast.kernels.activation_fp8 import swiglu_backward_fp8, swiglu_forward_fp8

    x, dout = random(device, 75, 200) * 2, random(device, 75, 100)
    X = leaf(x)
    gate, up = X.chunk(2, 1)
    wanted = F.silu(gate) * up
    wanted.backward(dout.float())
    if forward:
        stands_for(swiglu_forward_fp8(x, site), wanted.detach(), site)
    else:
        stands_for(swiglu_backward_fp8(dout, x, site), X.grad, site)


@pytest.mark.parametrize("rotary", [False, True])
def test_gradients_of_q_k_and_v_written_in_fp8(device, site, rotary):
    from holdfast.kernels.attention import gather_gradients, gather_gradients_fp8

    dq, dk, dv = (random(device, 2, heads, 33, 64) * 3 for heads in (4, 2, 2))
    angles = torch.rand(1, 1, 33, 32, device=device).repeat(1, 1, 1, 2)
    turns = (angles.cos(), angles.sin()) if rotary else None
    wanted, wanted_sums = gather_gradients(dq, dk, dv, turns)
    found, sums = gather_gradients_fp8(dq, dk, dv, turns, site)
    stands_for(found, wanted.float(), site)
    near(sums, wanted_sums)


def test_many_matrices_are_quantized_at_once(device, site):
    from holdfast.kernels.fp8 import E4M3, LARGEST
    from holdfast.kernels.fp8_weights import QuantizedWeights

    kind = E4M3 if device.type == "cuda" else torch.float32
    matrices = [
        random(device, *shape) * scale for shape, scale in (((128, 64), 3.0), ((64, 192), 0.01), ((64, 64), 9.0))
    ]
    assert all(map(QuantizedWeights.takes, matrices))
    assert not QuantizedWeights.takes(matrices[0][:48])
    found = QuantizedWeights(matrices, kind)
    for change in (1.0, 0.5):
        for matrix in matrices:
            matrix.mul_(change)
        found.update()
        for copy, matrix in zip(found.copies, matrices, strict=True):
            near(copy.scale, matrix.abs().max() / LARGEST[kind])
            near(copy.values.float() * copy.scale, matrix, 0.04 if matrix.is_cuda else 1e-5)
            assert torch.equal(copy.transposed.float(), copy.values.float().T)


@pytest.mark.parametrize("columns", [5, 1024, 2500])
def test_the_likeliest_token_is_the_first_of_equal_ones(device, columns):
    from holdfast.kernels.greedy import argmax

    x = random(device, 3, columns + 7)[:, :columns]
    x[1, 2] = x[1, columns - 1] = 50.0
    x[2] = -50.0
    assert argmax(x).tolist() == [int(x[0].argmax()), 2, 0]


@pytest.mark.parametrize(
    ("batch", "tokens", "head", "causal", "padded"),
    [(2, 20, 64, False, True), (1, 33, 64, True, False), (2, 17, 128, True, False), (1, 128, 64, False, False)],
)
def test_attention_of_short_sequences(device, batch, tokens, head, causal, padded):
    from holdfast.kernels.short_attention import short_attention, short_attention_backward
    from holdfast.models.attention_backends import heads_of

    buffer, dout = random(device, batch, tokens, 2 * 3 * head), random(device, batch, 2, tokens, head)
    bias = torch.zeros(batch, 1, 1, tokens, device=device) if padded else None
    if bias is not None:
        bias[0, ..., tokens - 3 :] = -torch.inf
    BUFFER = leaf(buffer)
    wanted = F.scaled_dot_product_attention(*heads_of(BUFFER, 1, head), attn_mask=bias, is_causal=causal)
    wanted.backward(dout.float())

    heads, gradient = heads_of(buffer, 1, head), torch.full_like(buffer, torch.nan)
    sums = torch.full((batch, 1, buffer.shape[2]), torch.nan, device=device)
    bias = None if bias is None else bias.to(buffer.dtype)
    out, lse = short_attention(*heads, bias, causal, torch.full_like(heads[0], torch.nan))
    places = heads_of(gradient, 1, head), heads_of(sums, 1, head)
    short_attention_backward(dout, *heads, bias, causal, lse, *places)
    near(out, wanted)
    near(gradient, BUFFER.grad)
    near(sums.sum((0, 1)), BUFFER.grad.sum((0, 1)))


def test_a_token_that_attends_to_none_is_no_nan(device):
    from holdfast.kernels.short_attention import short_attention

    q, k, v = (random(device, 1, 1, 16, 64) for _ in range(3))
    bias = torch.full((1, 1, 1, 16), -torch.inf, device=device, dtype=q.dtype)
    out, _ = short_attention(q, k, v, bias, False, torch.empty_like(q))
    assert out.eq(0).all()
