"""Run every command of the README in order, as it is printed there, on a small text."""

import os
import re
import subprocess
import sys
from pathlib import Path

import orjson

ROOT = Path(__file__).parents[1]


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line.split(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def test_the_readmes_commands_run(tmp_path):
    sources = sorted((ROOT / "src").rglob("*.py"))
    lines = [orjson.dumps({"text": source.read_text()}) for source in sources]
    (tmp_path / "corpus.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    verbs = set()
    for command in commands():
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        verbs.add(command.split()[1])
    assert verbs >= {"fetch", "tokenizer", "preprocess", "inspect", "train", "convert", "generate"}
    assert (tmp_path / "first-megatron" / "latest_checkpointed_iteration.txt").exists()


def test_the_readmes_snapshot_loop_leaves_its_last_step_on_disk(tmp_path):
    (loop,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    setup = (
        "import torch\n"
        "steps, model = 3, torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "def batch(step): return torch.full((2, 4), float(step))\n"
        "def loss(inputs): return model(inputs).square().mean()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", setup + loop], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    from holdfast.checkpoint import open_checkpoint

    with open_checkpoint(tmp_path / "runs" / "my-run") as checkpoint:
        assert checkpoint.step == 3
