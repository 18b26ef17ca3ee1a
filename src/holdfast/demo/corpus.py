"""The demo's text: the sources of the Python standard library on this machine. Nothing is bundled or fetched."""

import sysconfig
from pathlib import Path

import orjson

from holdfast.system.atomic_files import publish_file
from holdfast.system.errors import HoldfastError

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def collect_standard_library(path: Path, most_bytes: int) -> tuple[int, int]:
    """Writes one JSON line per module, up to about `most_bytes` of text; returns how many files and bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if not LEFT_OUT & set(file.relative_to(root).parts))
    count = size = 0
    with publish_file(path) as temporary, temporary.open("wb") as out:
        for file in files:
            if size >= most_bytes:
                break
            try:
                text = file.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                out.write(orjson.dumps({"text": text, "path": str(file.relative_to(root))}) + b"\n")
                count, size = count + 1, size + len(text.encode())
    if not count:
        raise HoldfastError(f"found no Python sources below {root}; the demo trains on the standard library's sources")
    return count, size
