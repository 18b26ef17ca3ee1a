"""Fused layers give the gradients of plain ones, in every form of layer; without a GPU in Triton's interpreter, in fp32."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from holdfast.config import ModelConfig
from holdfast.models import fused_functions
from holdfast.models.bert import BERT
from holdfast.models.gpt import GPT
from holdfast.parallel.parallelize import recompute_in_backward

GPT2 = ModelConfig(num_layers=2, hidden_size=128, num_attention_heads=2, openai_gelu=True)
LLAMA = replace(
    GPT2, num_attention_heads=4, num_query_groups=2, kv_channels=64, swiglu=True, normalization="RMSNorm",
    position_embedding_type="rope", disable_bias_linear=True, untie_embeddings_and_output_weights=True,
)  # fmt: skip
ORIGINAL_BERT = replace(GPT2, model_type="bert", bert_variant="original")
TOKENS = torch.randint(0, 300, (1, 7), generator=torch.Generator().manual_seed(1))
TEXT = {"x": TOKENS[:, :-1], "labels_BT": TOKENS[:, 1:]}
DOCUMENTS = TEXT | {"documents_BT": torch.tensor([[0, 0, 1, 1, 1, 2]])}
MASKED = {
    "x": TOKENS[:, :-1], "padding_BT": torch.arange(6)[None] < 5,
    "places_BP": torch.tensor([[1, 4]]), "labels_BP": TOKENS[:, :2], "weights_BP": torch.ones(1, 2),
    "is_random_B": torch.tensor([1]),
}  # fmt: skip


def build(config: ModelConfig) -> GPT | BERT:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    kind = BERT if config.model_type == "bert" else GPT
    model = kind(config, vocab_size=300, padded_vocab_size=320, max_positions=64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim < 2), std=0.1)
    return model


def layers(model):
    return (model.encoder if isinstance(model, BERT) else model.decoder).layers.values()


def gradients(model, inputs) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(**inputs).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are not interpreted here; test_on_the_gpu.py runs them"
)
@pytest.mark.parametrize(
    ("config", "inputs", "backend"),
    [
        pytest.param(GPT2, TEXT, None, id="gpt2"),
        pytest.param(GPT2, TEXT, "short", id="gpt2 by short attention"),
        pytest.param(GPT2, DOCUMENTS, None, id="gpt2 with documents"),
        pytest.param(LLAMA, TEXT, None, id="llama"),
        pytest.param(replace(LLAMA, num_query_groups=4), TEXT, "short", id="llama by short attention"),
        pytest.param(replace(LLAMA, window_size=(1,)), DOCUMENTS, None, id="llama with documents and a window"),
        pytest.param(replace(LLAMA, disable_bias_linear=False), TEXT, None, id="llama with biases"),
        pytest.param(ORIGINAL_BERT, MASKED, None, id="original bert"),
        pytest.param(ORIGINAL_BERT, MASKED, "short", id="original bert by short attention"),
        pytest.param(replace(ORIGINAL_BERT, bert_variant="megatron"), MASKED, None, id="megatron's bert"),
    ],
)
def test_fused_layers_give_the_gradients_of_plain_ones(config, inputs, backend):
    model = build(config)
    wanted = gradients(model, inputs)
    for layer in layers(model):
        layer.fused, layer.self_attention.backend = True, backend
    fused = gradients(model, inputs)
    for layer in layers(model):
        recompute_in_backward(layer)
    recomputed = gradients(model, inputs)
    assert fused.keys() == recomputed.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert (fused[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name
        assert torch.equal(recomputed[name], fused[name]), name


def test_an_activation_in_the_products_epilogue_gives_the_same_gradients(monkeypatch):
    """With plain torch for the products of the optional package, which needs a GPU; test_on_the_gpu.py calls that."""
    model = build(GPT2)
    wanted = gradients(model, TEXT)

    def linear_gelu(x, weight, bias):
        inner = F.linear(x, weight, bias)
        return inner, F.gelu(inner, approximate="tanh")

    def gelu_gradient(dy, weight, inner):
        inner = inner.detach().requires_grad_()
        with torch.enable_grad():
            active = F.gelu(inner, approximate="tanh")
        return torch.autograd.grad(active, inner, dy @ weight)[0], active.detach()

    monkeypatch.setattr(fused_functions, "linear_gelu", linear_gelu)
    monkeypatch.setattr(fused_functions, "gelu_gradient", gelu_gradient)
    for layer in layers(model):
        layer.fused, layer.mlp.epilogue = True, True
    found = gradients(model, TEXT)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


def test_matrices_that_follow_each_other_are_stacked_without_a_copy():
    from holdfast.models.products import stacked

    buffer = torch.randn(10, 8)
    upper, lower = buffer[:4], buffer[4:10]
    assert stacked(upper, lower).data_ptr() == upper.data_ptr()
    assert torch.equal(stacked(upper, lower), buffer)
    assert torch.equal(stacked(lower, upper), torch.cat((lower, upper)))


def test_scales_follow_recent_passes_and_survive_what_is_not_finite():
    from holdfast.models.products import DECAY, ScaleTable

    weights = [[(torch.randn(4, 4),)], [(torch.randn(4, 4),)]]  # without the optimizer's copies: products quantize them
    table = ScaleTable(weights, torch.device("cpu"), delays=True)

    def next_pass():
        table.begin_pass(training=True, dtype=torch.float32)
        assert table.of(1).weights == [None]
        return table.of(1).sites

    first = next_pass()
    assert not any(site.delayed for site in first)  # nothing is known yet
    first[0].amax.fill_(448.0)
    first[4].amax.fill_(57344.0)
    second = next_pass()
    assert all(site.delayed for site in second)
    assert (second[0].scale, second[4].scale) == (2.0, 8.0)
    assert second[0].factor == 0.5
    second[0].amax.fill_(torch.inf)
    third = next_pass()
    assert third[0].scale == 2.0
    assert third[0].amax == 0
    third[0].amax.fill_(7.0)
    table.begin_pass(training=False, dtype=torch.float32)
    evaluation = table.of(1).sites
    assert not any(site.delayed for site in evaluation)
    assert evaluation[0].amax == 0  # what it measures is its own
    evaluation[0].amax.fill_(1e9)
    fourth = next_pass()  # an evaluation changes no scale of training, and a smaller value lowers it slowly
    assert float(fourth[0].scale) == pytest.approx(2.0 * DECAY)
    fourth[0].amax.fill_(4480.0)
    assert next_pass()[0].scale == 20.0
