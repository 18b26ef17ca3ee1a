"""Starting a run as a user does: who owns the folder, what is shown, and what Ctrl-C leaves."""

import os
import pty
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint.folder import checkpoints_in
from holdfast.config import read_config
from holdfast.system.errors import HoldfastError
from holdfast.system.journal import read_journal
from holdfast.train.checks.preflight import resolve
from holdfast.train.command import parse
from holdfast.train.run_folder.opening import open_run_folder
from tests.corpus import VOCABULARY, write_dataset
from tests.disks import small_disk

pytestmark = pytest.mark.distributed

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --eval-interval 0 --num-workers 0 "
    f"--no-tensorboard --vocab-size {VOCABULARY}"
).split()
WAIT_SECONDS = 180.0


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "corpus", documents=30)


def command(prefix: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "holdfast.cli", "train", *TINY, "--data-path", str(prefix), *flags]


def wait_for(condition: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.02)


@contextmanager
def training(prefix: Path, save: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run that trains until it is stopped."""
    process = subprocess.Popen(
        command(prefix, "--save", str(save), "--train-iters", "1000000", *flags), stderr=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: any(read_journal(save / "metrics.jsonl")), process)
        yield process
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


class Terminal:
    """A command on a pseudo terminal, and what it shows."""

    def __init__(self, arguments: list[str]) -> None:
        reader, writer = pty.openpty()
        self.process = subprocess.Popen(arguments, stdin=writer, stdout=writer, stderr=writer)
        os.close(writer)
        self._shown = bytearray()
        self._thread = threading.Thread(target=self._read, args=(reader,))
        self._thread.start()

    def _read(self, reader: int) -> None:
        with open(reader, "rb", buffering=0) as stream:
            try:
                while content := stream.read(1 << 16):
                    self._shown += content
            except OSError:  # EIO: the last process has closed the terminal
                pass

    @property
    def lines(self) -> list[str]:
        return self._shown.decode().replace("\r\n", "\n").splitlines()

    def end(self) -> int:
        code = self.process.wait(WAIT_SECONDS)
        self._thread.join(WAIT_SECONDS)
        return code


def test_a_second_start_into_a_live_run_changes_nothing_and_names_the_command_that_stops_it(prefix, tmp_path):
    save = tmp_path / "run"
    with training(prefix, save) as first:
        before = (save / "config.toml").read_bytes()
        second = subprocess.run(
            command(prefix, "--save", str(save), "--train-iters", "2"),
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
        )
        assert second.returncode == 1
        lines = second.stderr.strip().splitlines()
        assert lines[0].startswith("starting 1 rank") and len(lines) == 2, lines
        assert f"process {first.pid}" in lines[1] and f"holdfast persist {save} --stop" in lines[1]
        assert (save / "config.toml").read_bytes() == before
        stop = [sys.executable, "-m", "holdfast.cli", "persist", str(save), "--stop"]
        subprocess.run(stop, check=True, capture_output=True, timeout=WAIT_SECONDS)
        assert first.wait(WAIT_SECONDS) == 0


def test_ranks_that_outlived_their_supervisor_keep_the_run_folder(prefix, tmp_path):
    save = tmp_path / "run"
    with training(prefix, save) as first:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
        before = (save / "config.toml").read_bytes()
        config, _ = resolve(
            parse(command(prefix, "--save", str(save), "--train-iters", "2")[4:]).config, vocab_size_given=True
        )
        with (
            pytest.raises(HoldfastError, match=f"still writes to it.* holdfast persist {save} --stop"),
            open_run_folder(config),
        ):
            pass
        assert (save / "config.toml").read_bytes() == before
        (save / "persist").touch()
        wait_for(lambda: checkpoints_in(save))


def test_a_start_that_failed_before_its_first_step_does_not_block_other_flags(prefix, tmp_path):
    save = tmp_path / "run"
    first, _ = resolve(
        parse(command(prefix, "--save", str(save), "--train-iters", "2")[4:]).config, vocab_size_given=True
    )
    with open_run_folder(first):
        pass
    second, _ = resolve(
        parse(command(prefix, "--save", str(save), "--train-iters", "2", "--num-layers", "3")[4:]).config,
        vocab_size_given=True,
    )
    with open_run_folder(second):
        assert read_config(save / "config.toml").model.num_layers == 3
    (save / "metrics.jsonl").write_text('{"iteration": 1}\n')
    with pytest.raises(HoldfastError, match="num_layers was 3 and is 2"), open_run_folder(first):
        pass
    assert read_config(save / "config.toml").model.num_layers == 3


def test_a_terminal_shows_one_short_line_per_step_and_what_comes_next(prefix, tmp_path):
    save = tmp_path / "run"
    terminal = Terminal(
        command(prefix, "--save", str(save), "--train-iters", "3", "--nproc-per-node", "2", "--no-panel")
    )
    assert terminal.end() == 0, terminal.lines
    lines = terminal.lines
    assert lines[0].startswith("starting 2 ranks")
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["1/3", "2/3", "3/3"] and "ETA" in steps[1]
    assert all(len(line) <= 80 for line in steps)
    assert f"result: {save}/checkpoints/step-00000003" in lines
    assert [line.split()[1] for line in lines if line.startswith("  holdfast ")] == ["generate", "convert", "report"]
    log = (save / "logs" / "rank-0.log").read_text()
    assert log.startswith("=== rank 0, process ") and "] iteration        3/       3 | consumed samples:" in log
    assert (save / "logs" / "rank-1.log").exists()


def test_a_sign_of_life_comes_before_torch_is_imported(prefix, tmp_path):
    """The line is printed by a process that has not loaded torch."""
    code = (
        "import sys, holdfast.system.progress as progress\n"
        "from holdfast.train.command import parse, train_command\n"
        "def log(line, **_): print('torch' in sys.modules, line); raise SystemExit\n"
        "import holdfast.train.command as command; command.log = log\n"
        f"train_command(parse({command(prefix, '--train-iters', '1')[4:]!r}))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("False starting 1 rank")


@pytest.mark.parametrize("instant", ["checks are done", "the folder is claimed", "ranks load", "ranks train"])
def test_ctrl_c_at_any_instant_ends_with_one_line_and_130(prefix, tmp_path, instant):
    save = tmp_path / "run"
    flags = ("--save", str(save), "--train-iters", "1000000", "--nproc-per-node", "2", "--no-panel")
    terminal = Terminal(command(prefix, *flags))
    reached = {
        "checks are done": lambda: terminal.lines,
        "the folder is claimed": lambda: (save / "config.toml").exists(),
        "ranks load": lambda: (save / "logs" / "rank-1.log").exists(),
        "ranks train": lambda: any(line.startswith("training ") for line in terminal.lines),
    }
    wait_for(reached[instant], terminal.process)
    shown = len(terminal.lines)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130, terminal.lines
    assert "Traceback" not in "\n".join(terminal.lines)
    steps = ("step ", "first step", "training ", "stopped on request")  # a run that trains ends after its step
    after = [line for line in terminal.lines[shown:] if not line.startswith(steps)]
    assert len(after) == 1 and ("interrupted" in after[0] or "stopped by SIGINT" in after[0]), terminal.lines
    if (save / "config.toml").exists():
        read_config(save / "config.toml")
    assert not list(save.glob("*.tmp"))


def test_a_value_out_of_range_starts_no_rank(prefix, tmp_path):
    done = subprocess.run(
        command(prefix, "--save", str(tmp_path / "run"), "--train-iters", "2", "--lr", "-1", "--nproc-per-node", "0"),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 2
    assert done.stderr == "holdfast: error: --lr -1 must be at least 0; --nproc-per-node 0 must be at least 1\n"
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fills_is_shown_and_the_save_is_tried_again(prefix, tmp_path):
    with small_disk(tmp_path / "disk", "200k") as disk:
        flags = ("--save", str(disk / "run"), "--train-iters", "4", "--save-interval", "2")
        process = subprocess.Popen(command(prefix, *flags), stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        shown = []
        for line in process.stderr:
            shown.append(line)
            if "could not be saved" in line:
                subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        assert process.wait(WAIT_SECONDS) == 0, shown
        failed = [line for line in shown if "could not be saved" in line]
        assert (
            failed[0].startswith("warning: step 2 could not be saved: no room left on the disk of ")
            and str(disk) in failed[0]
        )
        assert len(failed) == len(set(failed)) <= 2
        assert [step for step, _ in checkpoints_in(disk / "run")][-1] == 4


def test_the_commands_that_a_finished_run_names_can_be_pasted(prefix, tmp_path):
    save = tmp_path / "my runs" / "first"
    line = command(prefix, "--save", str(save), "--train-iters", "2")
    done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert done.returncode == 0, done.stderr
    commands = [shlex.split(line) for line in done.stderr.splitlines() if line.startswith("  holdfast ")]
    assert [words[1:3] for words in commands] == [[verb, str(save)] for verb in ("generate", "convert", "report")]
