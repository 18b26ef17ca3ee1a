"""Starts and ends the process that follows metrics.jsonl. Runs in rank 0."""

import importlib.util
import subprocess
import sys
from pathlib import Path

from holdfast.config import LogConfig
from holdfast.system.errors import UsageError
from holdfast.system.progress import log

# The flag of each tracker, the module that it needs, and the extra that installs it.
MODULES = {"wandb_project": "wandb", "mlflow_experiment": "mlflow", "trackio_project": "trackio"}
LOG_FILE = "trackers.log"
END_SECONDS = 90.0
"""The follower limits its own end to less."""


def wants_trackers(config: LogConfig) -> bool:
    return config.metrics_port is not None or any(getattr(config, key) for key in MODULES)


def check_trackers(config: LogConfig, save: str | None) -> None:
    """Refuses trackers whose library is missing, and trackers without a run folder to follow."""
    for key, module in MODULES.items():
        if getattr(config, key) and importlib.util.find_spec(module) is None:
            raise UsageError(f"--{key.replace('_', '-')} needs {module}: pip install 'holdfast[{module}]'")
    if wants_trackers(config) and not save:
        raise UsageError("trackers and --metrics-port follow metrics.jsonl in the run folder: give --save DIR")


def start_trackers(run: Path) -> "TrackerProcess | None":
    """The follower of the run; None, with a warning, where it cannot start: a full disk must not end the training."""
    try:
        return TrackerProcess(run)
    except OSError as error:
        log(
            f"warning: the trackers cannot start: {error}; metrics.jsonl keeps the metrics for the next start of the run"
        )
        return None


class TrackerProcess:
    """The follower of one start of rank 0. It ends by itself when rank 0 ends, by the end of its standard input."""

    def __init__(self, run: Path) -> None:
        (run / "logs").mkdir(exist_ok=True)
        self._log = run / "logs" / LOG_FILE
        with open(self._log, "ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "holdfast.train.trackers.follower", str(run)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C ends the ranks; the follower then sends what is left
            )

    def close(self) -> None:
        """Waits until everything is sent, with a limit."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = -1
        if code:
            log(f"warning: the trackers did not get everything (see {self._log}); the next start sends what is missing")
