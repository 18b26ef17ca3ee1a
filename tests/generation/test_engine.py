"""Texts against `transformers`, which generates from the same Hugging Face folder, one prompt at a time."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast import generate
from holdfast.generation.loading import load_model
from holdfast.system.errors import HoldfastError, UsageError
from tests.conversion.holdfast_runs import GPT2_TINY, POSITIONS, build_gpt, write_run

PROMPTS = ["a", "the quick", "the lazy dog jumps over", "return self.value if the other", "fox"]


def greedy_by_transformers(folder, prompt, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    written = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return written[0, ids["input_ids"].shape[1] :].tolist()


def test_greedy_texts_equal_transformers_token_for_token_alone_and_side_by_side(saved):
    together = generate(saved.huggingface, PROMPTS, max_new_tokens=12, temperature=0)
    for prompt, beside_others in zip(PROMPTS, together, strict=True):
        (alone,) = generate(saved.huggingface, prompt, max_new_tokens=12, temperature=0)
        expected = greedy_by_transformers(saved.huggingface, prompt, 12)
        eod = load_model(saved.huggingface).tokenizer.eod
        expected = expected[: expected.index(eod)] if eod in expected else expected
        assert list(alone.tokens) == list(beside_others.tokens) == expected and expected


def test_a_run_its_checkpoint_and_its_hugging_face_folder_write_the_same(gpt2):
    places = [gpt2.run, next(gpt2.run.glob("checkpoints/step-*")), gpt2.huggingface]
    texts = [generate(place, "the quick", max_new_tokens=10, seed=5)[0] for place in places]
    assert texts[0] == texts[1] == texts[2]
    assert texts[0].text == "the quick" + texts[0].completion


def test_a_seed_decides_the_text_whatever_is_written_beside_it(gpt2):
    loaded = load_model(gpt2.run)
    several = generate(loaded, PROMPTS, max_new_tokens=9, num_return_sequences=3, seed=7)
    assert several == generate(loaded, PROMPTS, max_new_tokens=9, num_return_sequences=3, seed=7)
    assert several[:3] == generate(loaded, PROMPTS[0], max_new_tokens=9, num_return_sequences=3, seed=7)
    assert several[0] == generate(loaded, PROMPTS[0], max_new_tokens=9, seed=7)[0]
    assert several != generate(loaded, PROMPTS, max_new_tokens=9, num_return_sequences=3, seed=8)
    assert len({completion.tokens for completion in several[:3]}) == 3
    assert [completion.prompt for completion in several] == [prompt for prompt in PROMPTS for _ in range(3)]


def test_sampled_tokens_follow_the_logits_of_transformers(gpt2):
    count = 600
    loaded = load_model(gpt2.run)
    found = generate(loaded, "the quick", max_new_tokens=1, num_return_sequences=count, temperature=0.7, top_k=4)
    model = AutoModelForCausalLM.from_pretrained(gpt2.huggingface).eval()
    ids = AutoTokenizer.from_pretrained(gpt2.huggingface)("the quick", return_tensors="pt")
    with torch.no_grad():
        best = model(**ids).logits[0, -1].topk(4)
    shares = (best.values / 0.7).softmax(-1)
    tokens = [completion.tokens[0] if completion.tokens else loaded.tokenizer.eod for completion in found]
    for token, share in zip(best.indices.tolist(), shares.tolist(), strict=True):
        assert abs(tokens.count(token) / count - share) < 5 * (share * (1 - share) / count) ** 0.5 + 1e-9
    assert set(tokens) <= set(best.indices.tolist())


def test_more_prompts_than_fit_side_by_side_come_back_in_order(gpt2, monkeypatch):
    loaded = load_model(gpt2.run)
    expected = generate(loaded, PROMPTS, max_new_tokens=5, num_return_sequences=2)
    monkeypatch.setattr("holdfast.generation.engine.ROWS", 3)
    assert generate(loaded, PROMPTS, max_new_tokens=5, num_return_sequences=2) == expected


def test_a_text_ends_at_the_end_of_document_token_and_others_go_on(gpt2):
    loaded = load_model(gpt2.run)
    plain = generate(loaded, PROMPTS, max_new_tokens=12, temperature=0)
    end = plain[0].tokens[4]

    class Ending:
        """The model's tokenizer, with another end-of-document token."""

        byte_tokens = frozenset()
        eod, encode, decode = end, loaded.tokenizer.encode, loaded.tokenizer.decode

    ended = generate(
        type(loaded)(loaded.model, Ending(), loaded.max_positions), PROMPTS, max_new_tokens=12, temperature=0
    )
    for before, after in zip(plain, ended, strict=True):
        tokens = list(before.tokens)
        assert list(after.tokens) == (tokens[: tokens.index(end)] if end in tokens else tokens)
    assert len(ended[0].tokens) == plain[0].tokens.index(end)


