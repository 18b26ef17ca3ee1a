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
