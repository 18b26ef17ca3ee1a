"""Leases: one winner per number, and a takeover only from a holder that is gone."""

import errno
import multiprocessing
import os

import pytest

from holdfast.system import leases
from holdfast.system.leases import LeaseLost, claim, newest_lease
from holdfast.system.processes import this_process


def try_to_claim(folder, gate, winners):
    gate.wait()
    owned = claim(folder, newest_lease(folder), None, None)
    winners.put(owned.lease.number if owned else 0)


@pytest.mark.parametrize("by", ["link", "exclusive creation"])
def test_one_of_many_processes_wins_a_number(tmp_path, by, monkeypatch):
    if by == "exclusive creation":

        def no_links(*_):
            raise OSError(errno.EPERM, "this file system has no links")

        monkeypatch.setattr(os, "link", no_links)
    context = multiprocessing.get_context("fork")
    for round in range(1, 4):
        gate, winners = context.Barrier(16), context.SimpleQueue()
        processes = [context.Process(target=try_to_claim, args=(tmp_path, gate, winners)) for _ in range(16)]
        for process in processes:
            process.start()
        results = [winners.get() for _ in processes]
        for process in processes:
            process.join()
        # Who listed the folder after the winner's claim tried for the next number, and one of those won it.
        won = [number for number in results if number]
        assert len(won) == len(set(won)) and won
        for path in tmp_path.iterdir():
            path.unlink()
        assert round


def test_a_lease_names_its_holder(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "26")
    owned = claim(tmp_path, None, None, "a" * 64)
    seen = newest_lease(tmp_path)
    assert owned and seen == owned.lease
    assert seen.holder == this_process() and seen.expects == "a" * 64
    assert seen.describe() == f"process {os.getpid()} on {this_process().host}, rank 26"
    assert not seen.holder.is_dead()


def test_a_claim_leaves_nothing_but_the_lease(tmp_path):
    claim(tmp_path, None, None, None)
    assert claim(tmp_path, None, None, None) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lease-000001"]


def test_a_holder_learns_of_its_successor(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.0)
    owned = claim(tmp_path, None, None, None)
    assert owned
    owned.beat()
    successor = claim(tmp_path, owned.lease, None, None)
    assert successor and newest_lease(tmp_path) == successor.lease
    with pytest.raises(LeaseLost):
        owned.beat()
    owned.release()
    assert newest_lease(tmp_path) == successor.lease, "a late release does not disturb the successor"


def test_a_beat_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.0)
    owned = claim(tmp_path, None, None, None)
    assert owned
    file = owned.lease.file_in(tmp_path)
    os.utime(file, ns=(0, 0))
    owned.beat()
    assert file.stat().st_mtime_ns > 0


def test_a_lease_that_is_still_being_written_proves_nothing(tmp_path):
    (tmp_path / ".lease-000007").touch()
    seen = newest_lease(tmp_path)
    assert seen and seen.number == 7 and seen.holder is None and not seen.released


def test_a_lease_cannot_point_at_a_part_elsewhere(tmp_path):
    owned = claim(tmp_path, None, "../precious.part", None)
    assert owned
    seen = newest_lease(tmp_path)
    assert seen and seen.part == "" and seen.holder is None


def test_a_loser_whose_draft_the_winner_has_removed_has_lost(tmp_path, monkeypatch):
    def lose(draft, final):
        os.unlink(draft)
        raise FileExistsError(errno.EEXIST, "another process has this number")

    monkeypatch.setattr(os, "link", lose)
    assert claim(tmp_path, None) is None
