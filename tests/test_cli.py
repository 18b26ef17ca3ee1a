"""The program: help, exit codes, wrong words, and a start that costs next to nothing."""

import contextlib
import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli import HEADINGS, VERBS, load, run
from holdfast.command_line.flags import flags_of, options_of, parse
from holdfast.system.errors import UsageError


def holdfast(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments], capture_output=True, text=True, timeout=120, **options
    )


def test_help_lists_every_verb_and_imports_no_torch():
    code = "import sys; from holdfast.cli import run; run(['--help']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for verb in VERBS:
        assert verb in done.stdout


def test_the_package_is_the_program_too():
    done = subprocess.run([sys.executable, "-m", "holdfast", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, holdfast("--version").stdout), done.stderr


@pytest.mark.parametrize(("columns", "widest"), [(20, 60), (80, 80), (200, 100)])
def test_the_list_of_verbs_and_the_help_of_a_verb_fit_the_terminal(columns, widest, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    run(["--help"])
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if line.startswith("  ") or columns >= 80) <= widest
    assert set(HEADINGS) <= set(VERBS) and all(f"\n{heading}:\n" in shown for heading in HEADINGS.values())
    with contextlib.suppress(SystemExit):
        run(["init", "--help"])
    flags = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" " * 10)]
    assert flags and max(map(len, flags)) <= widest


NO_JSON = {"launch dask"}
"""It prints what `preprocess --json` prints on the cluster."""

EVERY_HELP = """
import contextlib, io, json, sys
from holdfast.cli import VERBS, run
shown = {}
for verb in VERBS:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run([*verb.split(), "--help"])
    shown[verb] = out.getvalue()
print(json.dumps({"shown": shown, "loaded": sorted({"torch", "transformers", "rich"} & set(sys.modules))}))
"""


