"""The demo, as `make demo` runs it, with fewer steps: every stage runs and is checked."""

import json
import os
import subprocess
import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from holdfast.demo.folder import MARKER, WRITTEN
from holdfast.system.journal import read_journal

CODE = """
import sys
from holdfast.demo import stages
stages.STEPS, stages.KILL_AT = 24, 12
stages.TRAINING.update({"train-iters": 24, "eval-interval": 8, "num-layers": 2, "hidden-size": 64, "micro-batch-size": 2,
                      "global-batch-size": 4})
from holdfast.demo import command
command.demo_command(command.DemoOptions(workdir=__import__("pathlib").Path(sys.argv[1]), json=True))
"""


def test_the_demo_kills_a_rank_resumes_from_memory_and_generates(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path / "demo")], capture_output=True, text=True, timeout=550,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for text in ("killed rank process", "resumed from memory", "bit-identical", "validation loss", "what to try next"):
        assert text in done.stderr, done.stderr
    result = json.loads(done.stdout)
    assert result["text"].startswith("def main(") and result["resumed"]["source"] == "memory"
    assert {path.name for path in (tmp_path / "demo").iterdir()} <= {MARKER, *WRITTEN}
    losses = [
        record["validation_loss"]
        for record in read_journal(tmp_path / "demo" / "undisturbed" / "metrics.jsonl")
        if "validation_loss" in record
    ]
    # knowing nothing is ln 4,096 = 8.32
    assert losses[-1] < 7.5 and losses == sorted(losses, reverse=True), losses
    folder = Path(tmp_path / "demo" / "huggingface")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(folder)) == 4096
