"""Liveness: a live process, a zombie, a process that is gone, a process of another machine."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.system.processes import ProcessIdentity, process_alive, start_time, this_process

FIRST_THREAD_ENDS = """
import ctypes, threading, time
def work():
    while open('/proc/self/stat').read().rpartition(')')[2].split()[0] != 'Z':
        time.sleep(0.01)
    print('first thread ended', flush=True)
    time.sleep(600)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60 if __import__('platform').machine() == 'x86_64' else 93, 0)
"""


def start_child(code: str) -> subprocess.Popen:
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert child.stdout
    child.stdout.readline()
    return child


def identity_of(pid: int) -> ProcessIdentity:
    return replace(this_process(), pid=pid, start=start_time(pid))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_live_process_a_zombie_and_one_that_is_gone():
    child = start_child("print('up', flush=True); input()")
    who = identity_of(child.pid)
    assert not who.is_dead() and process_alive(who.pid, who.start)
    child.kill()
    end = time.monotonic() + 60
    while state(child.pid) != "Z":
        assert time.monotonic() < end
    assert who.is_dead() and not process_alive(who.pid, who.start), "a zombie"
    child.communicate()
    assert who.is_dead() and not process_alive(who.pid, who.start), "gone"


def test_a_process_whose_first_thread_ended_is_alive():
    """Its state is Z while another thread works on."""
    child = start_child(FIRST_THREAD_ENDS)
    try:
        assert state(child.pid) == "Z"
        who = identity_of(child.pid)
        assert who.start and not who.is_dead() and process_alive(who.pid, who.start)
    finally:
        child.kill()
        child.communicate()


def test_a_reused_pid_is_another_process():
    here = this_process()
    assert replace(here, start=here.start - 1).is_dead() and not process_alive(os.getpid(), here.start - 1)


@pytest.mark.parametrize(
    "place", [{"boot": "another-boot"}, {"pid_namespace": "pid:[1]"}, {"boot": "", "pid_namespace": ""}]
)
def test_a_process_of_another_boot_or_container_is_never_proven_dead(place):
    nowhere = replace(this_process(), pid=1 << 30, start=1)
    assert nowhere.is_local() and nowhere.is_dead()
    elsewhere = replace(nowhere, **place)
    assert not elsewhere.is_local() and not elsewhere.is_dead()
