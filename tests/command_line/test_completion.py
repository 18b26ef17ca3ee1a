"""Shell completion: TAB in real shells, with the printed script."""

import json
import os
import pty
import shutil
import subprocess
import sys
import time

import pytest

SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"], "fish": ["fish", "--no-config"]}
START = {"bash": "", "zsh": "autoload -Uz compinit; compinit -u -D; ", "fish": ""}


def printed(shell: str) -> str:
    command = [sys.executable, "-m", "holdfast", "completion", shell]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_json_holds_the_script() -> None:
    command = [sys.executable, "-m", "holdfast", "completion", "bash", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == {"shell": "bash", "script": printed("bash")}


def type_into(shell: str, lines: list[str], folder) -> list[str]:
    """The words that the program `holdfast` gets for each line typed at an interactive prompt."""
    (folder / "script").write_text(printed(shell))
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "$ ", "HOME": str(folder), "INPUTRC": "/dev/null"}
    streams = {"stdin": secondary, "stdout": secondary, "stderr": secondary}
    process = subprocess.Popen(SHELLS[shell], cwd=folder, env=environment, start_new_session=True, **streams)
    os.close(secondary)
    try:
        # The function stands for the program; it is called once, so that the first line is typed at a ready prompt.
        prepare = f'{START[shell]}source ./script; holdfast() {{ echo "$@" >> seen; }}; holdfast ready\n'
        os.write(primary, prepare.encode())
        wait_for_lines(folder / "seen", 1, primary)
        os.write(primary, "".join(f"holdfast {keys}\n" for keys in lines).encode())
        return wait_for_lines(folder / "seen", 1 + len(lines), primary)[1:]
    finally:
        process.kill()
        process.wait()
        os.close(primary)


def wait_for_lines(path, count: int, terminal: int) -> list[str]:
    """Reads what the shell prints, so that it never blocks on its terminal, until the file has that many lines."""
    os.set_blocking(terminal, False)
    shown = b""
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_text().count("\n") < count:
        assert time.monotonic() < deadline, shown.decode(errors="replace")
        try:
            shown += os.read(terminal, 65536)
        except BlockingIOError:
            time.sleep(0.02)
    return path.read_text().splitlines()


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_tab_completes_verbs_flags_choices_and_files(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not on this machine")
    (tmp_path / "source.zip").touch()
    lines = [
        "conv\tsour\tout --to meg\t --keep-\t",
        "launch sl\ttr\tgpt_ti\t --num-la\t 4 --dry\t",
    ]
    assert type_into(shell, lines, tmp_path) == [
        "convert source.zip out --to megatron --keep-padding",
        "launch slurm train gpt_tiny --num-layers 4 --dry-run",
    ]


def test_fish_completes_verbs_flags_choices_and_files(tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("fish is not on this machine")
    (tmp_path / "holdfast.fish").write_text(printed("fish"))
    (tmp_path / "source.zip").touch()
    lines = {
        "conv": "convert",
        "convert sour": "source.zip",
        "convert a b --to meg": "megatron",
        "convert a b --keep-": "--keep-padding",
        "launch sl": "slurm",
        "launch slurm tr": "train",
        "launch slurm train gpt_ti": "gpt_tiny",
        "launch slurm train --num-la": "--num-layers",
    }
    asked = "; ".join(f"complete -C 'holdfast {line}'; echo" for line in lines)
    command = ["fish", "--no-config", "-c", f"source holdfast.fish; {asked}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert [line.split("\t")[0] for line in done.stdout.split("\n") if line] == list(lines.values()), done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_valid_and_names_every_verb(shell):
    from holdfast.cli import VERBS

    script = printed(shell)
    for verb in VERBS:
        assert all(word in script for word in verb.split())
    if shutil.which(shell):
        done = subprocess.run([shell, "-n", "/dev/stdin"], input=script, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
