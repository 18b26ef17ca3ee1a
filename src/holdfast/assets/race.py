"""The many-ranks download race: all ranks of a node fetch GPT-2's two files at the same moment.

A loopback server with some latency counts the requests; the ranks are real processes that start on one signal, with an
empty cache in every iteration. `naive` is what job scripts do: check, download to the working folder, move.
"""

import hashlib
import http.server
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from holdfast.assets.catalog import FileSpec
from holdfast.assets.fetching import fetch_file

FILES = {"gpt2-vocab.json": 1_042_301, "gpt2-merges.txt": 456_318}
LATENCY = 0.2
RANK_TIMEOUT = 300.0

OnRequest = Callable[[str], None]
Strategy = Callable[[str, Path, OnRequest], Path]
"""Downloads a URL into a folder, reports every request that it makes, and returns the file's path."""


def holdfast(url: str, folder: Path, on_request: OnRequest) -> Path:
    return fetch_file(FileSpec(url), folder, timeout=RANK_TIMEOUT, on_request=on_request).path


def naive(url: str, folder: Path, on_request: OnRequest) -> Path:
    """Checks whether the file exists, downloads it to a free name in the working folder, moves it: three races in a row."""
    name = urllib.parse.urlsplit(url).path.rpartition("/")[2]
    path = folder / name
    if not path.exists():
        on_request(url)
        descriptor, temporary = tempfile.mkstemp(dir=".", prefix=name)
        with urllib.request.urlopen(url) as response, os.fdopen(descriptor, "wb") as file:
            shutil.copyfileobj(response, file)
        free, count = name, 0
        while os.path.exists(free):
            count += 1
            free = f"{name} ({count})"
        shutil.move(temporary, free)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(free, path)
    return path


@dataclass
class RankReport:
    local_rank: int
    downloads: list[str] = field(default_factory=list)
    error: str | None = None
    wrong_bytes: list[str] = field(default_factory=list)
    began: float = 0.0
    fetched: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    """Of the fetches alone."""

    @property
    def failed(self) -> bool:
        return self.error is not None or bool(self.wrong_bytes)


@dataclass
class IterationReport:
    gets: dict[str, int]
    failed_ranks: int
    wrong_bytes: int
    seconds: float
    """From the start signal to the last rank's last byte."""
    holder_seconds: float
    """From the start signal to the last file, of the slowest rank that downloaded something itself."""
    waiters_cpu_seconds: float
    """Of all ranks that downloaded nothing, together."""
    downloads: list[dict[str, Any]]
    errors: list[str]