@pytest.mark.parametrize("several", [True, False])
def test_a_text_ends_at_the_tokens_that_generation_config_states(gpt2, tmp_path, several):
    """As a chat model's: its turns end with a token that is not the tokenizer's end of text."""
    folder = shutil.copytree(gpt2.huggingface, tmp_path / "chat")
    plain = generate(gpt2.huggingface, "the fox", max_new_tokens=12, temperature=0)[0]
    end = plain.tokens[4]
    stated = {"eos_token_id": [end, 1] if several else end, "bos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    (found,) = generate(folder, "the fox", max_new_tokens=12, temperature=0)
    assert list(found.tokens) == list(plain.tokens[: plain.tokens.index(end)])
    assert found.finish_reason == "stop"


def test_texts_stop_where_the_models_positions_end(saved, capsys):
    loaded = load_model(saved.run)
    longest = "the quick brown fox jumps over the lazy dog"
    length = len(loaded.tokenizer.encode(longest))
    found = generate(loaded, [longest, "fox"], max_new_tokens=POSITIONS - 6, temperature=0)
    assert len(found[0].tokens) <= POSITIONS - length < POSITIONS - 6
    alone = generate(loaded, "fox", max_new_tokens=POSITIONS - 6, temperature=0)
    assert found[1] == alone[0]
    assert f"allow {POSITIONS - length} more tokens" in capsys.readouterr().err
    with pytest.raises(HoldfastError, match=f"positions end at {POSITIONS}; shorten it"):
        generate(loaded, longest * 5)


@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_texts_equal_transformers_up_to_the_last_position(saved, speculate):
    loaded = load_model(saved.huggingface)
    for prompt in PROMPTS[:3]:
        room = POSITIONS - len(loaded.tokenizer.encode(prompt))
        expected = greedy_by_transformers(saved.huggingface, prompt, room)
        eod = loaded.tokenizer.eod
        expected = expected[: expected.index(eod)] if eod in expected else expected
        (found,) = generate(loaded, prompt, max_new_tokens=room + 10, temperature=0, speculate=speculate)
        assert list(found.tokens) == expected
        assert found.finish_reason == ("length" if len(expected) == room else "stop")


def test_an_empty_prompt_starts_a_document(gpt2):
    (found,) = generate(gpt2.run, "", max_new_tokens=3, temperature=0)
    assert found.text == found.completion


def test_what_cannot_generate_is_refused_with_the_reason(gpt2, tmp_path):
    with pytest.raises(HoldfastError, match="nowhere"):
        generate(tmp_path / "nowhere", "a")
    speechless = write_run(tmp_path / "run", GPT2_TINY, build_gpt(GPT2_TINY))
    with pytest.raises(HoldfastError, match="tokenizer"):
        generate(speechless, "a")
    for wrong in ({"max_new_tokens": 0}, {"num_return_sequences": 0}, {"temperature": -1.0}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            generate(gpt2.run, "a", **wrong)


def test_a_bert_model_is_refused(tmp_path):
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    BertForPreTraining(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(HoldfastError, match="BERT model, which does not generate"):
        generate(tmp_path / "bert", "a")
