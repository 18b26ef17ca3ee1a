"""PREFIX.json: the input, tokenizer, versions and results of a dataset; and the summary for people."""

import contextlib
import functools
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from holdfast.system.errors import HoldfastError
from holdfast.system.progress import count_of

if TYPE_CHECKING:
    from holdfast.data.preprocess.build import DatasetBuild

FORMAT = "holdfast dataset"
PACKAGES = ("holdfast", "fastokens", "tokenizers", "sentencex", "numpy", "orjson", "zstandard", "pyarrow")


@dataclass(frozen=True)
class Summary:
    """What a run of preprocess made. `outputs` are the prefixes of the .bin/.idx pairs."""

    outputs: tuple[str, ...]
    documents: int
    sequences: int
    tokens: int
    input_bytes: int
    bytes_per_token: float
    bad_lines: int
    seconds: float
    peak_memory_bytes: int
    engine: str
    provenance: str
    already_complete: bool = field(default=False)

    def lines(self) -> list[str]:
        """The summary for a person."""
        megabytes = self.input_bytes / 1e6
        rate = megabytes / self.seconds if self.seconds else 0.0
        done = "already complete: " if self.already_complete else ""
        return [
            f"{done}{count_of(self.documents, 'document')}, {count_of(self.tokens, 'token')}, "
            f"{self.bytes_per_token:.2f} bytes per token, {count_of(self.bad_lines, 'bad line')}",
            f"{megabytes:,.1f} MB in {self.seconds:.2f} s ({rate:,.1f} MB/s) with {self.engine}, "
            f"peak memory {self.peak_memory_bytes / 1e6:,.0f} MB",
        ]


def provenance_path(prefix: str, inputs: Sequence[str]) -> Path:
    """PREFIX.json, or PREFIX.provenance.json where that name is an input or a file that Holdfast did not write."""
    path = Path(prefix + ".json")
    taken = any(Path(name).resolve() == path.resolve() for name in inputs if name != "-")
    if taken or (path.exists() and read_provenance(path) is None):
        return Path(prefix + ".provenance.json")
    return path


def read_provenance(path: Path) -> dict[str, Any] | None:
    """The content of a provenance file; None if there is none, or the file is something else."""
    try:
        with path.open("rb") as file:
            if FORMAT.encode() not in file.read(100):
                return None
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def tokenizer_of_data(prefix: Path | str) -> dict[str, Any] | None:
    """The tokenizer of a .bin/.idx pair by its PREFIX.json: type, digest_sha256, vocab_size. None without such a record.

    A record whose file sizes differ from the files is ignored.
    """
    pair = Path(prefix)
    parts = pair.name.split("_")
    stems = ["_".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]
    for name in (f"{stem}{ending}" for stem in stems for ending in (".json", ".provenance.json")):
        content = read_provenance(pair.with_name(name)) or {}
        for output in content.get("outputs", ()):
            if Path(output["prefix"]).name == pair.name and _has_sizes(pair, output):
                found = content.get("tokenizer")
                return found if isinstance(found, dict) and isinstance(found.get("digest_sha256"), str) else None
    return None


def _has_sizes(prefix: Path | str, output: Mapping[str, Any]) -> bool:
    """Whether both files of a pair are there, with the sizes that an output of a provenance file states."""
    files = [(Path(f"{prefix}.{ending}"), output.get(f"{ending}_bytes")) for ending in ("bin", "idx")]
    return all(file.is_file() and file.stat().st_size == size for file, size in files)


@functools.cache
def versions() -> dict[str, str]:
    """Of Python and of the packages that make a dataset."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def describe(
    task: "DatasetBuild",
    summary: Summary,
    settings: Mapping[str, Any],
    sizes: Sequence[tuple[int, int, int]],
    digests: Mapping[str, str],
) -> bytes:
    """The content of the provenance file; `sizes`: bytes, sequences and documents of each output."""
    recipe = task.recipe
    content = {
        "format": FORMAT,
        "summary": asdict(summary),
        "outputs": [
            {
                "prefix": output,
                "bin_bytes": size,
                "idx_bytes": 34 + 12 * sequences + 8 * (documents + 1),
                "sequences": sequences,
                "documents": documents,
                "dtype": str(task.dtype),
            }
            for output, (size, sequences, documents) in zip(task.outputs, sizes, strict=True)
        ],
        "input_digests_xxh3_128": digests,
        "tokenizer": {
            "type": recipe.tokenizer_type,
            "digest_sha256": recipe.digest,
            "vocab_size": recipe.vocab_size,
            "eod": recipe.eod,
        },
        "workers": task.options.worker_count,
        "settings": settings,
        "versions": versions(),
    }
    return orjson.dumps(content, option=orjson.OPT_INDENT_2) + b"\n"


def completed_summary(path: Path, settings: Mapping[str, Any]) -> Summary | None:
    """The summary of an earlier run that made the same, and whose files are all there with their sizes."""
    content = read_provenance(path)
    if content is None or _result_settings(content.get("settings", {})) != _result_settings(settings):
        return None
    if content["summary"]["bad_lines"] and settings["on_bad_line"] == "fail":
        return None
    if not all(_has_sizes(output["prefix"], output) for output in content["outputs"]):
        return None
    summary = {**content["summary"], "outputs": tuple(content["summary"]["outputs"]), "already_complete": True}
    return Summary(**summary)


def _result_settings(settings: Mapping[str, Any]) -> Any:
    """The settings without those that do not change the result: without bad lines it does not matter how they are treated."""
    kept = {name: value for name, value in settings.items() if name not in ("on_bad_line", "unit_bytes")}
    return orjson.loads(orjson.dumps(kept))


def refuse_to_replace(paths: Sequence[Path]) -> None:
    there = [path for path in paths if path.exists()]
    if there:
        raise HoldfastError(
            f"{there[0]} exists already and was made from other input or with other settings; "
            "choose another --output-prefix, or pass --overwrite to replace it"
        )
