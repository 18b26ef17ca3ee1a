"""`holdfast init DIR`: a configuration and a Makefile for training on one's own text."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_result
from holdfast.system.errors import UsageError

CONFIG = """\
# What `make train` trains. Every key is also a flag: holdfast train model.toml --lr 1e-3. holdfast train --print-config
# lists all keys with their meaning.

[model]
num_layers = 4
hidden_size = 256
num_attention_heads = 8
openai_gelu = true

[data]
data_path = ["data_text_document"]
vocab_file = "tokenizer/vocab.json"
merge_file = "tokenizer/merges.txt"
seq_length = 256
split = "98,2,0"

[train]
save = "run"
train_iters = {steps}
micro_batch_size = 4
global_batch_size = 8
eval_interval = 100
eval_iters = 4
save_interval = 200

[optimizer]
lr = 0.001
min_lr = 0.0001
lr_warmup_fraction = 0.05
weight_decay = 0.1
adam_beta2 = 0.95

[parallel]
nproc_per_node = {ranks}
"""
MAKEFILE = """\
# make train      tokenizer, dataset, training; an interrupted run continues
# make report     report.html: curves, failures, resumes
# make generate   text from the newest state of the run, also while it trains (PROMPT="...")
# make evaluate   perplexity of the documents that training did not see
HOLDFAST ?= {holdfast}
INPUT := {inputs}
export PROMPT ?= The

.PHONY: train report generate evaluate
train: data_text_document.idx
	$(HOLDFAST) train model.toml

tokenizer/vocab.json:
	$(HOLDFAST) tokenizer train --input $(INPUT) --vocab-size {vocabulary} --output-dir tokenizer

data_text_document.idx: tokenizer/vocab.json
	$(HOLDFAST) preprocess --input $(INPUT) --output-prefix data --append-eod \\
		--vocab-file tokenizer/vocab.json --merge-file tokenizer/merges.txt

run:
	@echo 'there is no run yet; first: make train' >&2; exit 1

report: | run
	$(HOLDFAST) report run --output report.html

generate: | run
	$(HOLDFAST) generate run --prompt "$$PROMPT"

evaluate: | run
	$(HOLDFAST) evaluate run --data-path data_text_document --split 98,2,0 --part valid
"""


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Write a configuration and a Makefile that train a small model on your own text.

    Examples:

      holdfast init my-model --input corpus.jsonl
      make -C my-model train generate PROMPT="Once upon a time"
    """

    folder: str = field(metadata=positional())
    """Folder to write model.toml and Makefile into; created if it is missing."""
    input: tuple[str, ...]
    """Text files in any format that preprocess reads."""
    vocab_size: int = 8192
    """Number of tokens of the tokenizer that is trained on the text."""
    train_iters: int = 1000
    """Training steps."""
    nproc_per_node: int = 1
    """Ranks on this machine."""
    json: bool = False
    """Print the paths that were written as JSON."""


def make_word(path: str) -> str:
    """The path as one word of a recipe's command, through a variable of make: quoted for the shell, then for make."""
    if any(letter in path for letter in "\\\n\r"):
        raise UsageError(f"{path!r}: a Makefile cannot name a path with a backslash or a line break; rename it")
    return shlex.quote(path).replace("$", "$$").replace("#", "\\#")


def init(options: InitOptions) -> None:
    import sys

    from holdfast.system.atomic_files import publish_text
    from holdfast.system.progress import log

    for flag in ("vocab_size", "train_iters", "nproc_per_node"):
        if getattr(options, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(options, flag)}: give at least 1")
    folder = Path(options.folder)
    inputs = []
    for name in options.input:
        if not Path(name).exists():
            raise UsageError(f"--input {name}: there is no such file")
        inputs.append(str(Path(name).resolve()))
    texts = {
        "model.toml": CONFIG.format(steps=options.train_iters, ranks=options.nproc_per_node),
        "Makefile": MAKEFILE.format(
            holdfast=f"{make_word(sys.executable)} -m holdfast",
            inputs=" ".join(map(make_word, inputs)),
            vocabulary=options.vocab_size,
        ),
    }
    for name in texts:
        if (folder / name).exists():
            raise UsageError(f"{folder / name} exists; choose another folder")
    for name, text in texts.items():
        publish_text(folder / name, text)
    log(f"wrote {folder / 'model.toml'} and {folder / 'Makefile'}; next:")
    log(f"  make -C {shlex.quote(str(folder))} train generate report")
    written = [str(folder / name) for name in texts]
    print_result({"written": written}, "\n".join(written), options.json)
