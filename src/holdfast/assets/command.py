"""The verb `fetch`."""

import sys
from pathlib import Path
from typing import Annotated

import tyro

from holdfast.errors import UsageError


def fetch(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_URL...")] = (),
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


def _print_json(value: object) -> None:
    import json

    json.dump(value, sys.stdout, indent=1)
    print()
