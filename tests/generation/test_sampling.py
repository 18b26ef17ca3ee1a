"""Sampling against its definition: transformers' logits processors for the distribution, counting for the draws."""

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from holdfast.generation.sampling import Sampling, draw, next_token, probabilities
from holdfast.system.errors import UsageError


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_the_distribution_is_that_of_transformers(temperature, top_k, top_p):
    logits = torch.randn(5, 101, generator=torch.Generator().manual_seed(1)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1.0 else logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = probabilities(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-6, atol=1e-9)
    assert torch.equal(found > 0, expected.softmax(-1) > 0)


def test_evenly_spread_draws_give_each_token_its_share():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, -torch.inf]])
    sampling = Sampling(temperature=0.8)
    count = 10_000
    draws = torch.arange(count, dtype=torch.float64) / count
    tokens = next_token(logits.expand(count, -1), sampling, draws)
    shares = torch.bincount(tokens, minlength=5) / count
    torch.testing.assert_close(shares, probabilities(logits, sampling)[0], rtol=0, atol=2 / count)
    assert shares[1] == shares[4] == 0


def test_the_smallest_and_the_largest_draw_give_tokens_that_can_come():
    logits = torch.full((2, 50), -torch.inf)
    logits[:, 10:20] = torch.randn(10, generator=torch.Generator().manual_seed(2))
    tokens = next_token(logits, Sampling(), torch.tensor([0.0, 1 - 2**-32], dtype=torch.float64))
    assert tokens.tolist() == [10, 19]


def test_temperature_zero_takes_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert next_token(logits, Sampling(temperature=0), torch.tensor([0.9, 0.9])).tolist() == [1, 0]


def test_draws_depend_on_seed_prompt_and_sequence_and_not_on_how_many_are_drawn():
    first = draw(1, 0, 0, 40)
    assert torch.equal(first[:7], draw(1, 0, 0, 7)) and first.min() >= 0 and first.max() < 1
    for other in (draw(2, 0, 0, 40), draw(1, 1, 0, 40), draw(1, 0, 1, 40)):
        assert not torch.equal(first, other)
    assert abs(draw(1, 0, 0, 10_000).mean() - 0.5) < 0.02


@pytest.mark.parametrize("wrong", [{"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_what_is_no_distribution_is_refused_by_name(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)
