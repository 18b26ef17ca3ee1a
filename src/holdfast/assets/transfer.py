"""Downloads a file's bytes into a part: mirrors in order, retries with backoff; bytes that are there are not requested again.

The invariant: when a transfer has run, the part holds the whole file on disk, of every stated size and checksum. When it
raises, the part holds a good beginning or nothing.
"""

import errno
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.assets.cache import name_in_url, without_credentials
from holdfast.assets.catalog import FileSpec
from holdfast.assets.partial_file import DownloadState, PartialFile
from holdfast.assets.sources import NotResumable, ResumePoint, SourceError, Stream, TransientError, open_source
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import Bar

ATTEMPTS = 6
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
LONGEST_RETRY_AFTER = 900.0
PAUSE_SLICE = 0.2


class FetchTimeout(HoldfastError):
    """The caller's time limit passed."""


class Deadline:
    """A time limit in seconds; None never passes."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._end = None if seconds is None else time.monotonic() + seconds

    def passed(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def remaining(self) -> float:
        return float("inf") if self._end is None else self._end - time.monotonic()


@dataclass
class Transfer:
    """One download by the holder of the lease."""

    spec: FileSpec
    part: PartialFile
    deadline: Deadline
    bar: Bar
    beat: Callable[[], None]
    """Called between blocks and while waiting: touches the lease, and raises when another process holds it now."""
    on_request: Callable[[str], None]
    """Called with the URL of every request for bytes."""
    checksum_origin: str = ""
    """Where the expected checksum is from, for the message on a mismatch."""

    def run(self) -> None:
        """Downloads the file from the first source that has it."""
        self.bar.skip(self.part.size)
        failures = []
        for url in (self.spec.url, *self.spec.mirrors):
            try:
                self._from_source(url)
                self.part.sync()
                return
            except SourceError as error:
                failures.append(f"{without_credentials(url)}: {error}")
        raise SourceError("; ".join(failures))

    def _from_source(self, url: str) -> None:
        failed, reached = 0, self.part.size
        started_over = False
        while True:
            try:
                self._stream_once(url)
                if self._is_good(started_over):
                    return
                started_over = True
            except NotResumable:
                self.part.clear()
            except TransientError as error:
                failed = 1 if self.part.size > reached else failed + 1
                reached = max(reached, self.part.size)
                self._pause(error, failed)

    def _stream_once(self, url: str) -> None:
        part, resume = self.part, self._resume_point(url)
        if resume and part.size == part.state.length:
            return  # the last holder was killed after the last byte: nothing to request
        self.on_request(url)
        with open_source(url, resume, self.deadline.remaining()) as stream:
            self._accept(url, stream, resume)
            for chunk in stream.chunks:
                part.append(chunk)
                self.bar.advance(len(chunk))
                self.beat()
                if self.deadline.passed():
                    raise self._timeout()
            if part.state.length is not None and part.size != part.state.length:
                raise TransientError(f"the server stopped after {part.size} of {part.state.length} bytes")

    def _resume_point(self, url: str) -> ResumePoint | None:
        part = self.part
        if not part.size:
            return None
        if part.state.url == url and part.state.validator:
            return ResumePoint(part.size, part.state.validator)
        # Another mirror, or a server without ETag: only a checksum shows whether the bytes belong together.
        return ResumePoint(part.size, None) if self.spec.sha256 else None

    def _accept(self, url: str, stream: Stream, resume: ResumePoint | None) -> None:
        part, size = self.part, self.spec.size
        if size is not None and stream.length is not None and stream.length != size:
            part.clear()
            raise SourceError(f"the file has {stream.length} bytes, not {size}")
        if resume and stream.offset:
            # Some servers ignore If-Range: the answer then names another validator.
            changed = resume.validator and stream.validator and stream.validator != resume.validator
            if changed or stream.offset != part.size or part.state.length not in (None, stream.length):
                raise NotResumable
            part.stitch()
        else:
            self.bar.skip(-part.size)
            validator = stream.validator if stream.resumable else None
            part.start(DownloadState(url, validator, stream.length, stream.name or name_in_url(url), stream.sha256))
        if stream.length is not None:
            self.bar.total(stream.length)
            self._check_room(stream.length - part.size)

    def _check_room(self, needed: int) -> None:
        room = os.statvfs(self.part.path.parent)
        if room.f_bavail * room.f_frsize < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.part.path))

    def _is_good(self, started_over: bool) -> bool:
        """Checks size and checksum. False: download once more from byte 0, because the bytes of several responses may not fit."""
        part = self.part
        expected, wrong = self.spec.sha256 or part.state.sha256, ""
        if self.spec.size is not None and part.size != self.spec.size:
            wrong = f"the file has {part.size} bytes, not {self.spec.size}"
        elif expected and part.sha256() != expected:
            wrong = f"the file has sha256 {part.sha256()}, not {expected}{self.checksum_origin}"
        if not wrong:
            return True
        stitched = part.state.stitched
        part.clear()
        if stitched and not started_over:
            return False
        raise SourceError(wrong)

    def _pause(self, error: TransientError, failed: int) -> None:
        if failed >= ATTEMPTS:
            raise SourceError(f"{error} (tried {failed} times)") from error
        # Full jitter: clients that failed together do not retry together.
        seconds = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**failed))
        if error.after is not None:
            if error.after > LONGEST_RETRY_AFTER:
                raise SourceError(f"{error}, and requests a pause of {error.after:.0f} s") from error
            seconds = error.after + random.uniform(0, FIRST_PAUSE)
        if seconds > self.deadline.remaining():
            raise self._timeout(f" ({error})") from error
        self.bar.note(f"{error}, retry in {seconds:.0f} s")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(PAUSE_SLICE, left))
            self.beat()
        self.bar.note("")

    def _timeout(self, why: str = "") -> FetchTimeout:
        url = without_credentials(self.spec.url)
        if not self.part.size:
            return FetchTimeout(f"{url}: no byte received within {self.deadline.seconds:g} s{why}")
        of = f" of {self.part.state.length:,}" if self.part.state.length else ""
        return FetchTimeout(
            f"{url}: {self.part.size:,}{of} bytes received within {self.deadline.seconds:g} s{why}; "
            "the next fetch continues from there"
        )
