"""`bench fetch`: the race of 64 processes, a cached fetch, and what waiting processes cost the one that downloads.

Every library is imported before the clock starts.
"""

import functools
import statistics
import tempfile
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from holdfast.assets import race
from holdfast.assets.race import IterationReport, OnRequest, Strategy
from holdfast.bench.harness import Row, Tables, installed, median, median_ratio, refuse_unknown, run_rounds, show, timed

BIG_FILE = 512 << 20  # bytes


def with_filelock(url: str, folder: Path, on_request: OnRequest) -> Path:
    """The usual recipe: a file lock around look, download to `.incomplete`, rename."""
    import urllib.request

    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _name(url)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            on_request(url)
            urllib.request.urlretrieve(url, f"{path}.incomplete")
            Path(f"{path}.incomplete").rename(path)
    return path


def with_huggingface_hub(url: str, folder: Path, on_request: OnRequest) -> Path:
    from huggingface_hub import hf_hub_download

    endpoint = url.removesuffix(urllib.parse.urlsplit(url).path)
    return Path(hf_hub_download("race/files", _name(url), cache_dir=folder, endpoint=endpoint, token=False))


def with_pooch(url: str, folder: Path, on_request: OnRequest) -> Path:
    import pooch

    pooch.get_logger().setLevel("ERROR")
    return Path(pooch.retrieve(url, known_hash=None, fname=_name(url), path=folder))


def with_torch_hub(url: str, folder: Path, on_request: OnRequest) -> Path:
    import torch

    path = folder / _name(url)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), progress=False)
    return path


PEERS: dict[str, tuple[Strategy, str]] = {
    "filelock": (with_filelock, "filelock"),
    "huggingface_hub": (with_huggingface_hub, "huggingface_hub.file_download"),
    "pooch": (with_pooch, "pooch"),
    "torch.hub": (with_torch_hub, "torch.hub"),
    "naive": (race.naive, "urllib.request"),
}


def _name(url: str) -> str:
    return url.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class FetchBench:
    """Measure fetching beside the libraries that people fetch with.

    Examples:

      holdfast bench fetch
      holdfast bench fetch --against pooch huggingface_hub --rounds 3
    """

    against: tuple[str, ...] = tuple(PEERS)
    """Peers. Those that are not installed are left out."""
    ranks: int = 64
    """Processes that fetch at the same time."""
    rounds: int = 5
    """How often each is measured."""
    big_file: int = BIG_FILE
    """Size in bytes of the file that one process downloads while the others wait."""
    json: bool = False
    """Print the tables as JSON."""


def bench(options: FetchBench) -> None:
    show("fetch", run(options), options.json)


def run(options: FetchBench) -> Tables:
    refuse_unknown(options.against, PEERS)
    peers = installed({name: PEERS[name][1] for name in options.against})
    strategies: dict[str, Strategy] = {"holdfast": race.holdfast, **{name: PEERS[name][0] for name in peers}}
    modules = ["holdfast.bench.fetch", "httpx", *(PEERS[name][1] for name in peers)]
    megabytes, waiters = options.big_file / 1e6, options.ranks - 1
    return {
        f"{options.ranks} processes ask for GPT-2's two files at once, {race.LATENCY} s latency": measure_race(
            strategies, options.ranks, options.rounds, modules
        ),
        "a file that is already cached, in one process": measure_cached(strategies, options.rounds),
        f"one process downloads {megabytes:.0f} MB at full speed, alone and with {waiters} waiting": measure_waiting(
            options.ranks, options.rounds, options.big_file
        ),
    }


def measure_race(strategies: dict[str, Strategy], ranks: int, rounds: int, modules: list[str]) -> list[Row]:
    heads = dict.fromkeys(strategies, 0)

    def turn(name: str) -> IterationReport:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as work:
            report = race.run_iteration(strategies[name], ranks, server, Path(work), modules)
        heads[name] += sum(count for (method, _), count in server.counts.items() if method == "HEAD")
        return report

    with race.counting_server(race.FILES, race.LATENCY) as server:
        reports = run_rounds({name: functools.partial(turn, name) for name in strategies}, rounds)
    return [
        {
            "strategy": name,
            **{f"GETs {file}": statistics.mean(one.gets[file] for one in own) for file in race.FILES},
            "HEADs": heads[name] / rounds,
            "failed processes": statistics.mean(one.failed_ranks for one in own),
            "wall / holdfast": median_ratio(own, reports["holdfast"], lambda one: one.seconds),
            "wall s": median(own, lambda one: one.seconds),
        }
        for name, own in reports.items()
    ]


def measure_cached(strategies: dict[str, Strategy], rounds: int, calls: int = 200) -> list[Row]:
    with race.counting_server({"gpt2-vocab.json": 1_042_301}, 0.0) as server, tempfile.TemporaryDirectory() as work:
        url = f"{server.address}/race/files/resolve/main/gpt2-vocab.json"

        def turn(name: str) -> float:
            fetch = functools.partial(strategies[name], url, Path(work, name), lambda url: None)
            fetch()
            return timed(lambda: [fetch() for _ in range(calls)]) / calls

        turns = {name: functools.partial(turn, name) for name in strategies if name != "naive"}
        seconds = run_rounds(turns, rounds)
    return [{"strategy": name, "ms per call": statistics.median(own) * 1e3} for name, own in seconds.items()]


def measure_waiting(ranks: int, rounds: int, big_file: int) -> list[Row]:
    """The holder's time alone and among waiters. The cache is in memory if possible: the disk is not what is measured."""
    memory = Path("/dev/shm")

    def turn(count: int) -> IterationReport:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=memory if memory.is_dir() else None) as work:
            return race.run_iteration(race.holdfast, count, server, Path(work), check=False)

    with race.counting_server({"big.bin": big_file}, 0.0) as server:
        turns = {"alone": functools.partial(turn, 1), "waited for": functools.partial(turn, ranks)}
        reports = run_rounds(turns, rounds)
    return [
        {
            "processes": count,
            "holder's s": median(own, lambda one: one.holder_seconds),
            "/ alone": median_ratio(own, reports["alone"], lambda one: one.holder_seconds),
            "waiters' CPU s": median(own, lambda one: one.waiters_cpu_seconds),
        }
        for count, own in zip((1, ranks), reports.values(), strict=True)
    ]
