"""The folder that the demo works in: marked as its own, so that it never removes a file of the user.

The invariant: a folder without the marker is used only if it is missing or empty; in a marked one only the names that the demo
itself writes are removed.
"""

import shutil
from pathlib import Path

from holdfast.system.atomic_files import explain_os_error
from holdfast.system.errors import HoldfastError

MARKER = ".holdfast-demo"
WRITTEN = (
    *("corpus.jsonl", "tokenizer", "undisturbed", "disturbed", "undisturbed.log", "disturbed.log", "huggingface"),
    *("stdlib.json", "stdlib.preprocessing", "stdlib_text_document.bin", "stdlib_text_document.idx"),
    *("stdlib_text_document.index", "report.html"),
)
"""Every name that the demo gives to a file or folder in its work folder."""


def claim(work: Path) -> None:
    """Makes the folder the demo's own and removes what an earlier demo left there; refuses a folder with other files."""
    try:
        work.mkdir(parents=True, exist_ok=True)
        if not (work / MARKER).is_file() and any(work.iterdir()):
            raise HoldfastError(
                f"{work} contains files that the demo did not write; the demo needs a folder of its own: "
                f"pass another one, for example --workdir {work / 'holdfast-demo'}"
            )
        (work / MARKER).write_text(f"`holdfast demo` works here. Its next run removes: {', '.join(WRITTEN)}.\n")
        _remove_written(work)
    except OSError as error:
        raise explain_os_error(error, work / MARKER) from error


def remove(work: Path) -> None:
    """Removes what the demo wrote, and the folder unless it contains other files."""
    _remove_written(work)
    (work / MARKER).unlink(missing_ok=True)
    if not any(work.iterdir()):
        work.rmdir()


def _remove_written(work: Path) -> None:
    for path in (work / name for name in WRITTEN):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
