"""The fused step gives the logits of the plain model, in Triton's interpreter here and on the card where there is one."""

from dataclasses import replace

import pytest
import torch

from holdfast.config import ModelConfig
from holdfast.generation.cache import SlotCache
from holdfast.models.gpt import GPT

GPT2 = ModelConfig(num_layers=1, hidden_size=96, num_attention_heads=2, kv_channels=64, openai_gelu=True)
EXACT_GELU = replace(GPT2, openai_gelu=False)
LLAMA = ModelConfig(
    num_layers=1, hidden_size=128, num_attention_heads=4, kv_channels=96, num_query_groups=2, ffn_hidden_size=160,
    swiglu=True, normalization="RMSNorm", position_embedding_type="rope", disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
ONE_GROUP = replace(LLAMA, num_attention_heads=3, num_query_groups=1, kv_channels=64)
POSITIONS, VOCABULARY = 160, 203


@pytest.fixture(autouse=True)
def needs_triton():
    pytest.importorskip("triton")
    torch.manual_seed(0)


def build(config: ModelConfig) -> GPT:
    model = GPT(config, vocab_size=VOCABULARY, padded_vocab_size=256, max_positions=POSITIONS)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.1)
    return model.eval()


@torch.no_grad()
def decode_error(model: GPT, rows: int, **options: object) -> float:
    """Largest difference between the logits of a fused step and of the plain model over the whole sequences, relative."""
    from holdfast.generation.fused_step import FusedStep

    ends = [130 - 43 * row % 131 for row in range(rows)]  # the last position of each sequence, 0 among them
    tokens = torch.randint(0, VOCABULARY, (rows, 131))
    cache = SlotCache(model.config, rows, POSITIONS, torch.float32, torch.device("cpu"))
    model.hidden(tokens, caches=cache.reading([[row] for row in range(rows)]))
    wanted = torch.stack([model.logits(model.hidden(tokens[r : r + 1, : ends[r] + 1])[0, -1]) for r in range(rows)])
    positions = torch.tensor(ends)
    for keys in (cache.keys_NBGSD, cache.values_NBGSD):  # what lies at or behind the position must not matter
        for row, end in enumerate(ends):
            keys[:, row, :, end:] = 100.0
    step = FusedStep(model, dependent_launch=False, **options)
    found = step(tokens[torch.arange(rows), positions], positions, cache, POSITIONS)
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize(
    ("config", "rows"),
    [
        *[(GPT2, 1), (GPT2, 3), (GPT2, 9), (EXACT_GELU, 2), (LLAMA, 1), (LLAMA, 4), (ONE_GROUP, 1)],
        pytest.param(LLAMA, 9, marks=pytest.mark.slow),
    ],
)
def test_logits_equal_those_of_the_plain_model(config, rows):
    assert decode_error(build(config), rows) < 2e-6


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_wider_than_a_tile_are_added_up(rows, monkeypatch):
    from holdfast.kernels import decode

    monkeypatch.setattr(decode, "choose_tile", lambda *_: decode.Tile(128, 64, 4))
    monkeypatch.setattr(decode, "choose_matrix_tile", lambda *_: decode.MatrixTile(128, 64, 2, True))
    assert decode_error(build(replace(GPT2, hidden_size=160)), rows) < 2e-6


@pytest.mark.parametrize(("rows", "splits"), [(1, 2), (1, 4), (2, 2)])
def test_keys_may_be_divided_over_programs(rows, splits, monkeypatch):
    from holdfast.kernels import decode

    monkeypatch.setattr(decode, "choose_splits", lambda *_: splits)
    assert decode_error(build(GPT2), rows) < 2e-6


@pytest.mark.parametrize(("weights", "limit"), [("int8", 0.02), ("fp8", 0.06)])
def test_quantized_weights_cost_little(weights, limit):
    assert 1e-4 < decode_error(build(GPT2), 1, weights=weights) < limit


def test_layers_follow_each_other():
    assert decode_error(build(replace(LLAMA, num_layers=3)), 1) < 2e-6


def test_unknown_options_are_left_to_the_plain_model():
    from holdfast.generation.fused_step import can_fuse_step

    assert not can_fuse_step(build(GPT2))  # on the CPU


def test_eight_bit_weights_need_cuda():
    from holdfast.generation.model_step import choose_step
    from holdfast.system.errors import HoldfastError

    with pytest.raises(HoldfastError, match="int8 weights need a CUDA device.*leave out --weights"):
        choose_step(build(GPT2), "int8")


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_a_step_is_compared_with_the_plain_one_before_it_is_used(config):
    from holdfast.generation.fused_step import FusedStep
    from holdfast.generation.model_step import PlainStep, agrees

    model = build(config)
    fused, plain = FusedStep(model, dependent_launch=False), PlainStep(model)
    assert agrees(fused, plain, model)
    # Wrong steps are made from the plain one: Triton's interpreter takes seconds for each call of the fused one.
    assert not agrees(lambda *inputs: plain(*inputs) * 1.1, plain, model)
    assert not agrees(lambda *inputs: plain(*inputs) * torch.nan, plain, model)
    assert not agrees(lambda *inputs: plain(*inputs).roll(1, 0) if len(inputs[0]) > 1 else plain(*inputs), plain, model)
