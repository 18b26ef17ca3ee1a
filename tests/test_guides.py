"""Every `bash` block of the guides and of the tutorial runs as it is printed, on small inputs.

Published files are small ones in the fetch cache under the names of the originals. A large configuration is a small file of the
same name in the working folder, which takes precedence.
"""

import bz2
import json
import lzma
import shutil
import zipfile
from collections.abc import Callable
from html import escape
from pathlib import Path

import pytest

from holdfast.tokenizers.training import train_tokenizer
from tests.cached_files import put_into_cache
from tests.conversion.megatron_files import Spec, make_truth, write_megatron
from tests.fenced_blocks import ROOT, bash_blocks, run_blocks

GUIDES = ROOT / "docs" / "guides"
SMALL = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32, "max_position_embeddings": 128}
LARGE_KEYS = ("ffn_hidden_size", "num_query_groups", "bf16", "fp16", "use_rope_scaling", "rope_scaling_factor")


def texts() -> list[str]:
    """English paragraphs: the documentation of this repository."""
    pages = [page.read_text() for page in sorted((ROOT / "docs").glob("*.md"))]
    return [part for page in pages for part in page.split("\n\n") if len(part) > 200 and "```" not in part]


def put_gpt2_files(folder: Path, cache: Path) -> int:
    """A small byte-level BPE in place of GPT-2's files; returns its number of tokens."""
    vocab, merges = train_tokenizer(texts(), folder / "bpe", 400)
    put_into_cache(cache, "gpt2", {"vocab": vocab.read_bytes(), "merges": merges.read_bytes()})
    return len(json.loads(vocab.read_bytes()))


def jsonl() -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts())


def shrink_config(folder: Path, name: str, **changes: object) -> None:
    """A configuration of Holdfast with few small layers and steps, in the working folder under its own name."""
    changes = (
        SMALL
        | {"train_iters": 4, "micro_batch_size": 2, "global_batch_size": 4, "nproc_per_node": 1, "lr_warmup_iters": 1}
        | changes
    )
    lines = []
    for line in (ROOT / "configs" / f"{name}.toml").read_text().splitlines():
        key = line.split(" = ")[0]
        if key in changes:
            line = f"{key} = {changes[key]}"
        if key not in LARGE_KEYS:
            lines.append(line)
    (folder / f"{name}.toml").write_text("\n".join(lines) + "\n")


def prepare_nemo(folder: Path, cache: Path) -> None:
    put_gpt2_files(folder, cache)


def prepare_transformers(folder: Path, cache: Path) -> None:
    spec = Spec(vocab=put_gpt2_files(folder, cache), positions=64)
    run = write_megatron(folder / "megatron", spec, make_truth(spec, spec.padded(1)), version=0, names="v1")
    with zipfile.ZipFile(folder / "release.zip", "w") as release:
        release.write(run / "iter_0000100/mp_rank_00/model_optim_rng.pt", "release/mp_rank_00/model_optim_rng.pt")
    put_into_cache(cache, "megatron-gpt2-345m", {"checkpoint": (folder / "release.zip").read_bytes()})


def prepare_slurm(folder: Path, cache: Path) -> None:
    put_gpt2_files(folder, folder / "fsx" / "cache")
    put_into_cache(folder / "fsx" / "cache", "oscar-1gb", {"text": lzma.compress(jsonl())})
    (folder / "apps").mkdir()


def prepare_bert(folder: Path, cache: Path) -> None:
    (vocab,) = train_tokenizer(texts(), folder / "wordpiece", 400, "wordpiece")
    put_into_cache(cache, "bert-large-uncased", {"vocab": vocab.read_bytes()})
    pages = [
        f"<page><title>{number}</title><ns>0</ns><id>{number}</id><revision><id>1</id><model>wikitext</model>"
        f"<format>text/x-wiki</format><text>{escape(text)}</text></revision></page>"
        for number, text in enumerate(texts(), 1)
    ]
    header = "<mediawiki><siteinfo><sitename>Test</sitename></siteinfo>"
    dump = b"".join(bz2.compress(part.encode()) for part in (header, "".join(pages), "</mediawiki>"))
    put_into_cache(cache, "enwiki", {"text": dump})
    shrink_config(folder, "bert_large_phase1", train_iters=150)
    shrink_config(folder, "bert_large_phase2")


def prepare_nanogpt(folder: Path, cache: Path) -> None:
    (folder / "input.txt").write_text("\n\n".join(texts()))
    shutil.copy(ROOT / "examples" / "nanogpt_snapshots.py", folder)


def prepare_torchtitan(folder: Path, cache: Path) -> None:
    from tokenizers import ByteLevelBPETokenizer

    vocab, merges = train_tokenizer(texts(), folder / "bpe", 400)
    tokenizer = ByteLevelBPETokenizer(str(vocab), str(merges))
    url = "hf://meta-llama/Llama-3.1-8B/tokenizer.json"
    put_into_cache(cache, url, {"file": tokenizer.to_str().encode()})
    (folder / "corpus.jsonl").write_bytes(jsonl())
    shrink_config(folder, "llama3_8b", global_batch_size=32)


PREPARE: dict[str, Callable[[Path, Path], None]] = {
    "nemo-tokenizer": prepare_nemo,
    "megatron-to-transformers": prepare_transformers,
    "megatron-slurm": prepare_slurm,
    "nvidia-bert": prepare_bert,
    "nanogpt": prepare_nanogpt,
    "torchtitan": prepare_torchtitan,
}
FAST = ("nemo-tokenizer",)


def guide_cases() -> list[object]:
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PREPARE]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", guide_cases())
def test_the_blocks_of_a_guide_run(name, tmp_path):
    cache = tmp_path / "cache"
    PREPARE[name](tmp_path, cache)
    variables = {
        "HOLDFAST_CACHE": str(cache),
        "DATA_PATH": str(tmp_path / "fsx"),
        "APPS_PATH": str(tmp_path / "apps"),
        "GPUS": "2",
    }
    run_blocks(GUIDES / f"{name}.md", tmp_path, **variables)


@pytest.mark.slow
def test_the_commands_of_the_tutorial_run(tmp_path):
    (tmp_path / "corpus.jsonl").write_bytes(jsonl())
    run_blocks(ROOT / "docs" / "tutorial.md", tmp_path)
    assert (tmp_path / "first.html").is_file() and (tmp_path / "first-hf" / "model.safetensors").is_file()


def test_every_guide_is_tested_and_shows_both_tools_side_by_side():
    assert {page.stem for page in GUIDES.glob("*.md")} == {*PREPARE}
    for page in GUIDES.glob("*.md"):
        text = page.read_text()
        pairs = text.count('<div class="grid" markdown>')
        assert pairs >= 2 and text.count("</div>") == pairs, page
        assert len(bash_blocks(page)) >= pairs, page
