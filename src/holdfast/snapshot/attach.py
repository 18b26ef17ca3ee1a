"""Attaches the ranks of a run to its memory on each node: at the start, and again after something has removed its files.

The invariant: no rank goes on before every rank has a status page in the memory, and every node a keeper.
"""

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.collective import agreed
from holdfast.snapshot.keeper.client import start_keeper
from holdfast.snapshot.memory.run_memory import remove_stale, write_json
from holdfast.snapshot.memory.slot_allocator import SlotAllocator
from holdfast.snapshot.ranks.rank_group import RankGroup
from holdfast.snapshot.ranks.status_page import RankStatus
from holdfast.snapshot.ranks.stop_signals import SAVE, STOP
from holdfast.system.progress import log


def attach(rank_group: RankGroup, settings: Mapping[str, Any]) -> None:
    """Makes sure that the node has a keeper, and opens the status pages, which the ranks have claimed. Collective."""
    if rank_group.first_on_node:
        for request in (STOP, SAVE):
            (rank_group.run_memory.path / request).unlink(missing_ok=True)
    _attach(rank_group, settings)


def attach_again(
    rank_group: RankGroup, allocator: SlotAllocator, page: RankStatus, settings: Mapping[str, Any]
) -> bool | None:
    """Makes the folder, status pages and keeper again if files of the memory were removed. Collective.

    None if nothing was removed; else whether a save was lost, which was requested and is not on disk.
    """
    gathered = rank_group.gather([allocator.memory_removed(), allocator.pinned()])
    if not any(removed for removed, _ in gathered):
        return None
    allocator.unmap_removed()
    with agreed(rank_group.group), rank_group.run_memory.locked():
        rank_group.run_memory.make()
        page.renew()
    _attach(rank_group, settings)
    return any(removed and pinned for removed, pinned in gathered)


def _attach(rank_group: RankGroup, settings: Mapping[str, Any]) -> None:
    run_memory = rank_group.run_memory
    if rank_group.first_on_node:
        nodes = {"nodes": rank_group.nodes, "here": rank_group.node_ranks}
        write_json(run_memory.path / "settings.json", {**settings, **nodes})
        for removed in remove_stale(run_memory.path.parent.parent, run_memory):
            log(f"freed the memory of the run {removed}, which has ended")
        start_keeper(run_memory)
    rank_group.open_status_pages()
