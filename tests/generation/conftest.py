"""Tiny models with random weights and a tokenizer, as a run and as the Hugging Face folder that `convert` makes of it."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast import convert
from tests.conversion.holdfast_runs import GPT2_TINY, LLAMA_TINY, build_gpt, write_run
from tests.conversion.test_holdfast_checkpoint import byte_level_tokenizer


@dataclass(frozen=True)
class Saved:
    run: Path
    huggingface: Path


@pytest.fixture(scope="session", params=["gpt2", "llama"])
def saved(request, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), {"gpt2": GPT2_TINY, "llama": LLAMA_TINY}[request.param])


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("gpt2"), GPT2_TINY)


def write_model(folder, model):
    vocab, merges = byte_level_tokenizer(folder / "tokenizer")
    run = write_run(folder / "run", model, build_gpt(model), vocab_file=vocab, merge_file=merges)
    return Saved(run, convert(run, folder / "hf"))


def write_bert(folder, kind):
    """A Hugging Face folder with a random BERT model and its tokenizer, written by transformers."""
    import torch
    from transformers import (
        BertConfig,
        BertForPreTraining,
        BertTokenizerFast,
        MegatronBertConfig,
        MegatronBertForPreTraining,
    )

    words = "the quick brown fox jump ##s over lazy dog a and capital of france is . paris rome".split()
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words, *"abcdefghijklmnopqrstuvwxyz"[1:]]
    tokens += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz" if f"##{letter}" not in tokens]
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    BertTokenizerFast(vocab=str(folder / "vocab.txt"), do_lower_case=True).save_pretrained(folder)
    torch.manual_seed(3)
    config, build = {
        "bert": (BertConfig, BertForPreTraining),
        "megatron-bert": (MegatronBertConfig, MegatronBertForPreTraining),
    }[kind]
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
    model = build(config(vocab_size=len(tokens), max_position_embeddings=32, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    return folder
