"""Holders that die, stop or fall silent: the others finish, no process sees half a file, and good bytes are not fetched again."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast import fetch
from holdfast.assets.cache import entry_of
from holdfast.assets.partial_file import DownloadState
from holdfast.system.errors import HoldfastError
from holdfast.system.leases import Lease, claim, newest_lease
from holdfast.system.processes import ProcessIdentity, this_process
from tests.assets.loopback import Server, sha256, some_bytes
from tests.assets.test_fetching import files_in, leftovers_in

CONTENT = some_bytes(3_000_000)
TIME_LIMIT = 240.0


class Ranks:
    """Processes that fetch one URL, started together."""

    def __init__(self, url: str, count: int, mode: str = "reap", **environment: str) -> None:
        script = Path(__file__).with_name("ranks.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), url, str(count), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def finish(self, count: int) -> list[dict]:
        """The answers of `count` ranks; then the zombies go."""
        assert self.process.stdout and self.process.stdin
        answers = [json.loads(self.process.stdout.readline() or "null") for _ in range(count)]
        self.process.stdin.close()
        self.process.wait(TIME_LIMIT)
        self.process.stdout.close()
        return answers


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., Ranks]]:
    started: list[Ranks] = []

    def start(*arguments, **environment: str) -> Ranks:
        started.append(Ranks(*arguments, **environment))
        return started[-1]

    yield start
    for ranks in started:
        with suppress(ProcessLookupError):
            os.killpg(ranks.process.pid, signal.SIGKILL)
        ranks.process.wait()


class Watcher:
    """Looks at the cache all the time; a file that shows a final name must be whole."""

    def __init__(self, cache: Path, size: int) -> None:
        self.partial: list[str] = []
        self.looks = 0
        self._cache, self._size, self._stop = cache, size, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.looks += 1
            for path in files_in(self._cache):
                if path.stat().st_size != self._size:
                    self.partial.append(str(path))
            time.sleep(0.002)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def wait_for(what, message: str):
    end = time.monotonic() + TIME_LIMIT
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.002)
    raise AssertionError(f"waited in vain for {message}")


def holder_other_than(folder: Path, tokens: set[str]) -> Lease | None:
    lease = newest_lease(folder)
    return lease if lease and lease.holder and lease.token not in tokens else None


def part_size(folder: Path, lease: Lease) -> int:
    try:
        return (folder / lease.part).stat().st_size
    except FileNotFoundError:
        return 0


@pytest.mark.parametrize("mode", ["reap", "zombie"])
@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 23))])
def test_holders_killed_at_random_instants_are_succeeded_at_once(
    server: Server, cache: Path, start_ranks, mode: str, seed: int
):
    url = server.put("/vocab.json", CONTENT, block=16_384, block_delay=0.005)
    folder, chance = entry_of(cache, url).folder, random.Random(seed)
    watcher = Watcher(cache, len(CONTENT))
    # A lease that never ends: only proof of death helps.
    ranks = start_ranks(url, 12, mode, HOLDFAST_LEASE_SECONDS="1e9")
    tokens: set[str] = set()
    size = 0
    growths = [0, *(chance.randrange(1, 600_000) for _ in range(3))]
    chance.shuffle(growths)
    for growth in growths:
        lease = wait_for(lambda: holder_other_than(folder, tokens), "the next holder")
        if growth:
            target = size + growth
            wait_for(lambda lease=lease, target=target: part_size(folder, lease) >= target, f"{target} bytes")
        time.sleep(chance.uniform(0, 0.02))
        size = part_size(folder, lease)
        os.kill(lease.holder.pid, signal.SIGKILL)
        tokens.add(lease.token)
    answers = ranks.finish(12 - 4)
    watcher.stop()
    assert [answer.get("size") for answer in answers] == [len(CONTENT)] * 8
    assert files_in(cache) == [Path(answers[0]["path"])]
    assert sha256(Path(answers[0]["path"]).read_bytes()) == sha256(CONTENT)
    assert watcher.looks > 10 and watcher.partial == []
    assert leftovers_in(cache) == []
    starts = [one.start for one in server.gets("/vocab.json")]
    assert starts == sorted(starts) and len(starts) <= 5
    # A holder that was killed before its request left none; the last start shows the effect of all the kills.
    assert starts[-1] >= size > 0
    assert sum(one.sent for one in server.gets("/vocab.json")) <= len(CONTENT) + 4 * (1 << 19)


def test_a_stopped_holder_is_succeeded_after_the_lease_and_may_continue_later(server: Server, cache: Path, start_ranks):
    url = server.put("/vocab.json", CONTENT, block=16_384, block_delay=0.005)
    folder = entry_of(cache, url).folder
    watcher = Watcher(cache, len(CONTENT))
    ranks = start_ranks(url, 3, HOLDFAST_LEASE_SECONDS="1")
    sleeper = wait_for(
        lambda: (lease := newest_lease(folder)) and part_size(folder, lease) > 100_000 and lease, "some bytes"
    )
    os.kill(sleeper.holder.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: holder_other_than(folder, {sleeper.token}) or files_in(cache), "a successor")
        # Two of the three finish while the first one is stopped; it continues when the file is there.
        wait_for(lambda: files_in(cache), "the file")
    finally:
        os.kill(sleeper.holder.pid, signal.SIGCONT)
    answers = ranks.finish(3)
    watcher.stop()
    assert [answer.get("size") for answer in answers] == [len(CONTENT)] * 3
    assert sleeper.holder.pid in [answer["pid"] for answer in answers]
    assert watcher.partial == []
    assert sha256(Path(answers[0]["path"]).read_bytes()) == sha256(CONTENT)


def test_a_stopped_holder_that_continues_while_its_successor_downloads_gives_up(
    server: Server, cache: Path, start_ranks
):
    url = server.put("/vocab.json", CONTENT, block=16_384, block_delay=0.01)
    folder = entry_of(cache, url).folder
    watcher = Watcher(cache, len(CONTENT))
    ranks = start_ranks(url, 2, HOLDFAST_LEASE_SECONDS="0.5")
    sleeper = wait_for(
        lambda: (lease := newest_lease(folder)) and part_size(folder, lease) > 50_000 and lease, "some bytes"
    )
    os.kill(sleeper.holder.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: holder_other_than(folder, {sleeper.token}), "a successor")
    finally:
        os.kill(sleeper.holder.pid, signal.SIGCONT)
    answers = ranks.finish(2)
    watcher.stop()
    assert [answer.get("size") for answer in answers] == [len(CONTENT)] * 2
    assert watcher.partial == []
    assert sha256(Path(answers[0]["path"]).read_bytes()) == sha256(CONTENT)


def leave_behind(
    folder: Path, url: str, count: int, holder: ProcessIdentity, durable: int = 0, released: bool = False
) -> None:
    """What a holder leaves that wrote `count` bytes and then stopped its heartbeat."""
    folder.mkdir(parents=True)
    about = DownloadState(url, '"v1"', len(CONTENT), "vocab.json", durable=durable)
    (folder / ".dead.part").write_bytes(CONTENT[:count])
    (folder / ".dead.part.json").write_text(json.dumps(vars(about)))
    lease = {"holder": vars(holder), "token": "dead", "part": ".dead.part", "expects": None, "released": released}
    (folder / ".lease-000001").write_text(json.dumps(lease))


def dead_process() -> ProcessIdentity:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    here = this_process()
    return ProcessIdentity(here.host, here.boot, here.pid_namespace, child.pid, 1)


def test_a_holder_killed_after_the_last_byte_leaves_nothing_to_ask_for(server: Server, cache: Path):
    url = server.put("/vocab.json", CONTENT)
    leave_behind(entry_of(cache, url).folder, url, len(CONTENT), dead_process())
    assert fetch(url).read_bytes() == CONTENT
    assert server.requests == [] and leftovers_in(cache) == []


def test_a_pid_that_another_process_has_by_now_proves_death(server: Server, cache: Path):
    url = server.put("/vocab.json", CONTENT)
    here = this_process()
    reused = ProcessIdentity(here.host, here.boot, here.pid_namespace, here.pid, here.start + 1)
    leave_behind(entry_of(cache, url).folder, url, 1_000_000, reused)
    assert fetch(url, timeout=TIME_LIMIT).read_bytes() == CONTENT
    assert server.requests[0].start == 1_000_000


def test_a_silent_holder_of_another_machine_is_succeeded_after_the_lease_and_only_its_synced_bytes_count(
    server: Server, cache: Path, monkeypatch
):
    monkeypatch.setenv("HOLDFAST_LEASE_SECONDS", "0.5")
    url = server.put("/vocab.json", CONTENT)
    elsewhere = ProcessIdentity("node17", "another-boot", "pid:[1]", 1, 1)
    leave_behind(entry_of(cache, url).folder, url, 2_000_000, elsewhere, durable=1_500_000)
    began = time.monotonic()
    assert fetch(url, timeout=TIME_LIMIT).read_bytes() == CONTENT
    assert time.monotonic() - began >= 0.5
    assert server.requests[0].start == 1_500_000


def test_what_a_silent_holder_of_this_machine_wrote_is_copied_and_its_own_part_left_alone(
    server: Server, cache: Path, monkeypatch
):
    monkeypatch.setenv("HOLDFAST_LEASE_SECONDS", "0.5")
    url = server.put("/vocab.json", CONTENT)
    folder = entry_of(cache, url).folder
    leave_behind(folder, url, 2_000_000, this_process())
    with (folder / ".dead.part").open("r+b") as asleep:
        assert fetch(url, timeout=TIME_LIMIT).read_bytes() == CONTENT
        asleep.write(b"what the sleeper writes when it wakes up")
    assert server.requests[0].start == 2_000_000
    assert fetch(url).read_bytes() == CONTENT


def test_a_part_from_before_a_changed_file_is_not_continued(server: Server, cache: Path):
    url = server.put("/vocab.json", CONTENT, etag='"v2"')
    folder = entry_of(cache, url).folder
    leave_behind(folder, url, 1_000_000, dead_process())
    (folder / ".dead.part").write_bytes(b"old" * 300_000)
    assert fetch(url).read_bytes() == CONTENT


def test_a_waiter_that_gives_up_names_the_holder(server: Server, cache: Path):
    url = server.put("/vocab.json", CONTENT)
    folder = entry_of(cache, url).folder
    folder.mkdir(parents=True)
    held = claim(folder, None, None, None)
    assert held
    with pytest.raises(HoldfastError, match=rf"not here after 0.3 s: process {os.getpid()} on .* is downloading it"):
        fetch(url, timeout=0.3)
    held.release()
    assert fetch(url, timeout=TIME_LIMIT).read_bytes() == CONTENT


def test_waiting_processes_report_the_failure_and_do_not_repeat_it(server: Server, cache: Path, start_ranks):
    url = server.put("/vocab.json", b"")
    server.pages["/vocab.json"].script = [lambda handler, page: (time.sleep(2), handler.answer(404))[1]] * 20
    answers = start_ranks(url, 8).finish(8)
    assert all("404" in answer["error"] for answer in answers)
    assert len(server.gets("/vocab.json")) <= 4


def test_only_local_rank_0_logs_which_process_downloads(server: Server, cache: Path, capfd, monkeypatch):
    from holdfast.assets import waiting

    monkeypatch.setattr(waiting, "LOG_SECONDS", 0.1)
    url = server.put("/vocab.json", CONTENT)
    folder = entry_of(cache, url).folder
    leave_behind(folder, url, 1_000_000, this_process())
    for rank, spoken in (("3", False), ("0", True)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(HoldfastError, match="is downloading it"):
            fetch(url, timeout=0.6)
        line = f"process {os.getpid()} on {this_process().host} is downloading it, 1.0 of 3.0 MB"
        assert (line in capfd.readouterr().err) is spoken
