"""Runs the fenced `bash` and `python` blocks of a page in order, as they are printed, in one folder.

Blocks in other languages (`sh`, `py`, `text`) show other tools and are not run.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS_OF_A_TEST = 12


def bash_blocks(page: Path) -> list[str]:
    return re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run_blocks(page: Path, folder: Path, **variables: str) -> None:
    """Runs all bash blocks in one shell, as in one terminal, with the programs of this environment. Training takes few steps."""
    script = re.sub(r"--train-iters \d+", f"--train-iters {STEPS_OF_A_TEST}", "\n".join(bash_blocks(page)))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    _run(["bash", "-euxo", "pipefail", "-c", script], folder, PATH=path, **variables)


def run_python_blocks(page: Path, folder: Path, before: str = "", **variables: str) -> str:
    """Runs all python blocks as one program; `before` defines what they use and do not define. Returns what it prints."""
    return _run([sys.executable, "-c", "\n".join([before, *python_blocks(page)])], folder, **variables)


def _run(command: list[str], folder: Path, **variables: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
