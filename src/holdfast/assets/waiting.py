"""Waiting for the process that downloads: which one it is, how far it is, and when another one may take over."""

import json
import os
import random
import time
from pathlib import Path

from holdfast.assets.cache import name_in_url, without_credentials
from holdfast.assets.catalog import FileSpec
from holdfast.assets.transfer import Deadline, FetchTimeout
from holdfast.system.errors import HoldfastError
from holdfast.system.leases import HolderLiveness, Lease
from holdfast.system.progress import log

# A poll costs a few system calls on a folder that thousands may share, so the pause grows with the wait.
SHORTEST_PAUSE, LONGEST_PAUSE, SHARE_OF_WAIT = 0.04, 1.0, 0.15
LOG_SECONDS = 5.0


class DownloadWaiter:
    """Waits for the processes that download a file, by this process's own clock."""

    def __init__(self, folder: Path, spec: FileSpec, deadline: Deadline) -> None:
        self._folder, self._spec, self._deadline = folder, spec, deadline
        self._holder = HolderLiveness(folder)
        self._started = self._last_log = time.monotonic()
        self._waited_for: dict[str, Lease] = {}
        self._part_size = -1

    def growing_lease(self) -> Lease | None:
        """The lease that this process waits for, if its part grew since the last poll: its holder is alive."""
        lease = next(reversed(self._waited_for.values()), None)
        if lease is None:
            return None
        try:
            size = os.stat(f"{self._folder}/{lease.part}").st_size
        except OSError:
            return None
        grew, self._part_size = size > self._part_size, size
        if grew:
            self._holder.note_change()
        return lease if grew else None

    def may_take_over(self, lease: Lease) -> bool:
        """Whether this process may claim the next lease. Raises the error of a holder that it waited for."""
        if lease.released and lease.error and lease.token in self._waited_for and lease.expects == self._spec.sha256:
            raise HoldfastError(f"{lease.error} (tried by {lease.describe()})")
        return self._holder.is_gone(lease)

    def wait(self, lease: Lease) -> None:
        now = time.monotonic()
        self._waited_for[lease.token] = lease
        if self._deadline.passed():
            url = without_credentials(self._spec.url)
            raise FetchTimeout(
                f"{url} is not here after {self._deadline.seconds:g} s: {lease.describe()} is downloading it "
                f"({self._progress(lease)}, {lease.file_in(self._folder)}); give it more time with --timeout"
            )
        if now - self._last_log >= LOG_SECONDS:
            self._last_log = now
            name = self._spec.name or name_in_url(self._spec.url)
            log(f"waiting for {name}: {lease.describe()} is downloading it, {self._progress(lease)}")
        pause = min(LONGEST_PAUSE, max(SHORTEST_PAUSE, SHARE_OF_WAIT * (now - self._started)))
        time.sleep(max(0.0, min(pause * random.uniform(0.5, 1.5), self._deadline.remaining())))

    def _progress(self, lease: Lease) -> str:
        part = self._folder / lease.part
        try:
            done = part.stat().st_size
            length = json.loads(part.with_name(part.name + ".json").read_bytes())["length"]
        except (OSError, ValueError, KeyError):
            return "no bytes yet"
        return f"{done / 1e6:,.1f} of {length / 1e6:,.1f} MB" if length else f"{done / 1e6:,.1f} MB so far"
