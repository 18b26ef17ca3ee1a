"""What the kernels are for, on the card itself: whole fused layers, AdamW and captured passes beside plain torch."""

import functools
from dataclasses import replace

import pytest
import torch

from holdfast.config import ModelConfig
from holdfast.models import activation_products
from holdfast.models.fused import fp8_weights
from holdfast.models.gpt import GPT
from holdfast.models.products import ScaleTable
from holdfast.train.fused_adamw import FusedAdamW
from tests.kernels.test_adamw import compare_with_torch

pytestmark = [pytest.mark.gpu]

GPT2 = ModelConfig(num_layers=3, hidden_size=1024, num_attention_heads=16, openai_gelu=True)
LLAMA = ModelConfig(
    num_layers=2, hidden_size=1024, num_attention_heads=16, num_query_groups=4, swiglu=True, normalization="RMSNorm",
    position_embedding_type="rope", disable_bias_linear=True, untie_embeddings_and_output_weights=True,
)  # fmt: skip


def build(config: ModelConfig, dtype: torch.dtype, fused: bool = False, fp8: bool = False) -> GPT:
    torch.manual_seed(1)
    with torch.device("cuda"):
        model = GPT(config, vocab_size=50257, padded_vocab_size=50304, max_positions=1024, dtype=dtype)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim == 2 else parameter.data.add_(0.1)
    if fp8:
        FusedAdamW(model.parameters(), fused=True).write_copies(dtype)
        weights = [fp8_weights(layer) for layer in model.decoder.layers.values()]
        model.fp8_scales = ScaleTable(weights, torch.device("cuda"), delays=True)
    for number, layer in enumerate(model.decoder.layers.values()):
        layer.fused = fused
        layer.fp8 = functools.partial(model.fp8_scales.of, number) if fp8 else None
    model.vocab_shard = replace(model.vocab_shard, compiled=fused)
    return model


def gradients(model: GPT, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(2)
    tokens = torch.randint(0, 50257, (2, 1025), generator=generator, device="cuda")
    model.zero_grad(set_to_none=True)
    model(tokens[:, :-1], tokens[:, 1:], **more).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config", [GPT2, replace(GPT2, openai_gelu=False), LLAMA])
def test_fused_layers_round_no_more_than_plain_ones(config):
    wanted = gradients(build(config, torch.float32))

    def error(model: GPT) -> float:
        found = gradients(model)
        return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)

    plain = error(build(config, torch.bfloat16))
    assert error(build(config, torch.bfloat16, fused=True)) < 1.2 * plain
    narrow = build(config, torch.bfloat16, fused=True, fp8=True)
    assert error(narrow) < 0.25  # scaled dynamically
    assert error(narrow) < 0.25  # scaled by the pass before


@pytest.mark.skipif(not activation_products.usable(), reason="needs the extra cuda")
def test_layers_with_the_kernels_of_the_extra_round_no_more_than_plain_ones():
    wanted = gradients(build(GPT2, torch.float32))
    plain, fused = build(GPT2, torch.bfloat16), build(GPT2, torch.bfloat16, fused=True)
    for layer in fused.decoder.layers.values():
        layer.self_attention.backend, layer.mlp.epilogue = "cudnn-flash4", True
    errors = [
        max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)
        for found in (gradients(plain), gradients(fused))
    ]
    assert errors[1] < 1.2 * errors[0]


@pytest.mark.parametrize("backend", ["flash", "flash4"])
def test_fused_layers_attend_inside_documents(backend):
    if backend == "flash4" and not activation_products.usable():
        pytest.skip("needs the extra cuda")
    documents = (torch.arange(1024, device="cuda") // 100).expand(2, -1)
    wanted = gradients(build(GPT2, torch.float32), documents_BT=documents)
    plain, fused = build(GPT2, torch.bfloat16), build(GPT2, torch.bfloat16, fused=True)
    for layer in fused.decoder.layers.values():
        layer.self_attention.backend = backend
    errors = [
        max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)
        for found in (gradients(model, documents_BT=documents) for model in (plain, fused))
    ]
    assert errors[1] < 1.2 * errors[0]


def test_adamw_steps_as_torch_does_and_skips_what_is_not_finite():
    sizes = (5000, 17, 70000)
    compare_with_torch([torch.nn.Parameter(torch.randn(size, device="cuda")) for size in sizes], torch.bfloat16)


def test_weights_that_were_loaded_later_are_used():
    from holdfast.models.products import compute_weight

    weight = torch.nn.Parameter(torch.zeros(64, 64, device="cuda"))
    FusedAdamW([weight], fused=True).write_copies(torch.bfloat16)
    with torch.no_grad():
        weight.copy_(torch.ones(64, 64))
    assert compute_weight(weight, torch.bfloat16).eq(1).all()


def test_a_captured_pass_gives_the_gradients_of_the_pass():
    from holdfast.train.captured_pass import CapturedPass

    model = build(GPT2, torch.bfloat16, fused=True)
    parameters = list(model.parameters())
    batches = [torch.randint(0, 50257, (2, 1025), device="cuda") for _ in range(3)]

    def run(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        total = model(inputs["x"], inputs["labels"])
        total.sum().backward()
        return total.detach()

    def inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    wanted = []
    for tokens in batches:
        model.zero_grad(set_to_none=True)
        total = run(inputs(tokens))
        wanted.append((total, [p.grad.clone() for p in parameters]))

    def check(found: torch.Tensor, steps: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
        torch.testing.assert_close(found, sum(total for total, _ in steps), rtol=1e-5, atol=0.0)
        for number, parameter in enumerate(parameters):
            gradient = sum(gradients[number] for _, gradients in steps)
            assert (parameter.grad - gradient).norm() <= 1e-2 * gradient.norm()

    captured = CapturedPass(run, parameters, inputs(batches[0]), accumulates=False)
    assert not captured.takes([inputs(batches[0][:, :513])])
    assert not captured.takes([inputs(tokens) for tokens in batches])
    for tokens, step in zip(batches, wanted, strict=True):
        check(captured.replay([inputs(tokens)]), [step])
    captured = CapturedPass(run, parameters, inputs(batches[0]), accumulates=True)
    for count in (3, 1):
        check(captured.replay([inputs(tokens) for tokens in batches[:count]]), wanted[:count])
