"""Atomic publish: every file that another process may read appears by rename, complete and on disk.

The invariant: a final name either does not exist, holds what it held before, or holds the whole new content. The temporary
name is in the same folder (rename never crosses a file system), starts with a dot and ends with `.tmp`, and is removed
when the writer fails; a killed writer leaves at most such a name behind, which no reader opens, and which names the writer: the
next writer of a large result removes it.
"""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.system.errors import HoldfastError
from holdfast.system.processes import PROCESS_KEY, names_dead_process, process_key

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
TEMPORARY = re.compile(rf"\.{PROCESS_KEY}-[0-9a-f]{{8}}\.tmp")
"""What `temporary_beside` puts behind the name."""


def temporary_beside(path: Path) -> Path:
    """A new name in the folder of `path` that readers ignore."""
    return path.with_name(f".{path.name}.{process_key()}-{secrets.token_hex(4)}.tmp")


def remove_leftovers(*paths: Path) -> None:
    """Removes what writers of these files or folders left behind that were killed on this machine, if this user may."""
    for path in paths:
        with suppress(OSError):
            for entry in path.parent.iterdir():
                match = TEMPORARY.fullmatch(entry.name.removeprefix(f".{path.name}"))
                if match and names_dead_process(match):
                    remove = shutil.rmtree if entry.is_dir() and not entry.is_symlink() else os.unlink
                    with suppress(OSError):
                        remove(entry)


def remove_temporaries(path: Path) -> None:
    """Removes what killed writers of this file left behind. Only for the only process that writes the file."""
    for entry in path.parent.iterdir() if path.parent.is_dir() else ():
        if entry.name.startswith(f".{path.name}.") and entry.name.endswith(".tmp"):
            entry.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Makes a file's content, or a folder's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_into_place(temporary: Path, final: Path) -> None:
    """The last step of every publish: gives `temporary`, complete and synced, the name `final`."""
    os.replace(temporary, final)
    fsync(final.parent)


def replace_file(path: Path, content: bytes, opener: Callable[[str, int], int] | None = None) -> None:
    """Replaces a small record in one rename, without fsync: for records that are worthless after a power cut."""
    temporary = temporary_beside(path)
    try:
        with open(temporary, "xb", opener=opener) as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def remove_folder(folder: Path, aside: Path) -> None:
    """Removes a folder: its name goes at once, by rename to `aside`, so that no reader finds half of it."""
    os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def check_can_write(path: Path | str) -> None:
    """Raises if `path` cannot be created, before long work for it begins."""
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not folder.is_dir():
        raise explain_os_error(NotADirectoryError(errno.ENOTDIR, "", str(folder)), Path(path))
    if not os.access(folder, os.W_OK | os.X_OK):
        raise explain_os_error(PermissionError(errno.EACCES, os.strerror(errno.EACCES)), Path(path))


def make_folder(folder: Path, path: Path) -> None:
    """Creates the folder that `path` is to be written to, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:
        raise HoldfastError(f"cannot write {path}: no folder can be created in {folder.parent}") from error
    except OSError as error:
        raise explain_os_error(error, path) from error


@contextmanager
def publish_file(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path to write; on a clean exit the content becomes `path`, on an exception nothing changes."""
    final = Path(path)
    make_folder(final.parent, final)
    temporary = temporary_beside(final)
    try:
        yield temporary
        fsync(temporary)
        rename_into_place(temporary, final)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise explain_os_error(error, final) from error
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def publish_bytes(path: Path | str, content: bytes) -> None:
    with publish_file(path) as temporary:
        temporary.write_bytes(content)


def publish_text(path: Path | str, content: str) -> None:
    publish_bytes(path, content.encode())


@contextmanager
def publish_folder(path: Path | str) -> Iterator[Path]:
    """As `publish_file`, for a folder of files. Refuses to replace a folder that is not empty."""
    final = Path(path)
    make_folder(final.parent, final)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise HoldfastError(f"{final} already exists; choose another name or remove it first")
    remove_leftovers(final)
    temporary = temporary_beside(final)
    try:
        temporary.mkdir()
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                fsync(Path(folder, name))
            fsync(Path(folder))
        rename_into_place(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise explain_os_error(error, final) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def explain_os_error(error: OSError, path: Path) -> Exception:
    """Turns a failed write that the user can fix into a message; returns other errors unchanged."""
    if error.errno in DISK_FULL:
        return HoldfastError(f"no room left on the disk of {path.parent}: free some space or choose another folder")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return HoldfastError(f"cannot write {path}: {error.strerror}; choose a folder that you may write to")
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return HoldfastError(f"cannot write {path}: {error.filename} is not a folder")
    return error
