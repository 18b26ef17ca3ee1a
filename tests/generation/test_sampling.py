"""Sampling against its definition: transformers' logits processors for the distribution, counting for the draws."""

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from holdfast.generation.sampling import (
    GREEDY,
    Sampling,
    SamplingRows,
    Steps,
    draw,
    next_tokens,
    penalised,
    probabilities,
    sequence_seed,
)
from holdfast.system.errors import UsageError


def rows_of(samplings, vocabulary, contexts=None):
    rows = SamplingRows(len(samplings), vocabulary, torch.device("cpu"))
    for number, sampling in enumerate(samplings):
        rows.set(number, sampling, contexts[number] if contexts else [])
    return rows, Steps.of(samplings)


def distribution(logits, sampling):
    rows, steps = rows_of([sampling] * len(logits), logits.shape[1])
    return probabilities(logits, rows, steps)


def chosen(logits, sampling, draws):
    rows, steps = rows_of([sampling] * len(logits), logits.shape[1])
    return next_tokens(logits, rows, steps, draws)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.2])
def test_the_distribution_is_that_of_transformers(temperature, top_k, top_p, min_p):
    logits = torch.randn(5, 101, generator=torch.Generator().manual_seed(1)) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits) if temperature != 1.0 else logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1.0:
        expected = TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = MinPLogitsWarper(min_p)(None, expected)
    found = distribution(logits, Sampling(temperature, top_k, top_p, min_p))
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-6, atol=1e-9)
    assert torch.equal(found > 0, expected.softmax(-1) > 0)


def test_evenly_spread_draws_give_each_token_its_share():
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, -torch.inf]])
    sampling = Sampling(temperature=0.8)
    count = 10_000
    draws = torch.arange(count, dtype=torch.float64) / count
    tokens = chosen(logits.expand(count, -1), sampling, draws)
    shares = torch.bincount(tokens, minlength=5) / count
    torch.testing.assert_close(shares, distribution(logits, sampling)[0], rtol=0, atol=2 / count)
    assert shares[1] == shares[4] == 0


def test_the_smallest_and_the_largest_draw_give_tokens_that_can_come():
    logits = torch.full((2, 50), -torch.inf)
    logits[:, 10:20] = torch.randn(10, generator=torch.Generator().manual_seed(2))
    tokens = chosen(logits, Sampling(), torch.tensor([0.0, 1 - 2**-32], dtype=torch.float64))
    assert tokens.tolist() == [10, 19]


def test_temperature_zero_takes_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert chosen(logits, Sampling(temperature=0), torch.tensor([0.9, 0.9])).tolist() == [1, 0]


def test_logits_that_are_not_numbers_give_an_id_and_no_error():
    logits = torch.full((2, 5), torch.nan)
    assert all(0 <= token < 5 for token in chosen(logits, Sampling(), torch.tensor([0.0, 0.9])).tolist())


def test_a_top_k_beyond_every_vocabulary_changes_nothing():
    logits = torch.randn(3, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(distribution(logits, Sampling(top_k=10**30)), distribution(logits, Sampling()))


def test_draws_depend_on_seed_prompt_and_sequence_and_not_on_how_many_are_drawn():
    first = draw(sequence_seed(1, 0, 0), 40)
    assert torch.equal(first[:7], draw(sequence_seed(1, 0, 0), 7)) and first.min() >= 0 and first.max() < 1
    for other in (sequence_seed(2, 0, 0), sequence_seed(1, 1, 0), sequence_seed(1, 0, 1)):
        assert not torch.equal(first, draw(other, 40))
    assert abs(draw(sequence_seed(1, 0, 0), 10_000).mean() - 0.5) < 0.02


MIXED = [
    GREEDY,
    Sampling(),
    Sampling(0.5, 3),
    Sampling(1.3, 0, 0.7),
    Sampling(1.0, 1000, 1.0, 0.1),
    Sampling(0.9, 20, 0.9, 0.05, 1.4),
    Sampling(0, repetition_penalty=2.5),
]


def test_rows_with_different_parameters_get_what_each_gets_alone():
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(len(MIXED), 101, generator=random) * 3
    contexts = torch.randint(101, (len(MIXED), 30), generator=random).tolist()
    rows, steps = rows_of(MIXED, 101, contexts)
    for spread in torch.linspace(0, 0.99, 25).double():
        together = next_tokens(logits, rows, steps, spread.expand(len(MIXED)))
        for number, sampling in enumerate(MIXED):
            alone, alone_steps = rows_of([sampling], 101, [contexts[number]])
            one = slice(number, number + 1)
            assert next_tokens(logits[one], alone, alone_steps, spread[None]).item() == together[number]


def test_many_values_of_top_k_need_few_kinds_of_steps():
    kinds = {Steps.of([Sampling(top_k=k), Sampling(0, top_k=9999)]).top_k for k in range(1, 5000)}
    assert kinds == {1 << power for power in range(14)}
    assert Steps.of([Sampling()]).top_k == 0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.6, 12), Sampling(1.4, 0, 0.9), Sampling(1.0, 0, 1.0, 0.1)])
def test_draws_of_many_seeds_follow_the_distribution_of_transformers_by_chi_square(sampling):
    count = 20_000
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        expected = TopKLogitsWarper(sampling.top_k)(None, expected)
    if sampling.top_p < 1:
        expected = TopPLogitsWarper(sampling.top_p)(None, expected)
    if sampling.min_p:
        expected = MinPLogitsWarper(sampling.min_p)(None, expected)
    shares = expected.softmax(-1)[0].double()
    draws = torch.cat([draw(sequence_seed(1, prompt, 3), 100) for prompt in range(count // 100)])
    tokens = chosen(logits.expand(count, -1), sampling, draws)
    found = torch.bincount(tokens, minlength=40).double()
    possible = shares > 0
    assert found[~possible].sum() == 0
    statistic = ((found - count * shares)[possible].square() / (count * shares[possible])).sum()
    freedom = int(possible.sum()) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_the_repetition_penalty_is_that_of_transformers():
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(3, 50, generator=random)
    context = torch.randint(50, (3, 12), generator=random)
    rows, _ = rows_of([Sampling(repetition_penalty=1.7)] * 3, 50, context.tolist())
    expected = RepetitionPenaltyLogitsProcessor(1.7)(context, logits.clone())
    torch.testing.assert_close(penalised(logits, rows), expected)
    rows.mark(slice(0, 3), torch.tensor([1, 2, 3]))
    longer = torch.cat((context, torch.tensor([[1], [2], [3]])), dim=1)
    torch.testing.assert_close(penalised(logits, rows), RepetitionPenaltyLogitsProcessor(1.7)(longer, logits.clone()))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": 1e-300},
        {"top_p": 1e-300},
        {"repetition_penalty": 1e-300},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
    ],
)
def test_what_is_no_distribution_is_refused_by_name(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)
