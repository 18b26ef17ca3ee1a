"""The verbs `fetch` and `fetch-storm`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from holdfast.errors import HoldfastError, UsageError
from holdfast.flags import Words, words

NOTHING = words()


def fetch(
    names: Annotated[Words, tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_URL...")] = NOTHING,
    /,
    *,
    sha256: str | None = None,
    cache_dir: Path | None = None,
    timeout: float | None = None,
    offline: bool = False,
    list: bool = False,
    json: bool = False,
) -> None:
    """Brings files into the cache exactly once, however many processes ask, and prints their local paths.

    A file appears under its name only when it is whole and checked. If the process that downloads dies, another one
    continues its bytes. The cache is --cache-dir, else $HOLDFAST_CACHE, else $MEGATRON_CACHE, else your cache folder.

    For example:

    $ holdfast fetch gpt2
    $ holdfast fetch gpt2/vocab bert-large-uncased
    $ holdfast fetch https://example.org/corpus.jsonl.xz --sha256 9f86d081...
    $ holdfast fetch hf://openai-community/gpt2/config.json --cache-dir /shared/cache
    $ holdfast fetch --list

    Args:
        names: URLs (http, https, file, hf, s3) or names of the catalog.
        sha256: The checksum that the (single) file must have.
        cache_dir: Where files are kept.
        timeout: Seconds until it gives up, whoever is downloading. Default: as long as somebody makes progress.
        offline: Only what is cached; also HOLDFAST_OFFLINE=1.
        list: Show the names of the catalog.
        json: Print what was fetched as JSON.
    """
    from holdfast.assets.catalog import wanted_files
    from holdfast.assets.fetching import fetch_wanted, with_checksum

    if list:
        _print_catalog(json)
        return
    if not names:
        raise UsageError("nothing to fetch: give a URL or a name (holdfast fetch --list shows the names)")
    wanted = [one for name in names for one in wanted_files(name).values()]
    if sha256 is not None and len(wanted) != 1:
        raise UsageError(f"--sha256 is the checksum of one file, and {' '.join(names)} asks for {len(wanted)}")
    results = []
    for one in wanted:
        fetched = fetch_wanted(with_checksum(one, sha256), cache_dir, timeout, offline or None)
        results.append(fetched)
        if not json:
            print(fetched.path, flush=True)
    if json:
        _print_json([{**vars(fetched), "path": str(fetched.path)} for fetched in results])


def _print_catalog(json: bool) -> None:
    from holdfast.assets.catalog import CATALOG

    if json:
        _print_json(
            {
                name: {"summary": known.summary, "files": {role: vars(one) for role, one in known.files.items()}}
                for name, known in CATALOG.items()
            }
        )
        return
    for name, known in CATALOG.items():
        print(f"{name}: {known.summary}")
        for role, one in known.files.items():
            size = f"{one.size:,} bytes" if one.size else "size not known"
            print(f"  {name}/{role}  {size}, {'sha256 known' if one.sha256 else 'sha256 recorded at first download'}")
            for url in (one.url, *one.mirrors):
                print(f"    {url}")


def fetch_storm(
    *,
    ranks: int = 64,
    iterations: int = 10,
    strategy: Literal["holdfast", "naive"] = "holdfast",
    json: bool = False,
) -> None:
    """Reproduces the many-ranks download race on loopback, and shows that it is gone.

    A server with some latency has two files of the sizes of GPT-2's vocabulary and merges. All ranks ask for them in the same
    instant, with an empty cache, in every iteration. `naive` looks, downloads to the working folder and moves, as many job
    scripts do. The cache lies in $TMPDIR: point it at a shared folder to try that file system.

    For example:

    $ holdfast fetch-storm --strategy naive
    $ holdfast fetch-storm --ranks 256 --iterations 1
    $ TMPDIR=/lustre/scratch holdfast fetch-storm --json

    Args:
        ranks: Processes that ask at once.
        iterations: How often; the cache is cleared in between.
        strategy: How the ranks fetch.
        json: Print the counts as JSON.
    """
    from holdfast.assets import storm

    if ranks < 1 or iterations < 1:
        raise UsageError("--ranks and --iterations start at 1")
    reports = storm.run_storm(
        storm.STRATEGIES[strategy],
        ranks,
        iterations,
        tell=lambda line: print(line, file=sys.stderr if json else sys.stdout, flush=True),
    )
    total = storm.summary(strategy, ranks, reports)
    if json:
        _print_json(total)
    else:
        print(storm.table(reports))
    once = all(count == 1 for report in reports for count in report.gets.values())
    if strategy == "holdfast" and (total["failed_ranks"] or not once):
        errors = sorted({error for report in reports for error in report.errors})
        raise HoldfastError(
            f"the storm broke through: {total['failed_ranks']} failed ranks, GETs {total['gets']} {errors}"
        )


def _print_json(value: object) -> None:
    import json

    json.dump(value, sys.stdout, indent=1)
    print()
