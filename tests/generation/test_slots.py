"""The slot engine: requests join, leave and are cancelled between steps, and each gets what it gets alone."""

import random
from collections import defaultdict

import pytest
import torch
from transformers import AutoModelForCausalLM

from holdfast.generation.loading import load_model
from holdfast.generation.requests import GenerationRequest
from holdfast.generation.sampling import GREEDY, Sampling
from holdfast.generation.slots import SlotEngine
from holdfast.system.errors import HoldfastError, UsageError
from tests.conversion.holdfast_runs import POSITIONS, VOCABULARY

SAMPLINGS = [GREEDY, Sampling(), Sampling(0.7, 5), Sampling(1.2, 0, 0.8), Sampling(1, 0, 1, 0.2, 1.3)]


def run_all(engine, collected=None):
    collected = collected if collected is not None else defaultdict(list)
    while engine.has_work:
        for emission in engine.step():
            collected[emission.id].append(emission)
    return collected


def tokens_of(emissions):
    return [emission.token for emission in emissions if emission.token is not None]


def mixed_requests(count, seed=1):
    numbers = random.Random(seed)
    return [
        GenerationRequest(
            tuple(numbers.randrange(VOCABULARY) for _ in range(numbers.randint(1, 12))),
            numbers.randint(1, 18),
            numbers.choice(SAMPLINGS),
            seed=number,
        )
        for number in range(count)
    ]


def alone(loaded, request):
    engine = SlotEngine(loaded, 1)
    number = engine.submit(request)
    return run_all(engine)[number]


@pytest.mark.parametrize(
    "lookahead, alignment", [(1, 64), (0, 4)]
)  # one span for all steps, or spans that grow and shrink
def test_requests_that_join_and_leave_get_what_they_get_alone(saved, lookahead, alignment, monkeypatch):
    monkeypatch.setattr("holdfast.generation.slots.ALIGNMENT", alignment)
    loaded = load_model(saved.run)
    requests = mixed_requests(15)
    expected = [alone(loaded, request) for request in requests]
    engine = SlotEngine(loaded, 4, lookahead=lookahead)
    collected, ids = defaultdict(list), []
    for request in requests:  # some join while others are being written
        ids.append(engine.submit(request))
        for emission in engine.step():
            collected[emission.id].append(emission)
        assert engine.active <= 4
    run_all(engine, collected)
    for number, wanted in zip(ids, expected, strict=True):
        found = collected[number]
        assert tokens_of(found) == tokens_of(wanted)
        assert "".join(e.text for e in found) == "".join(e.text for e in wanted)
        assert [e.finish_reason for e in found[:-1]] == [None] * (len(found) - 1)
        assert found[-1].finish_reason == wanted[-1].finish_reason in ("stop", "length")
    assert engine.active == engine.queued == 0


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_cancelled_request_frees_its_slot_and_disturbs_no_other(gpt2, lookahead):
    loaded = load_model(gpt2.run)
    first, second, third, fourth = mixed_requests(4, seed=2)
    engine = SlotEngine(loaded, 2, lookahead=lookahead)
    ids = [engine.submit(GenerationRequest(r.prompt, 15, r.sampling, r.seed)) for r in (first, second, third, fourth)]
    collected = defaultdict(list)
    for _ in range(3):
        for emission in engine.step():
            collected[emission.id].append(emission)
    assert (engine.active, engine.queued) == (2, 2)
    engine.cancel(ids[0])
    engine.cancel(ids[3])
    engine.cancel(ids[3])
    assert (engine.active, engine.queued) == (1, 1)
    run_all(engine, collected)
    for number in (ids[0], ids[3]):
        assert [e.finish_reason for e in collected[number] if e.finish_reason] == ["cancelled"]
    for number, request in ((ids[1], second), (ids[2], third)):
        wanted = alone(loaded, GenerationRequest(request.prompt, 15, request.sampling, request.seed))
        assert tokens_of(collected[number]) == tokens_of(wanted)
    engine.cancel(ids[1])  # has ended: nothing happens
    assert not engine.has_work


@pytest.mark.parametrize("lookahead", [0, 1])
def test_long_requests_move_to_low_slots_when_the_others_end(saved, lookahead):
    loaded = load_model(saved.run)
    short = [GenerationRequest((3, 4), 2, GREEDY) for _ in range(6)]
    long = [GenerationRequest((5, 6), 20, sampling, seed=8) for sampling in (SAMPLINGS[4], SAMPLINGS[2])]
    engine = SlotEngine(loaded, 8, lookahead=lookahead)
    engine._tokenizer = WithoutEnd(loaded.tokenizer)
    ids = [engine.submit(request) for request in [*short, *long]]
    counts, step = [], engine._step

    def counting(tokens, *others):
        counts.append(len(tokens))
        return step(tokens, *others)

    engine._step = counting
    collected = run_all(engine)
    assert counts[0] == 8 and counts[-1] == 2
    for number, request in zip(ids[6:], long, strict=True):
        single = SlotEngine(loaded, 1)
        single._tokenizer = engine._tokenizer
        single.submit(request)
        (wanted,) = run_all(single).values()
        assert tokens_of(collected[number]) == tokens_of(wanted) and len(tokens_of(wanted)) == 20


