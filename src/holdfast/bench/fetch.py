"""How fetching compares: the race of 64 processes, a cached fetch, and what waiting processes cost the one that downloads.

Every library is imported before the clock starts, for all alike. Strategies take turns within a round, so that whatever else
the machine does hits them alike; ratios are taken within a round and their median is reported.
"""

import functools
import importlib.util
import statistics
import tempfile
import time
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.assets import storm
from holdfast.assets.storm import Announce, IterationReport, Strategy
from holdfast.bench.command import Tables, refuse_unknown, show

BIG_FILE = 512 << 20  # bytes


def with_filelock(url: str, folder: Path, announce: Announce) -> Path:
    """The usual recipe: a file lock around look, download to `.incomplete`, rename."""
    import urllib.request

    from filelock import FileLock

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _name(url)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            announce(url)
            urllib.request.urlretrieve(url, f"{path}.incomplete")
            Path(f"{path}.incomplete").rename(path)
    return path


def with_huggingface_hub(url: str, folder: Path, announce: Announce) -> Path:
    from huggingface_hub import hf_hub_download

    endpoint = url.removesuffix(urllib.parse.urlsplit(url).path)
    return Path(hf_hub_download("storm/files", _name(url), cache_dir=folder, endpoint=endpoint, token=False))


def with_pooch(url: str, folder: Path, announce: Announce) -> Path:
    import pooch

    pooch.get_logger().setLevel("ERROR")
    return Path(pooch.retrieve(url, known_hash=None, fname=_name(url), path=folder))


def with_torch_hub(url: str, folder: Path, announce: Announce) -> Path:
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
    "naive": (storm.naive, "urllib.request"),
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
    """Processes that ask at once."""
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
    strategies: dict[str, Strategy] = {"holdfast": storm.holdfast}
    modules = ["holdfast.bench.fetch", "httpx"]
    for peer in options.against:
        strategy, module = PEERS[peer]
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            strategies[peer] = strategy
            modules.append(module)
    big_title = f"one process downloads {options.big_file / 1e6:.0f} MB at full speed, alone and with {options.ranks - 1} waiting"
    return {
        f"{options.ranks} processes ask for GPT-2's two files at once, {storm.LATENCY} s latency": race(
            strategies, options.ranks, options.rounds, modules
        ),
        "a file that is already cached, in one process": cached(strategies, options.rounds),
        big_title: waiting(options.ranks, options.rounds, options.big_file),
    }


def race(strategies: dict[str, Strategy], ranks: int, rounds: int, modules: list[str]) -> list[dict[str, Any]]:
    reports: dict[str, list[IterationReport]] = {name: [] for name in strategies}
    heads: dict[str, int] = dict.fromkeys(strategies, 0)
    with storm.counting_server(storm.FILES, storm.LATENCY) as server:
        for _ in range(rounds):
            for name, strategy in strategies.items():
                with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as work:
                    reports[name].append(storm.run_iteration(strategy, ranks, server, Path(work), modules))
                heads[name] += sum(count for (method, _), count in server.counts.items() if method == "HEAD")
    rows = []
    for name, all_rounds in reports.items():
        row: dict[str, Any] = {"strategy": name}
        row |= {f"GETs {file}": statistics.mean(one.gets[file] for one in all_rounds) for file in storm.FILES}
        row["HEADs"] = heads[name] / rounds
        row["failed processes"] = statistics.mean(one.failed_ranks for one in all_rounds)
        row["wall / holdfast"] = statistics.median(
            one.seconds / ours.seconds for one, ours in zip(all_rounds, reports["holdfast"], strict=True)
        )
        row["wall s"] = statistics.median(one.seconds for one in all_rounds)
        rows.append(row)
    return rows


def cached(strategies: dict[str, Strategy], rounds: int, calls: int = 200) -> list[dict[str, Any]]:
    times: dict[str, list[float]] = {name: [] for name in strategies}
    with storm.counting_server({"gpt2-vocab.json": 1_042_301}, 0.0) as server, tempfile.TemporaryDirectory() as work:
        url = f"{server.address}/storm/files/resolve/main/gpt2-vocab.json"
        asks: dict[str, Callable[[], Path]] = {
            name: functools.partial(strategy, url, Path(work, name), lambda url: None)
            for name, strategy in strategies.items()
            if name != "naive"
        }
        for _ in range(rounds):
            for name, ask in asks.items():
                ask()
                began = time.perf_counter()
                for _ in range(calls):
                    ask()
                times[name].append((time.perf_counter() - began) / calls)
    return [{"strategy": name, "ms per call": statistics.median(times[name]) * 1e3} for name in asks]


def waiting(ranks: int, rounds: int, big_file: int) -> list[dict[str, Any]]:
    """The holder's time alone and among waiters. The cache is in memory if possible: the disk's moods are not in question."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else None
    alone: list[IterationReport] = []
    among: list[IterationReport] = []
    with storm.counting_server({"big.bin": big_file}, 0.0) as server:
        for _ in range(rounds):
            for count, reports in ((1, alone), (ranks, among)):
                with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir=folder) as work:
                    reports.append(storm.run_iteration(storm.holdfast, count, server, Path(work), check=False))
    return [
        {
            "processes": count,
            "holder's s": statistics.median(one.holder_seconds for one in reports),
            "/ alone": statistics.median(
                one.holder_seconds / base.holder_seconds for one, base in zip(reports, alone, strict=True)
            ),
            "waiters' CPU s": statistics.median(one.waiters_cpu_seconds for one in reports),
        }
        for count, reports in ((1, alone), (ranks, among))
    ]
