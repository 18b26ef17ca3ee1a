"""What a person sees of a command on a terminal: tmux keeps the screen."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

needs_tmux = pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux")


class TmuxScreen:
    """A command in a tmux window."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._socket = folder / "tmux"
        environment = {"HISTCONTROL": "", **os.environ, "TERM": "screen-256color", "LC_ALL": "C.UTF-8"}
        for name in ("SLURM_JOB_ID", "COLUMNS", "LINES"):  # xdist states a size, which is not that of the window
            environment.pop(name, None)
        self._environment = environment
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", *arguments)

    def tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", str(self._socket), *arguments],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def lines(self) -> list[str]:
        """The visible lines, without empty ones at the end."""
        return self.tmux("capture-pane", "-p").rstrip().splitlines()

    @property
    def history(self) -> list[str]:
        return self.tmux("capture-pane", "-p", "-S", "-").rstrip().splitlines()

    def close(self) -> None:
        self.tmux("kill-server")
