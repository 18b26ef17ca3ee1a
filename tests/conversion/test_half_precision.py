"""Every family in bf16 and fp16: the logits of transformers with the same 16-bit weights.

The measure is transformers' own rounding, its distance from the same weights in fp64. Another order of sums or another place of
a rounding moves logits as far as that; only products that a library sums in another order may differ, and much less.
"""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from holdfast import generate
from holdfast.conversion.sources import read_model
from holdfast.generation.loading import build_empty, fill, load_model
from holdfast.models.bert import BERT
from holdfast.models.gpt import GPT
from tests.conversion.families import FAMILIES, SIZES, VOCABULARY
from tests.conversion.oracles import load_wide, load_wide_bert
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer

TYPES = (torch.bfloat16, torch.float16)
GPT2_SIZES = {"vocab_size": VOCABULARY, "n_positions": 48, "n_embd": 32, "n_layer": 2, "n_head": 4}
BERTS = {BertForPreTraining: BertConfig, MegatronBertForPreTraining: MegatronBertConfig}


class AnyTokenizer:
    vocab_size = VOCABULARY


def save(folder, kind, config, dtype):
    """Writes a model with random 16-bit weights."""
    torch.manual_seed(5)
    model = kind(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.to(dtype).save_pretrained(folder)


def load(kind, folder, dtype):
    source = read_model(folder)
    model = fill(build_empty(kind, source, AnyTokenizer(), torch.device("cpu"), dtype), source, dtype)
    for parameter in model.parameters():  # rows as transformers stores them: libraries sum in an order of the layout
        parameter.data = parameter.data.contiguous()
    return model


def distance(one, other):
    return float((one.double() - other.double()).norm())


def roundings(folder, kind, dtype):
    """The distances of transformers' logits and ours from those in fp64, and from each other."""
    ids = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(3))
    model = load(GPT, folder, dtype)
    with torch.no_grad():
        exact = load_wide(folder)(ids).logits
        theirs = kind.from_pretrained(folder, dtype=dtype).eval()(ids).logits
        found = model.logits(model.hidden(ids))
    assert found.dtype == theirs.dtype == dtype
    return distance(theirs, exact), distance(found, exact), distance(found, theirs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_16_bits_are_those_of_transformers(tmp_path, family, dtype):
    kind, config = FAMILIES[family]
    save(tmp_path / "hf", kind, config, dtype)
    theirs, ours, difference = roundings(tmp_path / "hf", kind, dtype)
    assert difference < 0.5 * theirs and ours < 1.2 * theirs


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "gelu_new"])
def test_logits_of_gpt2_in_16_bits_are_those_of_transformers(tmp_path, activation, dtype):
    config = GPT2Config(**GPT2_SIZES, activation_function=activation)
    save(tmp_path / "hf", GPT2LMHeadModel, config, dtype)
    theirs, ours, difference = roundings(tmp_path / "hf", GPT2LMHeadModel, dtype)
    # transformers rounds each operation of gelu_new, ours is a kernel that rounds once
    assert ours < 1.2 * theirs and (activation == "gelu_new" or difference < 0.5 * theirs)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("kind", BERTS, ids=lambda kind: kind.__name__)
def test_logits_of_bert_in_16_bits_are_those_of_transformers(tmp_path, kind, dtype):
    sizes = {name: value for name, value in SIZES.items() if "token" not in name}
    save(tmp_path / "hf", kind, BERTS[kind](**sizes, hidden_act="gelu"), dtype)
    ids = torch.randint(0, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(3))
    types, there = ids % 2, torch.arange(30) < torch.tensor([[30], [20]])
    inputs = {"attention_mask": there.long(), "token_type_ids": types}
    oracle, model = load_wide_bert(tmp_path / "hf"), load(BERT, tmp_path / "hf", dtype)
    with torch.no_grad():
        exact = oracle(ids, **inputs).prediction_logits[there]
        theirs = kind.from_pretrained(tmp_path / "hf", dtype=dtype).eval()(ids, **inputs).prediction_logits[there]
        found = model.logits(model.hidden(ids, there, types))[0][there]
    rounding = distance(theirs, exact)
    # MegatronBert of transformers adds up attention without a kernel
    assert distance(found, exact) < 1.2 * rounding
    assert kind is not BertForPreTraining or distance(found, theirs) < 0.5 * rounding


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("family", ["llama3.1", "qwen3", "mistral", "gpt-neox", "gemma2"])
def test_greedy_text_in_16_bits_is_that_of_transformers(tmp_path, family, dtype):
    """Every token is transformers' likeliest, or as likely within the rounding of the type."""
    kind, config = FAMILIES[family]
    save(tmp_path / "hf", kind, config, dtype)
    vocab, merges = byte_level_tokenizer(tmp_path / "tokenizer")
    loaded = load_model(tmp_path / "hf", dtype=dtype, tokenizer={"vocab_file": vocab, "merge_file": merges})
    prompt = "the lazy dog jumps over the other dogs and"
    written = torch.tensor(generate(loaded, prompt, max_new_tokens=24, temperature=0)[0].tokens)
    assert len(written)
    with torch.no_grad():
        ids = torch.cat((torch.tensor(loaded.tokenizer.encode(prompt)), written))[None, :-1]
        logits = kind.from_pretrained(tmp_path / "hf", dtype=dtype).eval()(ids).logits[0, -len(written) :]
    best, chosen = logits.amax(-1), logits.gather(1, written[:, None])[:, 0]
    assert (best - chosen).max() <= 4 * torch.finfo(dtype).eps * logits.abs().max()