def test_log_probabilities_are_those_of_transformers(gpt2):
    loaded = load_model(gpt2.run)
    model = AutoModelForCausalLM.from_pretrained(gpt2.huggingface).eval()
    engine = SlotEngine(loaded, 3)
    prompt = (5, 9, 30)
    detailed = engine.submit(GenerationRequest(prompt, 6, Sampling(0.8, 50), seed=3, logprobs=4))
    chosen_only = engine.submit(GenerationRequest(prompt, 6, Sampling(0.8, 50), seed=3, logprobs=0))
    without = engine.submit(GenerationRequest(prompt, 6, Sampling(0.8, 50), seed=3))
    collected = run_all(engine)
    tokens = tokens_of(collected[detailed])
    with torch.no_grad():
        expected = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    for step, emission in enumerate(e for e in collected[detailed] if e.token is not None):
        best = expected[step].topk(4)
        assert emission.logprobs.chosen == pytest.approx(expected[step, emission.token].item(), abs=1e-4)
        assert [token for token, _ in emission.logprobs.top] == best.indices.tolist()
        assert [value for _, value in emission.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert all(e.logprobs.top == () for e in collected[chosen_only] if e.token is not None)
    assert all(e.logprobs is None for e in collected[without])


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_sliding_window_continues_from_the_newest_half_of_the_positions(saved, lookahead):
    loaded = load_model(saved.run)
    model = AutoModelForCausalLM.from_pretrained(saved.huggingface).eval()
    prompt, wanted = [7, 8, 9], 3 * POSITIONS
    tokens = list(prompt)
    context = list(prompt)
    while len(tokens) < len(prompt) + wanted:
        if len(context) > POSITIONS:
            context = context[-(POSITIONS // 2) :]
        with torch.no_grad():
            best = model(torch.tensor([context])).logits[0, -1, :VOCABULARY].argmax().item()
        tokens.append(best)
        context.append(best)
    loaded = type(loaded)(loaded.model, WithoutEnd(loaded.tokenizer), loaded.max_positions)
    engine = SlotEngine(loaded, 2, lookahead=lookahead)
    number = engine.submit(GenerationRequest(tuple(prompt), wanted, GREEDY, sliding_window=True))
    neighbour = engine.submit(GenerationRequest((1, 2), 9, GREEDY))
    collected = run_all(engine)
    assert tokens_of(collected[number]) == tokens[len(prompt) :]
    assert collected[number][-1].finish_reason == "length" and len(tokens_of(collected[neighbour])) == 9


class WithoutEnd:
    """A tokenizer without an end-of-document token."""

    eod, byte_tokens = None, frozenset()

    def __init__(self, tokenizer):
        self.decode, self.encode = tokenizer.decode, tokenizer.encode


def test_a_huge_limit_takes_no_memory_and_does_not_change_the_draws(gpt2, monkeypatch):
    loaded = load_model(gpt2.run)
    loaded = type(loaded)(loaded.model, WithoutEnd(loaded.tokenizer), loaded.max_positions)
    expected = tokens_of(alone(loaded, GenerationRequest((1, 2), 70, Sampling(), seed=4, sliding_window=True)))
    monkeypatch.setattr("holdfast.generation.requests.FIRST_DRAWS", 3)
    engine = SlotEngine(loaded, 1)
    engine.submit(GenerationRequest((1, 2), 10**12, Sampling(), seed=4, sliding_window=True))
    tokens = []
    while len(tokens) < 70:
        tokens += tokens_of(engine.step())
    assert tokens[:70] == expected


def test_what_cannot_be_served_is_refused_before_it_waits(gpt2):
    engine = SlotEngine(load_model(gpt2.run), 1)
    with pytest.raises(HoldfastError, match=f"positions end at {POSITIONS}"):
        engine.submit(GenerationRequest((1,) * POSITIONS, 1))
    for outside in (VOCABULARY, -1):
        with pytest.raises(HoldfastError, match="outside of the model's vocabulary"):
            engine.submit(GenerationRequest((1, outside), 1))
    with pytest.raises(UsageError, match="max_new_tokens"):
        GenerationRequest((1,), 0)
    with pytest.raises(UsageError, match="stop string is empty"):
        GenerationRequest((1,), stop=("",))
    with pytest.raises(UsageError, match="logprobs"):
        GenerationRequest((1,), logprobs=1000)
    assert not engine.has_work and engine.step() == []


def test_a_cache_that_does_not_fit_into_memory_is_an_error_in_words(gpt2):
    with pytest.raises(HoldfastError, match="does not fit into memory; generate fewer or shorter texts"):
        SlotEngine(load_model(gpt2.run), 1 << 40)
