"""The documented examples, run as a user would run them: killed and resumed they end as if nothing had happened."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.system.journal import read_journal
from tests.snapshot.harness import nothing_left, wait_for

pytestmark = pytest.mark.distributed
EXAMPLES = Path(__file__).parents[2] / "examples"


def start(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *map(str, command)], stdout=subprocess.PIPE, text=True, env=environment)


def ending(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return re.search(r"ended at step .*", output).group(0)


@pytest.mark.slow
def test_the_nanogpt_script_killed_ends_as_the_undisturbed_one(tmp_path, memory):
    script = [
        EXAMPLES / "nanogpt_snapshots.py",
        "--text",
        Path(__file__),
        "--steps",
        "40",
        "--width",
        "32",
        "--memory",
        memory,
    ]
    undisturbed = ending(start(*script, "--folder", tmp_path / "a"))
    process = start(*script, "--folder", tmp_path / "b")
    first = process.stdout.readline()
    assert first.startswith("step 10")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert ending(start(*script, "--folder", tmp_path / "b")) == undisturbed
    (resumed,) = [event for event in read_journal(tmp_path / "b" / "events.jsonl") if event["event"] == "resumed"]
    assert resumed["source"] == "memory" and resumed["steps_lost"] <= 1
    wait_for(lambda: nothing_left(memory), "the memory to be freed")


@pytest.mark.slow
def test_the_hugging_face_callback_resumes_a_trainer(tmp_path, memory):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    script = [EXAMPLES / "huggingface_snapshots.py", "--memory", memory]
    undisturbed = ending(start(*script, "--folder", tmp_path / "a"))
    killed = start(*script, "--folder", tmp_path / "b", "--die-at", "12")
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert ending(start(*script, "--folder", tmp_path / "b")) == undisturbed
    assert "resumed" in {event["event"] for event in read_journal(tmp_path / "b" / "events.jsonl")}
