"""The folder of checkpoints of a run: which steps exist, which is the newest. No torch.

The invariant: `step-NNNNNNNN` appears and disappears by rename, so a reader never finds half of one; a step that is written again
replaces the older one in one exchange; `latest` changes after the folder it names exists. The name of a temporary folder
identifies the process that writes it: machine (boot and pid namespace), process number and start time. It is removed only by a
process that can prove that this one is dead.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME
from holdfast.system.atomic_files import fsync, publish_text, remove_temporaries, rename_into_place
from holdfast.system.processes import PROCESS_KEY, names_dead_process, process_key

STEP_FOLDER = re.compile(r"step-(\d{8,})")
TEMPORARY = re.compile(rf"\.step-\d{{8,}}\.{PROCESS_KEY}-[0-9a-f]{{8}}\.tmp")
SHARED_TEMPORARY = re.compile(r"\.step-\d{8,}\.(?P<token>[0-9a-f]{16})\.tmp")
LATEST = "latest"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


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
    """The newest checkpoint under a run, checkpoints or step folder; None if there is none."""
    found = checkpoints_in(path)
    return found[-1][1] if found else None


def new_temporary(folder: Path, step: int) -> Path:
    return folder / f".{step_folder_name(step)}.{process_key()}-{secrets.token_hex(4)}.tmp"


def shared_temporary(folder: Path, step: int, token: str) -> Path:
    """The folder in which the keepers of several nodes write one step together, named by the start of the run."""
    return folder / f".{step_folder_name(step)}.{token}.tmp"


def remove_dead_temporaries(folder: Path) -> list[Path]:
    """Removes the temporary folders of killed writers of this machine; those of another machine or container are left alone."""
    removed = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = TEMPORARY.fullmatch(entry.name)
        if match and names_dead_process(match):
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
    return removed


def remove_earlier_starts(folder: Path, token: str) -> list[Path]:
    """Removes the shared temporaries of other starts of the run, and those of `latest`. Only for the owner of the run: its keeper
    with rank 0."""
    remove_temporaries(folder / LATEST)
    removed = []
    for entry in folder.iterdir():
        match = SHARED_TEMPORARY.fullmatch(entry.name)
        if match and match["token"] != token:
            shutil.rmtree(entry, ignore_errors=True)
            removed.append(entry)
    return removed


def publish_step(temporary: Path, final: Path) -> None:
    """Renames a complete temporary folder to its final name, replacing an older one of the same step; then updates `latest`."""
    fsync(temporary)
    if final.exists() and _exchange(temporary, final):
        fsync(final.parent)
        shutil.rmtree(temporary, ignore_errors=True)
    else:
        replaced = new_temporary(final.parent, 0)
        with contextlib.suppress(FileNotFoundError):
            os.rename(final, replaced)
        rename_into_place(temporary, final)
        shutil.rmtree(replaced, ignore_errors=True)
    point_latest(final)


def point_latest(final: Path) -> None:
    publish_text(final.parent / LATEST, final.name + "\n")


def latest_name(folder: Path) -> str | None:
    """The name of the step folder that `latest` names; None if there is none."""
    try:
        return (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step, so that neither is ever absent; False if the file system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))
