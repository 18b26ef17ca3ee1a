"""The supervisor ends its ranks through torch's elastic agent, whose method has other arguments in other versions of torch."""

import os
import signal

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from holdfast.train.supervisor import RankProgress, Supervisor


@pytest.mark.parametrize("arguments", [(), (30,)], ids=["torch 2.11", "with a timeout"])
def test_ctrl_c_reaches_ranks_as_sigterm(monkeypatch, arguments):
    sent: list[tuple[object, ...]] = []

    def without_timeout(self, death_sig=signal.SIGTERM):
        sent.append((death_sig,))

    def with_timeout(self, death_sig=signal.SIGTERM, timeout=30):
        sent.append((death_sig, timeout))

    monkeypatch.setattr(LocalElasticAgent, "_shutdown", with_timeout if arguments else without_timeout)
    supervisor = object.__new__(Supervisor)
    supervisor._shutdown(signal.SIGINT, *arguments)
    supervisor._shutdown()
    assert [one[0] for one in sent] == [signal.SIGTERM, signal.SIGTERM]


def test_memory_that_cannot_be_read_shows_no_step(tmp_path):
    """A rank reports what is wrong with it; the supervisor goes on."""
    memory = tmp_path / "memory"
    memory.symlink_to(memory)
    progress = RankProgress(tmp_path / "run", str(memory))
    progress.watch({os.getpid()})
    assert not progress.made_a_step()
