"""The supervisor ends its ranks through torch's elastic agent, whose method has other arguments in other versions of torch."""

import os
import signal
import subprocess
import tempfile

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from holdfast.system.processes import process_key
from holdfast.train.supervisor import RankProgress, Supervisor, _remove_left_folders


@pytest.mark.parametrize("arguments", [(), (30,)], ids=["torch 2.11", "with a timeout"])
def test_signals_of_a_terminal_reach_ranks_as_sigterm(monkeypatch, arguments):
    sent: list[tuple[object, ...]] = []

    def without_timeout(self, death_sig=signal.SIGTERM):
        sent.append((death_sig,))

    def with_timeout(self, death_sig=signal.SIGTERM, timeout=30):
        sent.append((death_sig, timeout))

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", with_timeout if arguments else without_timeout)
    supervisor = object.__new__(Supervisor)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        supervisor._shutdown(number, *arguments)
    supervisor._shutdown()
    assert [one[0] for one in sent] == [*[signal.SIGTERM] * 3, signal.SIGUSR1, signal.SIGTERM]


def test_memory_that_cannot_be_read_shows_no_step(tmp_path):
    """A rank reports what is wrong with it; the supervisor goes on."""
    memory = tmp_path / "memory"
    memory.symlink_to(memory)
    progress = RankProgress(tmp_path / "run", str(memory))
    progress.watch({os.getpid()})
    assert not progress.made_a_step()


def test_folders_of_killed_supervisors_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen(["true"])
    ended.wait()
    here, pid, start = process_key().split("-")
    used = f"{process_key()}-used"
    reused = f"{here}-{pid}-{int(start) - 1}-of a reused number"
    elsewhere = f"{'0' * 16}-{ended.pid}-1-of another node that shares the folder"
    for name in (f"{here}-{ended.pid}-1-left", reused, used, elsewhere, "of-an-older-version"):
        (tmp_path / f"holdfast-ranks-{name}").mkdir()
    _remove_left_folders()
    kept = {path.name.removeprefix("holdfast-ranks-") for path in tmp_path.iterdir()}
    assert kept == {used, elsewhere, "of-an-older-version"}
