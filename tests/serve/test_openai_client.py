"""The official client against a real server; texts against `holdfast.generate`, chat prompts against transformers."""

import math

import openai
import pytest
from transformers import AutoTokenizer

from holdfast import generate
from holdfast.generation.loading import load_model
from holdfast.generation.masked import embed, load_bert
from tests.serve.conftest import POSITIONS


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def loaded(gpt2_folder):
    return load_model(gpt2_folder)


PROMPTS = ["the quick", "a lazy dog jumps over"]


def test_models_are_listed(client):
    first, second = client.models.list().data
    assert (first.id, first.max_model_len, first.capabilities) == ("gpt2-tiny", POSITIONS, ["completions", "chat"])
    assert client.models.retrieve("bert-tiny").capabilities == second.capabilities == ["embeddings"]


def test_completions_equal_the_library(client, loaded):
    found = client.completions.create(model="gpt2-tiny", prompt=PROMPTS, max_tokens=12, temperature=0, echo=True)
    expected = generate(loaded, PROMPTS, max_new_tokens=12, temperature=0)
    assert [choice.text for choice in found.choices] == [one.text for one in expected]
    assert {choice.finish_reason for choice in found.choices} == {"length"}
    lengths = sum(len(loaded.tokenizer.encode(prompt)) for prompt in PROMPTS)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (lengths, 24)
    ids = [loaded.tokenizer.encode(prompt) for prompt in PROMPTS]
    again = client.completions.create(model="gpt2-tiny", prompt=ids, max_tokens=12, temperature=0)
    assert [choice.text for choice in again.choices] == [one.completion for one in expected]


def test_a_seed_gives_the_library_s_samples(client, loaded):
    found = client.completions.create(
        model="gpt2-tiny", prompt=PROMPTS, n=2, max_tokens=8, seed=11, temperature=0.7, extra_body={"top_k": 20}
    )
    expected = generate(loaded, PROMPTS, num_return_sequences=2, max_new_tokens=8, seed=11, temperature=0.7, top_k=20)
    assert [choice.text for choice in found.choices] == [one.completion for one in expected]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]


def test_a_stream_is_the_same_text_and_ends_with_usage(client):
    options = dict(model="gpt2-tiny", prompt=PROMPTS, max_tokens=30, temperature=0, n=2, logprobs=2)
    whole = client.completions.create(**options)
    texts, tokens, usage = {}, {}, None
    for event in client.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert tokens == {choice.index: choice.logprobs.tokens for choice in whole.choices}
    assert usage == whole.usage


def test_logprobs_are_those_of_transformers(client, gpt2_folder):
    import torch
    from transformers import AutoModelForCausalLM

    found = client.completions.create(model="gpt2-tiny", prompt=PROMPTS[0], max_tokens=6, temperature=0, logprobs=3)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(gpt2_folder), AutoTokenizer.from_pretrained(gpt2_folder)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    logprobs = found.choices[0].logprobs
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        with torch.no_grad():
            best = model(ids).logits[0, -1].log_softmax(-1).topk(3)
        assert value == pytest.approx(best.values[0].item(), abs=1e-4)
        assert sorted(top.values(), reverse=True) == pytest.approx(best.values.tolist(), abs=1e-4)
        ids = torch.cat([ids, best.indices[None, :1]], 1)
    assert logprobs.text_offset[0] == 0


def test_a_text_ends_where_the_positions_end(client):
    prompt = [5] * (POSITIONS - 3)
    (choice,) = client.completions.create(
        model="gpt2-tiny", prompt=prompt, max_tokens=9, temperature=0, logprobs=0
    ).choices
    assert (len(choice.logprobs.tokens), choice.finish_reason) == (3, "length")


def test_a_stop_string_ends_the_text_before_it(client):
    options = dict(model="gpt2-tiny", prompt=PROMPTS[1], max_tokens=40, temperature=0)
    text = client.completions.create(**options).choices[0].text
    stop = text[10:13]
    choice = client.completions.create(**options, stop=[stop, "never"]).choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    streamed = "".join(e.choices[0].text for e in client.completions.create(**options, stop=stop, stream=True))
    assert streamed == choice.text


def test_chat_renders_the_template_as_transformers_does(client, loaded, gpt2_folder):
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "the quick ünïcode"}]
    expected = AutoTokenizer.from_pretrained(gpt2_folder).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    found = client.chat.completions.create(
        model="gpt2-tiny", messages=messages, max_tokens=9, temperature=0, logprobs=True, top_logprobs=2
    )
    by_ids = client.completions.create(model="gpt2-tiny", prompt=expected, max_tokens=9, temperature=0)
    assert found.choices[0].message.content == by_ids.choices[0].text
    assert found.usage.prompt_tokens == len(expected)
    assert len(found.choices[0].logprobs.content) == 9
    assert math.exp(found.choices[0].logprobs.content[0].top_logprobs[0].logprob) <= 1
    stream = client.chat.completions.create(
        model="gpt2-tiny", messages=messages, max_tokens=9, temperature=0, stream=True
    )
    events = list(stream)
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(e.choices[0].delta.content or "" for e in events) == found.choices[0].message.content
    assert events[-1].choices[0].finish_reason == "length"


def test_a_token_that_is_a_part_of_a_character_has_a_name_and_no_bytes(client):
    messages = [{"role": "user", "content": "a"}]
    found = client.chat.completions.create(
        model="gpt2-tiny", messages=messages, max_tokens=9, temperature=0, logprobs=True, top_logprobs=20
    )
    tokens = [one for token in found.choices[0].logprobs.content for one in (token, *token.top_logprobs)]
    parts = [one for one in tokens if one.token.startswith("token_id:")]
    assert parts and all(one.bytes is None for one in parts)
    assert all(bytes(one.bytes).decode() == one.token for one in tokens if one not in parts)


def test_embeddings_are_the_library_s_vectors(client, bert_folder):
    bert, texts = load_bert(bert_folder), ["a fox", "the lazy dog"]
    expected = embed(bert, [bert.encode(text) for text in texts]).tolist()
    for form in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
        found = client.embeddings.create(model="bert-tiny", input=texts, **form)
        for one, vector in zip(found.data, expected, strict=True):
            assert one.embedding == pytest.approx(vector, abs=1e-6)
    assert found.usage.prompt_tokens == sum(len(bert.encode(text)) for text in texts)


def test_mistakes_become_the_client_s_exceptions(client):
    with pytest.raises(openai.NotFoundError, match="does not exist") as caught:
        client.completions.create(model="gpt-5", prompt="a")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="no robots"):
        client.chat.completions.create(model="gpt2-tiny", messages=[{"role": "robot", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        client.completions.create(model="gpt2-tiny", prompt="fox " * POSITIONS, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="does not generate text"):
        client.completions.create(model="bert-tiny", prompt="a")
