"""Speculation is lossless: the same tokens as without it, greedy (so those of transformers) and sampled, whatever is guessed."""

from dataclasses import replace

import pytest
import torch

from holdfast import generate
from holdfast.cli import run
from holdfast.generation.cache import SlotCache
from holdfast.generation.loading import LoadedModel, load_model
from holdfast.generation.model_step import feed
from holdfast.generation.requests import GenerationRequest
from holdfast.generation.sampling import GREEDY, Sampling
from holdfast.generation.slots import SlotEngine
from holdfast.generation.speculation import NgramProposer
from holdfast.system.errors import HoldfastError, UsageError
from tests.conversion.families import build_family
from tests.conversion.holdfast_runs import POSITIONS, build_gpt, write_run
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer
from tests.generation.test_engine import PROMPTS, greedy_by_transformers
from tests.generation.test_slots import WithoutEnd, alone, mixed_requests, run_all, tokens_of


@pytest.fixture(scope="module")
def loaded(saved):
    return load_model(saved.run)


@pytest.fixture(scope="module")
def proposers(loaded):
    """n-grams, the model itself (every guess is right), a model with its first layer only, and one with other weights."""
    config = loaded.model.config
    layers = build_gpt(replace(config, num_layers=1))
    layers.load_state_dict(loaded.model.state_dict(), strict=False)
    torch.manual_seed(2)
    other = build_gpt(config)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    drafts = [LoadedModel(model, loaded.tokenizer, POSITIONS) for model in (layers, other)]
    return ["ngram", loaded, *drafts]


def test_greedy_texts_with_speculation_equal_transformers_token_for_token(saved, loaded, proposers):
    expected = [greedy_by_transformers(saved.huggingface, prompt, 14) for prompt in PROMPTS]
    eod = loaded.tokenizer.eod
    expected = [tokens[: tokens.index(eod)] if eod in tokens else tokens for tokens in expected]
    for proposer in proposers:
        found = generate(loaded, PROMPTS, max_new_tokens=14, temperature=0, speculate=proposer)
        assert [list(completion.tokens) for completion in found] == expected


@pytest.mark.parametrize("family", ["llama-dynamic", "llama-yarn", "gemma2"])
def test_several_tokens_at_once_have_the_logits_of_single_ones(tmp_path, family):
    """Also where the rotary angles depend on the length of the text so far."""
    build_family(family).save_pretrained(tmp_path / "hf")
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer")
    model = load_model(tmp_path / "hf", tokenizer={"vocab_file": vocab, "merge_file": merges}).model
    tokens, start = torch.arange(3, 43)[None], torch.zeros(1, dtype=torch.int64)
    caches = [SlotCache(model.config, 1, 40, model.dtype, torch.device("cpu")) for _ in range(2)]
    with torch.no_grad():
        together = [feed(model, tokens[:, at : at + 5], start + at, caches[0], 40) for at in range(0, 40, 5)]
        single = [feed(model, tokens[:, at : at + 1], start + at, caches[1], 40) for at in range(40)]
    torch.testing.assert_close(torch.cat(together, 1), torch.cat(single, 1), rtol=0, atol=1e-5)


def test_requests_with_all_kinds_of_sampling_get_what_they_get_without_speculation(loaded, proposers):
    requests = [replace(request, logprobs=2) for request in mixed_requests(6, seed=5)]
    requests += [GenerationRequest((3, 4, 3, 4, 3), POSITIONS, sampling) for sampling in (GREEDY, Sampling(0.3))]
    requests += [GenerationRequest((9, 8, 7), 3 * POSITIONS, Sampling(0.5), seed=3, sliding_window=True)]
    expected = [alone(loaded, request) for request in requests]
    for proposer in proposers:
        engine = SlotEngine(loaded, 3, speculate=proposer)
        ids = [engine.submit(request) for request in requests]
        collected = run_all(engine)
        for number, wanted in zip(ids, expected, strict=True):
            assert tokens_of(collected[number]) == tokens_of(wanted)
            assert "".join(e.text for e in collected[number]) == "".join(e.text for e in wanted)
            assert collected[number][-1].finish_reason == wanted[-1].finish_reason
            for one, other in zip(collected[number], wanted, strict=False):
                assert one.logprobs is None or one.logprobs.chosen == pytest.approx(other.logprobs.chosen, abs=1e-4)
        assert 0 <= engine.accepted <= engine.guessed and engine.active == 0


def test_right_guesses_save_passes_of_the_model(loaded, proposers):
    def steps(proposer, sampling):
        engine = SlotEngine(loaded, 1, speculate=proposer)
        engine.submit(GenerationRequest((5, 6), 20, sampling))
        count = 0
        while engine.has_work:
            engine.step()
            count += 1
        return count, engine

    for sampling in (GREEDY, Sampling(0.8, 40)):
        plain, _ = steps(None, sampling)
        saving, engine = steps(proposers[1], sampling)  # the model itself drafts: all is accepted
        assert engine.accepted > 0.8 * engine.guessed and saving < plain / 2


def test_an_engine_that_speculates_does_not_serve_later_calls(loaded):
    loaded.spare.clear()
    generate(loaded, "a", max_new_tokens=1, speculate="ngram")  # too short for a guess
    assert not loaded.spare
    generate(loaded, "a", max_new_tokens=1)
    assert loaded.spare


def test_a_draft_reads_a_prompt_again_whose_slot_was_free_meanwhile(loaded):
    """The model drafts for itself, so every guess is right unless its cache was overwritten."""
    loaded = replace(loaded, tokenizer=WithoutEnd(loaded.tokenizer))
    engine = SlotEngine(loaded, 3, speculate=loaded)
    engine.submit(GenerationRequest((9, 8, 7), 27, GREEDY))
    engine.submit(GenerationRequest((5, 6, 4), 6, GREEDY))
    engine.submit(GenerationRequest((1, 2, 3), 27, GREEDY))
    while engine.active != 2:
        engine.step()
    engine.step()
    engine.submit(GenerationRequest((5, 6, 4), 20, GREEDY))
    run_all(engine)
    assert engine.accepted == engine.guessed > 0


def test_an_ngram_is_continued_as_at_its_last_occurrence():
    follow = NgramProposer._continue
    assert follow([1, 2, 3, 9, 1, 2, 3, 8, 7, 1, 2, 3], 2) == [8, 7]
    assert follow([5, 1, 2, 6, 1, 2], 4) == [6, 1, 2]
    assert follow([1, 2, 3, 4], 4) == [] == follow([1], 4)
    assert follow([7, 7, 7, 7], 2) == [7]
    # no match across the border of two ids
    assert follow([0x01000000, 0x02000001, 0x03000002, 1, 2], 2) == []


def test_a_draft_model_with_another_tokenizer_is_refused(gpt2, tmp_path):
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer", size=290)
    config = load_model(gpt2.run).model.config
    other = write_run(tmp_path / "run", config, build_gpt(config), vocab_file=vocab, merge_file=merges)
    with pytest.raises(HoldfastError, match="another tokenizer"):
        generate(gpt2.run, "a", speculate=str(other))
    with pytest.raises(HoldfastError, match="another tokenizer"):
        run(["generate", str(gpt2.run), "--prompt", "a", "--speculate", str(other)])
    with pytest.raises(UsageError, match="not with int8"):
        generate(replace(load_model(gpt2.run), weights="int8"), "a", speculate="ngram")
    assert generate(gpt2.run, "a", speculate=str(gpt2.run)) == generate(gpt2.run, "a")
