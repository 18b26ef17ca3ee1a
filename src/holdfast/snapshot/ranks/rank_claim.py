"""The claims of a starting rank: its status page in memory, and on rank 0 the run folder.

The invariant: of two starts of one run at the same time, on one host or on several, one gets every claim and the other none.
"""

import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from types import TracebackType

from holdfast.checkpoint.collective import agreed
from holdfast.snapshot.memory.run_memory import RunMemory
from holdfast.snapshot.ranks.rank_group import RankGroup
from holdfast.snapshot.ranks.status_page import RankStatus, status_page_name
from holdfast.system.descriptors import open_private
from holdfast.system.errors import HoldfastError
from holdfast.system.leases import BackgroundLease
from holdfast.system.progress import log
from holdfast.system.run_claim import RunInUse, claim_run

CLAIM_SECONDS = 10.0


@dataclass(frozen=True)
class RankClaim:
    page: RankStatus
    reached: int
    """the step that the previous owner of the status page had reached"""
    interval: int
    """the interval between snapshots that the previous owner wanted, if this process replaces it after a failure; else 0"""
    folder_claim: BackgroundLease | None

    def release(self, status: int = 0) -> None:
        self.page["status"] = status
        if self.folder_claim is not None:
            self.folder_claim.release()


def claim_rank(rank_group: RankGroup, folder: Path) -> RankClaim:
    """Claims what this rank needs; collective. If any rank is refused, all release what they have and raise its error."""
    folder_claim: BackgroundLease | None = None
    claim: RankClaim | None = None
    # The first rank of a node claims before the others: of two starts at the same time one gets the whole node.
    for first in (True, False):
        try:
            with agreed(rank_group.group):
                # The supervisor of `holdfast train` has claimed the run folder already, for the ranks of all hosts.
                if first and rank_group.rank == 0 and "HOLDFAST_SUPERVISED" not in os.environ:
                    folder_claim = _claim_folder(folder)
                if rank_group.first_on_node is first:
                    claim = RankClaim(*_claim_page(rank_group.rank, rank_group.run_memory), folder_claim)
        except BaseException:
            if claim is not None:
                claim.release()
            elif folder_claim is not None:
                folder_claim.release()
            raise
    assert claim is not None
    return claim


def _claim_page(rank: int, run_memory: RunMemory) -> tuple[RankStatus, int, int]:
    """The status page, and the step and interval it shows. Waits: ranks of an attempt that was just ended may still be dying."""
    deadline = time.monotonic() + CLAIM_SECONDS
    while True:
        with run_memory.locked():
            run_memory.make()
            page = RankStatus(run_memory.path / status_page_name(rank))
            if not page.owner_alive():
                reached, interval = page["step"], page["interval_wanted"]
                page.claim()
                return page, reached, interval if page["restarts"] else 0
        if time.monotonic() > deadline:
            raise HoldfastError(
                f"a run called {run_memory.name} with the folder {run_memory.folder} is already running (process "
                f"{page['process']} is its rank {rank}); end it with `holdfast persist {quote(str(run_memory.folder))} --stop`, "
                "or choose another name"
            )
        time.sleep(0.05)


def _claim_folder(folder: Path) -> BackgroundLease | None:
    try:
        return claim_run(folder, "snapshots")
    except RunInUse:
        raise
    except (HoldfastError, OSError) as error:  # a full disk must not keep a run from its memory
        log(f"warning: {folder} cannot be claimed, so a start on another host would not be refused: {error}")
        return None


def record_fatal_errors(page: RankStatus) -> None:
    """Stores an exception that ends this process on its status page, for the keeper; SIGUSR2 writes the stacks of a hung rank."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        page.set_error_text(f"{kind.__name__}: {error}")
        previous(kind, error, trace)

    sys.excepthook = hook
    if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
        # faulthandler keeps the file open.
        stacks = open(page.path.with_suffix(".stacks"), "w", opener=open_private)  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