class CountingServer(http.server.ThreadingHTTPServer):
    """Serves the files at any path that ends with their name, and counts the requests by method and name."""

    request_queue_size = 4096
    daemon_threads = True

    def __init__(self, contents: dict[str, bytes], latency: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.contents, self.latency = contents, latency
        self.counts: dict[tuple[str, str], int] = {}
        self.lock = threading.Lock()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that close the connection."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: CountingServer

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        with self.server.lock:
            key = (self.command, name)
            self.server.counts[key] = self.server.counts.get(key, 0) + 1
        time.sleep(self.server.latency)
        content = self.server.contents[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)  # huggingface_hub requires it (`bench fetch`)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        """Logs nothing: the requests are counted."""


def _random_bytes(count: int) -> bytes:
    source = random.Random(count)
    return b"".join(source.randbytes(min(1 << 20, count - at)) for at in range(0, count, 1 << 20))


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Ctrl-C waits until the end of the block; threads that begin in it never get it, so that the main thread does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def counting_server(sizes: dict[str, int], latency: float) -> Iterator[CountingServer]:
    server = CountingServer({name: _random_bytes(size) for name, size in sizes.items()}, latency)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    with sigint_blocked():
        thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def run_rank(strategy: Strategy, local_rank: int, checksums: dict[str, str], work: Path, start: Any, pipe: Any) -> None:
    """One rank: fetches the URLs of `checksums` and compares the files; an empty checksum is not compared."""
    os.environ.update(LOCAL_RANK=str(local_rank), RANK=str(local_rank))
    os.chdir(work)
    report = RankReport(local_rank)
    pipe.send("ready")
    with suppress(EOFError):
        start.recv()
    report.began = time.monotonic()
    try:
        for url, checksum in checksums.items():
            cpu = time.process_time()
            path = strategy(url, work / "cache", report.downloads.append)
            report.fetched = time.monotonic()
            report.cpu_seconds += time.process_time() - cpu
            if checksum and hashlib.sha256(path.read_bytes()).hexdigest() != checksum:
                report.wrong_bytes.append(path.name)
    except Exception as error:
        report.error = f"{type(error).__name__}: {error}"
    report.ended = time.monotonic()
    pipe.send(report)


def run_iteration(
    strategy: Strategy,
    ranks: int,
    server: CountingServer,
    work: Path,
    preload: Sequence[str] = (__name__,),
    check: bool = True,
) -> IterationReport:
    """Starts the ranks on an empty cache and releases them at once. `preload`: modules imported beforehand."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    # The fork server and the ranks ignore Ctrl-C: this process ends them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)
    server.counts.clear()
    checksums = {
        f"{server.address}/race/files/resolve/main/{name}": hashlib.sha256(content).hexdigest() if check else ""
        for name, content in server.contents.items()
    }
    start, release = context.Pipe(duplex=False)
    readers, processes = [], []
    try:
        with sigint_blocked():
            for local_rank in range(ranks):
                reader, writer = context.Pipe(duplex=False)
                process = context.Process(target=run_rank, args=(strategy, local_rank, checksums, work, start, writer))
                process.start()
                writer.close()
                readers.append(reader)
                processes.append(process)
        for reader in readers:
            with suppress(EOFError):  # a rank that died is reported with the others
                reader.recv()
        release.close()  # all ranks read the end of file at the same moment
        reports = [_receive(local_rank, reader) for local_rank, reader in enumerate(readers)]
    except BaseException:
        for process in processes:
            process.kill()
        raise
    for process in processes:
        process.join()
    return IterationReport(
        gets={name: server.counts.get(("GET", name), 0) for name in server.contents},
        failed_ranks=sum(report.failed for report in reports),
        wrong_bytes=sum(bool(report.wrong_bytes) for report in reports),
        seconds=_span(reports),
        holder_seconds=max((one.fetched - one.began for one in reports if one.downloads), default=0.0),
        waiters_cpu_seconds=sum(one.cpu_seconds for one in reports if not one.downloads),
        downloads=[{"local_rank": one.local_rank, "url": url} for one in reports for url in one.downloads],
        errors=sorted({report.error for report in reports if report.error}),
    )


def _span(reports: list[RankReport]) -> float:
    finished = [one for one in reports if one.ended]
    return max(one.ended for one in finished) - min(one.began for one in finished) if finished else 0.0


def _receive(local_rank: int, reader: Any) -> RankReport:
    with reader:
        try:
            report: RankReport = reader.recv()
        except EOFError:
            return RankReport(local_rank, error="the rank died")
    return report


def run_race(
    strategy: Strategy, ranks: int, iterations: int, on_download: Callable[[str], None]
) -> list[IterationReport]:
    """`iterations` times: clear the cache, start the ranks. `on_download` receives a line for every download."""
    reports = []
    with counting_server(FILES, LATENCY) as server:
        for number in range(1, iterations + 1):
            with tempfile.TemporaryDirectory(prefix="holdfast-race-") as work:
                report = run_iteration(strategy, ranks, server, Path(work))
            for one in report.downloads:
                on_download(f"Iteration {number}: downloading on LOCAL_RANK {one['local_rank']} from {one['url']}")
            reports.append(report)
    return reports


STRATEGIES: dict[str, Strategy] = {"holdfast": holdfast, "naive": naive}


def summary(strategy: str, ranks: int, reports: list[IterationReport]) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "ranks": ranks,
        "iterations": len(reports),
        "gets": {name: sum(report.gets[name] for report in reports) for name in FILES},
        "failed_ranks": sum(report.failed_ranks for report in reports),
        "wrong_bytes": sum(report.wrong_bytes for report in reports),
        "per_iteration": [vars(report) for report in reports],
    }


def table(reports: list[IterationReport]) -> str:
    heads = ["iteration", *(f"GETs {name}" for name in FILES), "failed ranks", "wrong bytes", "seconds"]
    lines = ["  ".join(heads)]
    for number, one in enumerate(reports, start=1):
        cells = [number, *one.gets.values(), one.failed_ranks, one.wrong_bytes, f"{one.seconds:.2f}"]
        lines.append("  ".join(f"{cell:>{len(head)}}" for head, cell in zip(heads, cells, strict=True)))
    return "\n".join(lines)
