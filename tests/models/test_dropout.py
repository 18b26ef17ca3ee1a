"""A dropout mask with a key follows from the key alone: in eager mode, recomputed, and in a compiled graph."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from holdfast.config import ModelConfig
from holdfast.models.dropout import Dropout, DropoutKeys
from holdfast.models.layers import TransformerLayer


def key(number: int) -> torch.Tensor:
    return torch.tensor(number)


def test_a_mask_follows_from_its_key_and_leaves_the_default_generator_alone() -> None:
    dropout, x = Dropout(0.25), torch.ones(256, 1024)
    before = torch.get_rng_state()
    first, again, other = dropout(x, key(7)), dropout(x, key(7)), dropout(x, key(8))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert first.unique().tolist() == pytest.approx([0, 4 / 3])
    kept = (first != 0).float().mean().item()
    both = ((first != 0) & (other != 0)).float().mean().item()
    assert (kept, both) == (pytest.approx(0.75, abs=0.005), pytest.approx(0.75**2, abs=0.005))


def test_without_a_key_it_is_torchs_dropout() -> None:
    x = torch.randn(64, 64)
    torch.manual_seed(3)
    ours = Dropout(0.1)(x)
    torch.manual_seed(3)
    assert torch.equal(ours, torch.nn.Dropout(0.1)(x))


@pytest.mark.parametrize("chosen", [None, key(7)])
def test_nothing_is_dropped_in_evaluation_or_without_dropout(chosen: torch.Tensor | None) -> None:
    x = torch.randn(8, 8)
    assert torch.equal(Dropout(0.5).eval()(x, chosen), x)
    assert Dropout(0.0)(x) is x


def test_keys_are_equal_for_equal_seeds_and_never_repeat() -> None:
    left, right = DropoutKeys(), DropoutKeys()
    left.seed(5)
    right.seed(5)
    drawn = [[[int(key) for key in pair] for _ in range(3) for pair in keys.draw(4)] for keys in (left, right)]
    assert drawn[0] == drawn[1]
    assert len({number for pair in drawn[0] for number in pair}) == 3 * 5 * 2


@pytest.mark.parametrize("way", ["checkpoint", "compile"])
def test_recomputing_and_compiling_a_layer_draw_the_same_masks(way: str) -> None:
    config = ModelConfig(num_layers=1, hidden_size=32, num_attention_heads=4, hidden_dropout=0.3)
    torch.manual_seed(0)
    layer, keys = TransformerLayer(config, causal=True), (key(1), key(2))

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer(x, None, None, None, keys)
        return out

    # without a code generator, and refusing to break the graph
    other = {
        "checkpoint": lambda x: checkpoint(run, x, use_reentrant=False),
        "compile": torch.compile(run, backend="aot_eager", fullgraph=True),
    }[way]
    results = []
    for call in (run, other):
        x = torch.linspace(-1, 1, 2 * 8 * 32).view(2, 8, 32).requires_grad_()
        layer.zero_grad()
        out = call(x)
        out.square().sum().backward()
        results.append([out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters() if p.grad is not None)])
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right)
