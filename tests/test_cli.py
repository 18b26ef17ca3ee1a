"""The program: help, exit codes, wrong words, and a start that costs next to nothing."""

import os
import subprocess
import sys

import pytest

from holdfast.cli import VERBS


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


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example(verb):
    done = holdfast(*verb.split(), "--help", env={**os.environ, "COLUMNS": "200", "NO_COLOR": "1"})
    assert done.returncode == 0, done.stderr
    assert f"holdfast {verb}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "perhaps you meant: train"),
        (["tokenizer"], "tokenizer train"),
        (["train", "--num-layer", "4"], "--num-layers"),
        (["train", "--num-layers", "four"], "four"),
        (["train", "missing.toml"], "missing.toml: no such configuration file"),
        (["generate"], "model"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_was_meant(arguments, said):
    done = holdfast(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said.lower() in (done.stdout + done.stderr).lower()
    assert "Traceback" not in done.stderr


def test_print_config_is_complete_and_reloads(tmp_path):
    done = holdfast("train", "--print-config", "--num-layers", "7", "--data-path", "0.3", "a", "0.7", "b", "--bf16")
    assert done.returncode == 0, done.stderr
    file = tmp_path / "printed.toml"
    file.write_text(done.stdout)
    assert "# Transformer layers." in done.stdout and "num_layers = 7" in done.stdout
    assert holdfast("train", str(file), "--print-config").stdout == done.stdout


def test_a_command_line_is_read_without_anything_heavy():
    program = """
import sys
from holdfast.cli import run
from holdfast.errors import UsageError
try:
    run(["preprocess", "--input", "a", "b", "--output-prefix", "c", "--workers", "2"])
except UsageError as error:
    print(error)
print(sorted({"typeguard", "numpy", "torch", "rich"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "GPT2BPETokenizer needs --vocab-file\n[]\n", done.stderr
