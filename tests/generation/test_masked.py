"""Masked tokens against transformers' fill-mask pipeline, on Hugging Face folders and on the runs converted from them."""

import json

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline

from holdfast import convert
from holdfast.cli import run
from holdfast.generation.masked import embed, fill_mask, load_bert
from holdfast.system.errors import HoldfastError, UsageError
from tests.generation.conftest import write_bert

TEXTS = ["The capital of France is [MASK].", "[MASK] dogs", "a [MASK] fox and the [MASK] dog jump over"]


@pytest.fixture(scope="module", params=["bert", "megatron-bert"])
def bert(request, tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp(request.param) / "hf", request.param)


def pipeline_results(folder, texts):
    model = AutoModelForMaskedLM.from_pretrained(folder).eval()
    fill = pipeline("fill-mask", model=model, tokenizer=AutoTokenizer.from_pretrained(folder), top_k=5)
    found = [fill(text) for text in texts]
    return [entry if isinstance(entry[0], list) else [entry] for entry in found]


def test_tokens_and_probabilities_are_those_of_transformers(bert, tmp_path):
    expected = pipeline_results(bert, TEXTS)
    for place in (bert, convert(bert, tmp_path / "run", to="holdfast")):
        found = fill_mask(place, TEXTS)
        for ours, theirs in zip(found, expected, strict=True):
            for mask, other in zip(ours, theirs, strict=True):
                assert [one.token_id for one in mask] == [one["token"] for one in other]
                assert [one.token for one in mask] == [one["token_str"] for one in other]
                assert [one.probability for one in mask] == pytest.approx([one["score"] for one in other], rel=1e-4)
    word = found[2][1][0].token
    assert found[2][1][0].text == f"a [MASK] fox and the {word} dog jump over"


def test_a_vector_is_the_mean_of_the_last_hidden_states(bert):
    from transformers import AutoModel

    loaded, texts = load_bert(bert), ["a fox", "the lazy dogs jump over the fox", "dog"]
    found = embed(loaded, [loaded.encode(text) for text in texts])
    model, tokenizer = AutoModel.from_pretrained(bert).eval(), AutoTokenizer.from_pretrained(bert)
    for vector, text in zip(found, texts, strict=True):
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        torch.testing.assert_close(vector, mean / mean.norm(), rtol=1e-4, atol=1e-5)


def test_the_command_prints_tokens_with_probabilities(bert, capsys):
    run(["generate", str(bert), "--fill-mask", *TEXTS, "--json"])
    (first, *_) = found = json.loads(capsys.readouterr().out)
    assert [entry["prompt"] for entry in found] == TEXTS
    assert set(first["masks"][0][0]) == {"token", "token_id", "probability", "text"}
    run(["generate", str(bert), "--fill-mask", TEXTS[2], "--top-k", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [TEXTS[2], "mask 1"] and lines[4] == "mask 2" and len(lines) == 7
    assert lines[2].split() == [f"{found[2]['masks'][0][0]['probability']:.4f}", found[2]["masks"][0][0]["token"]]


def test_wrong_use_is_named(bert, gpt2):
    with pytest.raises(UsageError, match=r"has no \[MASK\]"):
        fill_mask(bert, "no mask here")
    with pytest.raises(HoldfastError, match="positions end at 32; shorten it"):
        fill_mask(bert, "[MASK] " * 40)
    with pytest.raises(HoldfastError, match="holds no BERT model"):
        fill_mask(gpt2.run, "[MASK]")
    with pytest.raises(UsageError, match="leave out --prompt"):
        run(["generate", str(bert), "--fill-mask", "[MASK]", "--prompt", "a"])
    with pytest.raises(HoldfastError, match="--fill-mask"):
        run(["generate", str(bert), "--prompt", "a"])
