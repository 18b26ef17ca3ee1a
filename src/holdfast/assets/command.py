"""The verbs `fetch` and `fetch-storm`."""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.command_line.flags import positional
from holdfast.command_line.results import print_json, print_result
from holdfast.system.errors import HoldfastError, UsageError


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """Download files into the cache exactly once, however many processes ask, and print their local paths.

    A file appears under its name only when it is complete and its checksum is right. If the process that downloads dies,
    another one continues from its last byte. The cache is --cache-dir, else $HOLDFAST_CACHE, else $MEGATRON_CACHE, else your
    cache folder.

    Examples:

      holdfast fetch --list
      holdfast fetch gpt2
      holdfast fetch gpt2/vocab bert-large-uncased
      holdfast fetch https://example.org/corpus.jsonl.xz --timeout 600
      holdfast fetch hf://openai-community/gpt2/config.json --cache-dir /shared/cache
    """

    names: tuple[str, ...] = field(default=(), metadata=positional("NAME_OR_URL"))
    """URLs (http, https, file, hf, s3) or names from the catalog."""
    sha256: str | None = None
    """Checksum that the (single) file must have, in hexadecimal."""
    cache_dir: Path | None = None
    """Folder that keeps the files."""
    timeout: float | None = None
    """Time limit in seconds, whichever process downloads. Unset: as long as the download makes progress."""
    offline: bool = False
    """Use only what is in the cache. HOLDFAST_OFFLINE=1 does the same."""
    list: bool = False
    """Print the names in the catalog."""
    json: bool = False
    """Print the result as JSON."""


def fetch(options: FetchOptions) -> None:
    from holdfast.assets.catalog import file_specs
    from holdfast.assets.fetching import fetch_file, with_checksum

    if options.list:
        _print_catalog(options.json)
        return
    names, sha256 = options.names, options.sha256
    if not names:
        raise UsageError("nothing to fetch: give a URL or a name (holdfast fetch --list shows the names)")
    specs = [spec for name in names for spec in file_specs(name).values()]
    if sha256 is not None and len(specs) != 1:
        raise UsageError(f"--sha256 is the checksum of one file, and {' '.join(names)} names {len(specs)}")
    if options.timeout is not None and options.timeout <= 0:
        raise UsageError(f"--timeout {options.timeout:g}: a time limit must be more than 0 seconds")
    results = []
    for spec in specs:
        fetched = fetch_file(with_checksum(spec, sha256), options.cache_dir, options.timeout, options.offline or None)
        results.append(fetched)
        if not options.json:
            print(fetched.path, flush=True)
    if options.json:
        print_json([{**vars(fetched), "path": str(fetched.path)} for fetched in results])


def _print_catalog(json: bool) -> None:
    from holdfast.assets.catalog import CATALOG

    if json:
        print_json(
            {
                name: {"summary": entry.summary, "files": {role: vars(spec) for role, spec in entry.files.items()}}
                for name, entry in CATALOG.items()
            }
        )
        return
    for name, entry in CATALOG.items():
        print(f"{name}: {entry.summary}")
        for role, spec in entry.files.items():
            size = f"{spec.size:,} bytes" if spec.size else "size not known"
            print(f"  {name}/{role}  {size}, {'sha256 known' if spec.sha256 else 'sha256 recorded at first download'}")
            for url in (spec.url, *spec.mirrors):
                print(f"    {url}")


@dataclass(frozen=True, kw_only=True)
class FetchStormOptions:
    """Reproduce the many-ranks download race on loopback, and show that it is gone.

    A server with some latency has two files of the sizes of GPT-2's vocabulary and merges. All ranks fetch them at the same
    time, with an empty cache, in every iteration. The strategy `naive` checks, downloads to the working folder and moves, as
    many job scripts do. The cache is in $TMPDIR: set it to a shared folder to test that file system.

    Examples:

      holdfast fetch-storm --ranks 8 --iterations 1
      holdfast fetch-storm --strategy naive
      TMPDIR=/lustre/scratch holdfast fetch-storm --json
    """

    ranks: int = 64
    """Processes that fetch at the same time."""
    iterations: int = 10
    """Repetitions; the cache is cleared in between."""
    strategy: Literal["holdfast", "naive"] = "holdfast"
    """How the ranks fetch."""
    json: bool = False
    """Print the counts as JSON."""


def fetch_storm(options: FetchStormOptions) -> None:
    from holdfast.assets import race
    from holdfast.system.progress import count_of

    if options.ranks < 1 or options.iterations < 1:
        raise UsageError("--ranks and --iterations must be at least 1")
    reports = race.run_race(
        race.STRATEGIES[options.strategy],
        options.ranks,
        options.iterations,
        on_download=lambda line: print(line, file=sys.stderr if options.json else sys.stdout, flush=True),
    )
    total = race.summary(options.strategy, options.ranks, reports)
    print_result(total, race.table(reports), options.json)
    once = all(count == 1 for report in reports for count in report.gets.values())
    if options.strategy == "holdfast" and (total["failed_ranks"] or not once):
        errors = sorted({error for report in reports for error in report.errors})
        raise HoldfastError(
            f"fetch-storm failed: expected one GET per file, got {total['gets']}; "
            f"{count_of(total['failed_ranks'], 'failed rank')} {errors}"
        )
