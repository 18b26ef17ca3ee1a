"""`bench restart`: real runs that lose a rank, and the tables made of them."""

import json
import subprocess
import sys

import pytest

from holdfast.bench.restart import Measured, Restart, _tables


def restarted(seconds: float, noticed: float, **timeline: float) -> Restart:
    return Restart(seconds, {"event": "resumed", "seconds_since_failure": seconds - noticed, "timeline": timeline})


def test_the_parts_of_a_restart_are_medians_that_add_up():
    cold = [restarted(total, 0.5, imports=total - 1.5, restore=1.0) for total in (4.0, 3.0, 8.0)]
    standby = Measured([restarted(0.5, 0.25, restore=0.25)], [10, 10], [9, 6])
    totals, parts, gained = _tables({"cold": Measured(cold, [], []), "standby": standby}).values()
    assert [(row["mode"], row["kills"], row["median s"]) for row in totals] == [("cold", 3, 4.0), ("standby", 1, 0.5)]
    assert totals[0]["fastest to slowest"] == "3.00–8.00"
    found = {row["part"]: (row["cold s"], row["standby s"]) for row in parts}
    assert found == {"notice the failure": (0.5, 0.25), "imports": (2.5, 0.0), "restore": (1.0, 0.25)}
    assert sum(row["cold s"] for row in parts) == totals[0]["median s"]
    assert gained == [{"mode": "standby", "steps": 20, "steps with kills": 15, "ratio": 0.75}]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_bench_kills_ranks_with_and_without_spares():
    command = [sys.executable, "-m", "holdfast.cli", "bench", "restart", "--ranks", "1", "--kills", "1"]
    done = subprocess.run([*command, "--every", "1", "--json"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    totals, parts, gained = json.loads(done.stdout)["tables"].values()
    assert [row["mode"] for row in totals] == ["new", "forked", "standby"] == [row["mode"] for row in gained]
    assert all(row["median s"] > 0 for row in totals)
    imports = next(row for row in parts if row["part"] == "imports")
    assert imports["standby s"] < imports["new s"] > imports["forked s"]  # they have imported before
