"""Every `bash` and `python` block of the reference pages runs as it is printed, on a small text, tokenizer and model.

The blocks of data.md are run by tests/data/test_data_page.py, those of clusters.md by tests/launch/test_clusters_page.py.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import convert, preprocess
from holdfast.assets.catalog import file_specs
from holdfast.tokenizers.training import train_tokenizer
from tests.cached_files import put_into_cache
from tests.fenced_blocks import ROOT, bash_blocks, python_blocks, run_blocks, run_python_blocks
from tests.test_guides import jsonl, prepare_bert, shrink_config, texts

DOCS = ROOT / "docs"
PAGES = ("checkpoints", "configuration", "convert", "evaluate", "generate", "preprocess", "report", "snapshots")
LOOP = """
import torch
steps, model = 3, torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
def forward_backward(_):
    model(torch.ones(2, 4)).square().mean().backward()
"""
BEFORE = {
    "checkpoints": "import torch\nmodel = torch.nn.Module()\n"
    "model.add_module('embedding', torch.nn.ModuleDict({'word_embeddings': torch.nn.Embedding(1000, 4)}))\n"
    "optimizer = torch.optim.AdamW(model.parameters())\n",
    "snapshots": LOOP,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with what the pages name: texts, tokenizers, datasets, two runs and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("corpus.jsonl", "heldout.jsonl"):
        (folder / name).write_bytes(jsonl())
    vocab, merges = train_tokenizer(texts(), folder / "bpe", 400)
    (pieces,) = train_tokenizer(texts(), folder / "wordpiece", 400, "wordpiece")
    for path, name in ((vocab, "vocab.json"), (merges, "merges.txt"), (pieces, "vocab.txt")):
        shutil.copy(path, folder / name)
    (folder / "parts").mkdir()
    for prefix in ("corpus", "parts/one", "parts/two"):
        preprocess(folder / "corpus.jsonl", folder / prefix, vocab_file=vocab, merge_file=merges, append_eod=True)
    shrink_config(folder, "gpt_tiny")
    run_blocks(DOCS / "training.md", folder)
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "second")
    convert(folder / "runs" / "first", folder / "first-hf", to="hf")
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name, folder):
    page = DOCS / f"{name}.md"
    assert bash_blocks(page) or python_blocks(page)
    run_blocks(page, folder)
    run_python_blocks(page, folder, BEFORE.get(name, ""))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_blocks_of_the_bert_page_run(tmp_path):
    cache = tmp_path / "cache"
    prepare_bert(tmp_path, cache)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "reviews.tsv").write_text("1\tgood and short\n0\tbad and long\n" * 8)
    run_blocks(DOCS / "bert.md", tmp_path, HOLDFAST_CACHE=str(cache))
    assert (tmp_path / "classifier" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_client_of_the_serve_page_gets_a_text(folder, tmp_path):
    page = tmp_path / "serve.md"
    command = [sys.executable, "-m", "holdfast", "serve", "runs/first", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = server.stdout.readline().strip()
            page.write_text((DOCS / "serve.md").read_text().replace("http://127.0.0.1:8000", address))
            assert page.read_text().count(f"{address}/v1") == 1
            assert run_python_blocks(page, folder)
        finally:
            server.terminate()
    assert server.returncode == 0


@pytest.mark.slow
def test_the_blocks_of_the_fetch_page_run(folder, tmp_path):
    """The files are in the cache, so that no network is needed."""
    cache = tmp_path / "cache"
    put_into_cache(cache, "gpt2", {"vocab": b"{}", "merges": b""})
    for url in ("https://example.org/corpus.jsonl.xz", "https://example.org/vocab.txt"):
        put_into_cache(cache, url, dict.fromkeys(file_specs(url), b"text"))
    run_python_blocks(DOCS / "fetch.md", folder, HOLDFAST_CACHE=str(cache))


def test_the_dialogue_of_the_configuration_page_is_what_the_program_prints():
    dialogue = re.findall(r"^    \$ holdfast (.*)\n    (.*)$", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    assert len(dialogue) == 2
    for command, answer in dialogue:
        call = [sys.executable, "-m", "holdfast", *command.split()]
        done = subprocess.run(call, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (2, f"{answer}\n")


def test_every_page_with_blocks_is_run():
    with_blocks = {page.stem for page in DOCS.glob("*.md") if bash_blocks(page) or python_blocks(page)}
    assert with_blocks == {*PAGES, "bert", "clusters", "data", "fetch", "serve", "training", "tutorial"}
