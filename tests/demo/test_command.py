"""The demo, as `make demo` runs it, with fewer steps: every stage runs and is checked."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.cli import VERBS, load
from holdfast.command_line.flags import options_of, parse
from holdfast.demo.folder import MARKER, WRITTEN
from holdfast.system.journal import read_journal

CODE = """
import sys
from dataclasses import replace
from pathlib import Path
from holdfast.demo import stages
small = {**stages.FULL.training, "num-layers": 2, "hidden-size": 64, "micro-batch-size": 2, "global-batch-size": 4}
stages.FULL = replace(stages.FULL, steps=90, kill_at=6, evaluate_every=30, training=small)
from holdfast.demo import command
command.demo_command(command.DemoOptions(workdir=Path(sys.argv[1]), json=True, open=True))
"""


def test_the_demo_kills_a_rank_resumes_from_memory_and_generates(tmp_path):
    work = tmp_path / "demo"
    environment = {
        key: value for key, value in os.environ.items() if key not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(work)], capture_output=True, text=True, timeout=550,
        env={**environment, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in (
        "1 to 3 minutes", "killed rank process", "resumed from memory", "bit-identical", "validation loss", "Try next",
        "found no desktop browser",
    ):  # fmt: skip
        assert text in done.stderr, done.stderr
    result = json.loads(done.stdout)
    assert result["text"].startswith("def main(") and result["resumed"]["source"] == "memory"
    assert result["resumed"]["seconds_since_failure"] > 0
    assert {path.name for path in work.iterdir()} <= {MARKER, *WRITTEN}
    page = Path(result["page"]).read_text()
    assert "killed by SIGKILL" in page and "<b>def main(</b>" in page
    commands = re.findall(r"^  holdfast (.*)$", done.stderr, re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["generate", "train", "init"]
    for command in commands[1:]:
        verb, *arguments = shlex.split(command)
        parse(options_of(load(VERBS[verb][0])), f"holdfast {verb}", arguments)
    generate = [sys.executable, "-m", "holdfast", *shlex.split(commands[0]), "--max-new-tokens", "2"]
    assert subprocess.run(generate, capture_output=True, text=True, timeout=300).stdout.startswith("import os")
    losses = [
        record["validation_loss"]
        for record in read_journal(work / "undisturbed" / "metrics.jsonl")
        if "validation_loss" in record
    ]
    # Knowing nothing is ln 4,096 = 8.32. The text is the library of this Python: each version has its own losses.
    assert losses[-1] < min(7.5, losses[0]), losses
    folder = work / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder)) == 4096


def test_ctrl_c_leaves_no_files_of_a_demo_that_keeps_none(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli", "demo", "--fast", "--no-keep"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        while not (line := process.stderr.readline()).startswith("1. Text"):
            assert line, "the demo has ended"
        assert any(tmp_path.glob("holdfast-demo-*/corpus.jsonl"))
        process.send_signal(signal.SIGINT)
        assert "interrupted" in process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 130 and not any(tmp_path.glob("holdfast-demo-*"))
