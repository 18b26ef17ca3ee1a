"""`bench snapshot` runs its ranks, crashes them and restores."""

import os

import pytest

from holdfast.bench.snapshot import SnapshotBench, run
from holdfast.system.errors import UsageError


@pytest.mark.slow
def test_steps_saves_and_the_restore_are_measured(tmp_path):
    options = SnapshotBench(model="small", steps=2, rounds=1, against=("torch.save",), snapshot_dir=str(tmp_path))
    (step,), saves, (restore,) = run(options).values()
    assert step["ranks"] == 2 and step["step ms"] > 0 and step["with snapshots ms"] > 0 and step["skipped"] == 0
    assert [row["how"] for row in saves] == ["holdfast, every step", "torch.save"]
    assert restore["steps lost"] == 0 and restore["seconds"] > 0
    assert not [path for path in os.scandir(tmp_path / f"holdfast-{os.getuid()}") if path.name.startswith("bench-")]


def test_an_unknown_peer_is_refused():
    with pytest.raises(UsageError, match="there is no contender 'hope'; there are: torch.save, dcp.save"):
        run(SnapshotBench(against=("hope",)))
