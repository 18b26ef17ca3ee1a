"""`holdfast bench fetch`: the counts are right and every measurement has its row; times are not checked."""

import json
import subprocess
import sys


def bench(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "holdfast.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_it_measures_the_race_the_cached_fetch_and_the_waiters():
    done = bench(
        "fetch", "--ranks", "6", "--rounds", "1", "--big-file", "1000000", "--against", "filelock", "naive", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bench"] == "fetch" and report["machine"]["cores"] >= 1
    race, cached, waiting = report["tables"].values()
    counts = {row["strategy"]: (row["GETs gpt2-vocab.json"], row["failed processes"]) for row in race}
    assert counts["holdfast"] == counts["filelock"] == (1, 0)
    assert counts["naive"][0] > 1
    assert [row["strategy"] for row in cached] == ["holdfast", "filelock"]
    assert all(row["ms per call"] > 0 for row in cached)
    assert [row["processes"] for row in waiting] == [1, 6] and waiting[0]["/ alone"] == 1
    assert all(row["holder's s"] > 0 for row in waiting)
