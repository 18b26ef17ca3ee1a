"""The folder of checkpoints of a run: which steps are there, which is the newest, which may go. No torch.

The invariant: `step-NNNNNNNN` appears by rename and goes by rename, so a reader never meets half of one; `latest` moves
after the folder it names is there. Temporary folders name the host and process that write them; those of dead processes
are removed.
"""

import os
import re
import secrets
import shutil
import socket
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME
from holdfast.publish import fsync, publish_text

STEP_FOLDER = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(r"\.step-\d{8,}\.(?P<host>.+)\.(?P<process>\d+)-[0-9a-f]{8}\.tmp")
LATEST = "latest"


def step_folder_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoints_in(path: Path | str) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first, in a run folder, its checkpoints folder, or a step folder itself."""
    folder = Path(path)
    if (folder / FILE_NAME).exists():
        match = STEP_FOLDER.fullmatch(folder.name)
        return [(int(match.group(1)) if match else 0, folder)]
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    if not folder.is_dir():
        return []
    matches = ((STEP_FOLDER.fullmatch(entry.name), entry) for entry in folder.iterdir() if entry.is_dir())
    return sorted((int(match.group(1)), entry) for match, entry in matches if match)


def newest(path: Path | str) -> Path | None:
    """The newest checkpoint under a run, checkpoints or step folder; None where there is none."""
    found = checkpoints_in(path)
    return found[-1][1] if found else None


def new_temporary(folder: Path, step: int) -> Path:
    host = socket.gethostname()
    return folder / f".{step_folder_name(step)}.{host}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def remove_dead_temporaries(folder: Path) -> list[Path]:
    """Removes what killed writers on this host left behind; never what a living process writes."""
    removed = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = TEMPORARY.fullmatch(entry.name)
        if match and match["host"] == socket.gethostname() and not _alive(int(match["process"])):
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
    return removed


def publish_step(temporary: Path, final: Path) -> None:
    """Gives a complete temporary folder its name, in place of an older one of the same step, and points `latest` at it."""
    fsync(temporary)
    if final.exists():
        aside = new_temporary(final.parent, 0)
        os.rename(final, aside)
        os.rename(temporary, final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(temporary, final)
    fsync(final.parent)
    publish_text(final.parent / LATEST, final.name + "\n")


def retain(folder: Path, keep_last: int | None, keep_every: int | None) -> list[Path]:
    """Removes all but the newest `keep_last` checkpoints and those whose step `keep_every` divides. None keeps all."""
    if keep_last is None:
        return []
    removed = []
    for step, path in checkpoints_in(folder)[: -max(1, keep_last)]:
        if keep_every and step % keep_every == 0:
            continue
        aside = new_temporary(folder, step)
        os.rename(path, aside)
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(path)
    return removed


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
