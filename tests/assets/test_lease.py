"""Leases: one winner per number, succession only with reason, and proof of death only where it is proof."""

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest

from holdfast.system import leases
from holdfast.system.leases import Identity, LeaseLost, claim, newest_lease, this_process


def try_to_claim(folder, gate, winners):
    gate.wait()
    held = claim(folder, newest_lease(folder), None, None)
    winners.put(held.lease.number if held else 0)


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


def test_a_lease_tells_who_holds_it(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "26")
    held = claim(tmp_path, None, None, "a" * 64)
    seen = newest_lease(tmp_path)
    assert held and seen == held.lease
    assert seen.holder == this_process() and seen.expects == "a" * 64
    assert seen.describe() == f"process {os.getpid()} on {this_process().host}, rank 26"
    assert not seen.holder.is_dead()


def test_a_claim_leaves_nothing_but_the_lease(tmp_path):
    claim(tmp_path, None, None, None)
    assert claim(tmp_path, None, None, None) is None
    assert [path.name for path in tmp_path.iterdir()] == [".lease-000001"]


def test_a_holder_learns_of_its_successor(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.0)
    held = claim(tmp_path, None, None, None)
    assert held
    held.beat()
    successor = claim(tmp_path, held.lease, None, None)
    assert successor and newest_lease(tmp_path) == successor.lease
    with pytest.raises(LeaseLost):
        held.beat()
    held.release()
    assert newest_lease(tmp_path) == successor.lease, "a late release does not disturb the successor"


def test_a_beat_shows(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT_SECONDS", 0.0)
    held = claim(tmp_path, None, None, None)
    assert held
    file = held.lease.file_in(tmp_path)
    os.utime(file, ns=(0, 0))
    held.beat()
    assert file.stat().st_mtime_ns > 0


def test_a_lease_that_is_still_being_written_proves_nothing(tmp_path):
    (tmp_path / ".lease-000007").touch()
    seen = newest_lease(tmp_path)
    assert seen and seen.number == 7 and seen.holder is None and not seen.released


def test_a_lease_cannot_point_at_a_part_elsewhere(tmp_path):
    held = claim(tmp_path, None, "../precious.part", None)
    assert held
    seen = newest_lease(tmp_path)
    assert seen and seen.part == "" and seen.holder is None


def start_child(code: str) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert child.stdout
    child.stdout.readline()
    return child


def identity_of(pid: int) -> Identity:
    here = this_process()
    return Identity(here.host, here.boot, here.pid_namespace, pid, leases._state_and_start(pid)[1])


def test_the_living_the_zombie_and_the_gone():
    child = start_child("print('up', flush=True); input()")
    who = identity_of(child.pid)
    assert not who.is_dead()
    child.kill()
    end = time.monotonic() + 60
    while leases._state_and_start(child.pid)[0] != "Z":
        assert time.monotonic() < end
    assert who.is_dead(), "a zombie"
    child.communicate()
    assert who.is_dead(), "gone"


def test_a_process_whose_first_thread_ended_is_not_a_zombie():
    """Its state says Z while another thread works on."""
    code = """
import ctypes, threading, time
def work():
    while open('/proc/self/stat').read().rpartition(')')[2].split()[0] != 'Z':
        time.sleep(0.01)
    print('first thread ended', flush=True)
    time.sleep(600)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60 if __import__('platform').machine() == 'x86_64' else 93, 0)
"""
    child = start_child(code)
    try:
        assert leases._state_and_start(child.pid)[0] == "Z"
        assert not identity_of(child.pid).is_dead()
    finally:
        child.kill()
        child.communicate()


def test_a_process_of_another_boot_or_container_is_never_proven_dead():
    here = this_process()
    assert not Identity(here.host, "another-boot", here.pid_namespace, 1 << 30, 1).is_dead()
    assert not Identity(here.host, here.boot, "pid:[1]", 1 << 30, 1).is_dead()
    assert not Identity(here.host, "", "", 1 << 30, 1).is_dead()
    assert Identity(here.host, here.boot, here.pid_namespace, 1 << 30, 1).is_dead()


def test_threads_of_one_process_share_one_download(server, cache):
    from holdfast import fetch

    url = server.put("/file", b"x" * 500_000, latency=0.3)
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(fetch(url, timeout=240))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8 and len(set(paths)) == 1 and len(server.requests) == 1
