"""An index is built once, appears whole, and outlives the death of its builder."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from holdfast.data.samples.index_cache import open_index
from holdfast.system.errors import HoldfastError
from holdfast.system.leases import claim

PATIENCE = 120.0


def build_slowly(folder: Path) -> None:
    """Leaves a mark outside for every build that begins."""
    with (folder.parent / "builds.log").open("a") as log:
        log.write(f"{os.getpid()}\n")
    time.sleep(0.5)
    np.save(folder / "squares.npy", np.arange(1000) ** 2)


def open_in_process(folder: Path, start: float, results: "multiprocessing.Queue[int]") -> None:
    time.sleep(max(0.0, start - time.time()))
    arrays = open_index(folder, "squares", {"n": 1000}, build_slowly)
    results.put(int(arrays["squares"].sum()))


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    start = time.time() + 0.3
    processes = [context.Process(target=open_in_process, args=(tmp_path, start, results)) for _ in range(12)]
    for process in processes:
        process.start()
    sums = [results.get(timeout=PATIENCE) for _ in processes]
    for process in processes:
        process.join(PATIENCE)
    assert sums == [int((np.arange(1000) ** 2).sum())] * 12
    assert len((tmp_path / "builds.log").read_text().split()) == 1
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["builds.log", "squares"]


def build_and_never_end(folder: Path) -> None:
    (folder.parent / "begun").touch()
    time.sleep(PATIENCE)


def hang(folder: Path) -> None:
    open_index(folder, "squares", {"n": 1000}, build_and_never_end)


def test_killed_builder_is_succeeded(tmp_path: Path) -> None:
    builder = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path,))
    builder.start()
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert builder.pid is not None
    os.kill(builder.pid, signal.SIGKILL)
    builder.join(PATIENCE)
    assert not list(tmp_path.glob("squares-*"))
    arrays = open_index(tmp_path, "squares", {"n": 1000}, build_slowly)
    assert arrays["squares"][30] == 900


def test_silent_holder_is_believed_for_the_lease_time_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_LEASE_SECONDS", "0.5")
    open_index(tmp_path / "probe", "squares", {"n": 1000}, build_slowly)
    (name,) = (path.name for path in (tmp_path / "probe").glob("squares-*"))
    # This very process holds the lease, alive but without a beat.
    leases = tmp_path / f".{name}.building"
    leases.mkdir()
    assert claim(leases, None, None, None)
    arrays = open_index(tmp_path, "squares", {"n": 1000}, build_slowly)
    assert arrays["squares"][2] == 4


def test_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        np.save(folder / "squares.npy", np.zeros(3))
        raise HoldfastError("no room")

    with pytest.raises(HoldfastError, match="no room"):
        open_index(tmp_path, "squares", {}, fail)
    assert not list(tmp_path.glob("squares-*"))
    assert open_index(tmp_path, "squares", {}, build_slowly)["squares"][3] == 9


@pytest.mark.parametrize("name", ["squares.npy", "description.json"])
def test_an_index_that_lost_a_file_is_built_again(tmp_path: Path, name: str) -> None:
    """Clusters clean their scratch disks file by file."""
    before = open_index(tmp_path, "squares", {"n": 1000}, build_slowly)["squares"]
    (folder,) = tmp_path.glob("squares-*")
    (folder / name).unlink()
    assert open_index(tmp_path, "squares", {"n": 1000}, build_slowly)["squares"][3] == 9
    assert len((tmp_path / "builds.log").read_text().split()) == 2
    assert before[999] == 999**2, "who has opened the old one keeps it"
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["builds.log", "squares"]


def test_other_identity_is_another_index(tmp_path: Path) -> None:
    def build(value: int) -> dict[str, np.ndarray]:
        return open_index(tmp_path, "value", {"value": value}, lambda folder: np.save(folder / "value.npy", [value]))

    assert [build(value)["value"][0] for value in (1, 2, 1)] == [1, 2, 1]
    assert len(list(tmp_path.glob("value-*"))) == 2