def test_every_verb_explains_itself_with_examples_in_80_columns_and_without_torch():
    done = subprocess.run(
        [sys.executable, "-c", EVERY_HELP],
        env={**os.environ, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = json.loads(done.stdout)
    assert found["loaded"] == []
    for verb, text in found["shown"].items():
        lines = text.splitlines()
        assert lines[0].startswith(f"usage: holdfast {verb}"), text
        assert re.search(rf"^  (.*)?holdfast {verb}", text, re.M), f"{verb} has no example"
        assert max(map(len, lines)) <= 100 and "None" not in text
        assert ("  --json " in text) == (verb not in NO_JSON)
        prose = [line for line in lines if not re.match(r"  +(--)?\S|usage", line)]
        assert all(len(line) <= 80 for line in prose)


def examples(verb: str) -> list[list[str]]:
    """The command lines in the help of a verb that call this verb, without the shell's part of them."""
    doc = inspect.getdoc(options_of(load(VERBS[verb][0]))) or ""
    lines = [line for line in doc.replace("\\\n", " ").splitlines() if line.startswith("  ")]
    calls = [
        shlex.split(line.split(f"holdfast {verb}", 1)[1], comments=True) for line in lines if f"holdfast {verb}" in line
    ]
    return [list(itertools.takewhile(lambda word: word not in (">", "|"), call)) for call in calls]


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_of_the_help_are_command_lines_that_parse(verb, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first/config.toml", "my.toml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).touch()
    found = examples(verb)
    assert found
    for arguments in found:
        options = parse(options_of(load(VERBS[verb][0])), f"holdfast {verb}", [w.rstrip(")") for w in arguments])
        if command := getattr(options, "command", ()):
            inner = options_of(load(VERBS[command[0]][0]))
            parse(inner, f"holdfast {command[0]}", command[1:])


@pytest.mark.parametrize("verb", VERBS)
def test_a_wrong_flag_is_refused_with_the_nearest_one(verb):
    options = [flag.option for flag in flags_of(options_of(load(VERBS[verb][0]))) if flag.named]
    inner = {"launch slurm": ["train"], "launch kubernetes": ["train", "--image", "x"]}.get(verb, [])
    if verb == "launch dask":
        inner = ["preprocess", "--scheduler", "tcp://localhost:1"]
    right = options[0] if options else ""
    wrong = f"{right}x" if right else "--flag"
    with pytest.raises(UsageError) as caught:
        run([*verb.split(), *inner, wrong])
    assert f"has no flag {wrong}" in str(caught.value) and "\n" not in str(caught.value)
    assert right in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        (["help"], ["usage: holdfast VERB ..."]),
        (["help", "train"], ["usage: holdfast train [CONFIG] [flags]"]),
        (["help", "tokenizer"], ["usage: holdfast tokenizer VERB ...", "tokenizer train"]),
        (["launch", "--help"], ["usage: holdfast launch VERB ...", "launch slurm", "launch resume"]),
        (["tokenizer", "-h"], ["tokenizer train"]),
        (["bench", "--help"], ["bench fetch", "bench generate"]),
        (["version"], ["holdfast 0"]),
        (["--version"], ["holdfast 0"]),
    ],
)
def test_help_and_version_work_as_words_and_as_flags(arguments, lines, capsys):
    with contextlib.suppress(SystemExit):
        run(arguments)
    shown = capsys.readouterr().out
    for line in lines:
        assert line in shown


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["trian"], "perhaps you meant: train"),
        (["tokenizer"], "'tokenizer' needs a second word; choose one of: tokenizer train"),
        (["launch", "slrum"], "there is no verb 'launch slrum'; choose one of: launch slurm"),
        (["train", "--num-layers=four"], "--num-layers four: expected an integer"),
        (["merge", "--input", "a"], "holdfast merge needs --output-prefix"),
        (["convert", "a"], "holdfast convert needs DST"),
        (["launch", "slurm", "train", "--gpu-per-node", "8"], "perhaps you meant --gpus-per-node"),
        (["launch", "slurm", "train", "--num-layer", "8"], "perhaps you meant --num-layers"),
        (["train", "--block_size", "64"], "has no flag --block_size; here it is --seq-length ("),
        (["launch", "slurm", "train", "--max-steps=9"], "; here it is --train-iters ("),
        (["train", "--dtype", "bfloat16"], "; here it is --bf16 (a switch, as fp16 is; neither means fp32) ("),
        (["train", "--trainer.max_steps", "9"], "; here it is --train-iters ("),
        (["train", "--use-flash-attn"], "; leave it out: what it switches on is chosen or done in any case ("),
        (["train", "--num-experts", "8"], "; there is no mixture of experts here ("),
        (["preprocess", "--batch-size", "8"], "holdfast preprocess has no flag --batch-size ("),
        (["train"], "holdfast init my-model --input corpus.jsonl"),
        (["train", "--num-layer", "4"], "--num-layers"),
        (["train", "--num-layers", "four"], "four"),
        (["train", "missing.toml"], "missing.toml: no such configuration file"),
        (["generate"], "model"),
    ],
)
def test_wrong_usage_exits_with_2_and_names_what_was_meant(arguments, output):
    done = holdfast(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert output.lower() in (done.stdout + done.stderr).lower()
    assert "Traceback" not in done.stderr


def test_print_config_is_complete_and_reloads(tmp_path):
    done = holdfast("train", "--print-config", "--num-layers", "7", "--data-path", "0.3", "a", "0.7", "b", "--bf16")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "printed.toml"
    file.write_text(done.stdout)
    assert "# Number of transformer layers." in done.stdout and "num_layers = 7" in done.stdout
    assert holdfast("train", str(file), "--print-config").stdout == done.stdout


def test_a_command_line_is_read_without_anything_heavy():
    program = """
import sys
from holdfast.cli import run
from holdfast.system.errors import UsageError
try:
    run(["preprocess", "--input", "a", "b", "--output-prefix", "c", "--workers", "2"])
except UsageError as error:
    print(error)
print(sorted({"typeguard", "numpy", "torch", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "GPT2BPETokenizer needs --vocab-file\n[]\n", done.stderr
