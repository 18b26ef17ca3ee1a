"""What the kernels are for, on the card itself: whole fused layers, AdamW and captured passes beside plain torch."""

from dataclasses import replace

import pytest
import torch

from holdfast.config import ModelConfig
from holdfast.models.gpt import GPT

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
    for layer in model.decoder.layers.values():
        layer.fused, layer.fp8 = fused, fp8
    model.vocab_shard = replace(model.vocab_shard, compiled=fused)
    return model


def gradients(model: GPT) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(2)
    tokens = torch.randint(0, 50257, (2, 1025), generator=generator, device="cuda")
    model(tokens[:, :-1], tokens[:, 1:]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config", [GPT2, replace(GPT2, openai_gelu=False), LLAMA])
def test_fused_layers_round_no_more_than_plain_ones(config):
    wanted = gradients(build(config, torch.float32))

    def error(model: GPT) -> float:
        found = gradients(model)
        return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)

    plain = error(build(config, torch.bfloat16))
    assert error(build(config, torch.bfloat16, fused=True)) < 1.2 * plain
    assert error(build(config, torch.bfloat16, fused=True, fp8=True)) < 0.25


def test_adamw_steps_as_torch_does_and_skips_what_is_not_finite():
    from holdfast.train.fused_adamw import FusedAdamW

    ours = [torch.nn.Parameter(torch.randn(size, device="cuda")) for size in (5000, 17, 70000)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True}
    groups = ([{"params": p[:1], "weight_decay": 0.1}, {"params": p[1:], "weight_decay": 0.0}] for p in (ours, theirs))
    fused, plain = FusedAdamW(next(groups), **settings), torch.optim.AdamW(next(groups), **settings)
    fused.write_copies(torch.bfloat16)
    for number in range(6):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in (fused, plain):
            optimizer.grad_scale = torch.tensor(2.0, device="cuda")
            optimizer.found_inf = torch.tensor(float(number == 3), device="cuda")
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert torch.equal(a.compute_copy, a.detach().bfloat16())
        assert fused.state[a]["step"] == plain.state[b]["step"] == 5


def test_weights_that_were_loaded_later_are_used():
    from holdfast.models.fused import compute_weight
    from holdfast.train.fused_adamw import FusedAdamW

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
    captured = CapturedPass(run, parameters, inputs(batches[0]))
    assert not captured.takes(inputs(batches[0][:, :513]))
    for tokens, (total, expected) in zip(batches, wanted, strict=True):
        torch.testing.assert_close(captured.replay(inputs(tokens)), total, rtol=1e-5, atol=0.0)
        for parameter, gradient in zip(parameters, expected, strict=True):
            assert (parameter.grad - gradient).norm() <= 1e-2 * gradient.norm()
