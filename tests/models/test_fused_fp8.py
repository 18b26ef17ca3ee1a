"""The scales of fp8 products reach every factor of every product: with exact types instead of fp8 the gradients are those of
plain layers, scaled dynamically and by recent passes."""

import functools

import pytest
import torch

from holdfast.models import products
from holdfast.models.fused import fp8_weights
from holdfast.models.products import ScaleTable
from holdfast.train.fused_adamw import FusedAdamW
from tests.models.test_fused import GPT2, LLAMA, MASKED, ORIGINAL_BERT, TEXT, build, gradients, layers, replace

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are not interpreted here; test_on_the_gpu.py runs them in fp8"
)


@pytest.fixture(autouse=True)
def exact_types(monkeypatch):
    """Triton's interpreter has no fp8: both of its types are fp32 here. What is left to be wrong are scales and saturation."""
    pytest.importorskip("triton")
    from holdfast.kernels import fp8

    monkeypatch.setattr(fp8, "E4M3", torch.float32)
    monkeypatch.setattr(fp8, "E5M2", torch.float32)
    monkeypatch.setitem(fp8.LARGEST, torch.float32, 57344.0)

    def scaled(a, b, a_scale, b_scale, dtype, fast, bias=None):
        out = (a @ b.T) * (a_scale * b_scale)
        return (out if bias is None else out + bias).to(dtype)

    monkeypatch.setattr(products, "_scaled", scaled)


def narrow(model, copies: bool, delays: bool) -> None:
    if copies:
        FusedAdamW(model.parameters(), fused=True).write_copies(torch.float32)
    model.fp8_scales = ScaleTable([fp8_weights(layer) for layer in layers(model)], torch.device("cpu"), delays)
    for number, layer in enumerate(layers(model)):
        layer.fused, layer.fp8 = True, functools.partial(model.fp8_scales.of, number)


@pytest.mark.parametrize(
    ("config", "inputs", "copies"),
    [
        pytest.param(GPT2, TEXT, True, id="gpt2"),
        pytest.param(GPT2, TEXT, False, id="gpt2 without copies of the weights"),
        pytest.param(LLAMA, TEXT, True, id="llama"),
        pytest.param(replace(LLAMA, disable_bias_linear=False), TEXT, False, id="llama with biases"),
        pytest.param(ORIGINAL_BERT, MASKED, True, id="original bert"),
    ],
)
def test_scales_cancel_out(config, inputs, copies):
    model = build(config)
    wanted = gradients(model, inputs)
    with torch.no_grad():
        loss = model(**inputs)
    narrow(model, copies, delays=True)
    for scaling in ("dynamically", "by recent passes"):
        found = gradients(model, inputs)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, (name, scaling)
        with torch.no_grad():
            torch.testing.assert_close(model(**inputs), loss)


def test_values_beyond_a_delayed_scale_saturate_and_raise_the_next_one():
    model = build(GPT2)
    narrow(model, copies=False, delays=True)
    gradients(model, TEXT)
    norm = model.decoder.layers["1"].pre_mlp_layernorm
    with torch.no_grad():
        norm.weight.mul_(1000.0)
        norm.bias.mul_(1000.0)
    saturated = gradients(model, TEXT)
    for _ in range(4):  # what saturated hides how large the values after it are
        scaled = gradients(model, TEXT)
    wanted = gradients(_plain(model), TEXT)

    def error(found: dict[str, torch.Tensor]) -> float:
        name = "decoder.layers.1.mlp.linear_fc1.weight"
        return float((found[name] - wanted[name]).norm() / wanted[name].norm())

    assert all(gradient.isfinite().all() for gradient in saturated.values())
    assert error(saturated) > 0.1 and error(scaled) < 1e-4


def _plain(model):
    for layer in layers(model):
        layer.fused = False
    return model
