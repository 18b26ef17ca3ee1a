"""The keepers of several nodes agree on the step that they write: the newest one that all of them hold.

Each keeper publishes a proposal, the steps that it holds, in a folder beside the checkpoints, on the disk that the nodes share;
the keeper of the first node decides once every node has a new proposal. After a crash the nodes' newest steps may differ; one
that all of them hold is always there. The invariant: a decision names the proposals that it is made from, so a keeper never takes
a decision about an earlier proposal for the answer to its own.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.snapshot.memory.run_memory import read_json, write_json

FOLDER = ".agreement"
POLL_SECONDS = 1.0
KEPT_SECONDS = 60.0


class StepAgreement:
    """The agreement as the keeper of one node takes part in it."""

    def __init__(self, checkpoints: Path, node: str) -> None:
        self.nodes: list[str] = []
        """All nodes, this one too, in the order of their ranks."""
        self._folder, self._node = checkpoints / FOLDER, node
        self._next_poll, self._last_used = 0.0, time.monotonic()
        self._answered: set[str] = set()

    @property
    def multi_node(self) -> bool:
        return len(self.nodes) > 1

    def agree(self, proposal: str, steps: Sequence[int]) -> int | None:
        """Proposes the steps that this node holds; the step to write once it is decided, None before. Does not wait."""
        record = {"proposal": proposal, "steps": list(steps)}
        if read_json(self._path(self._node)) != record:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._path(self._node), record)
        if self._node == self.nodes[0]:
            self._decide()
        decision = self._decision()
        return decision["step"] if proposal in decision["proposals"] else None

    def withdraw(self, proposal: str | None) -> None:
        """Removes this node's proposal, unless it is decided: the node waits no longer."""
        record = read_json(self._path(self._node))
        if record and record["proposal"] == proposal and proposal not in self._decision()["proposals"]:
            self._path(self._node).unlink(missing_ok=True)

    def poll(self, busy: bool) -> bool:
        """Once per second: whether the keeper of another node waits for a proposal of this one. `busy`: it has made one."""
        now = time.monotonic()
        if not self.multi_node or now < self._next_poll:
            return False
        self._next_poll = now + POLL_SECONDS
        if busy or not self._folder.exists():
            self._last_used = now
            return False
        new = self.undecided() - self._answered
        self._answered |= new
        if not new and now - self._last_used > KEPT_SECONDS:
            self.close()
        return bool(new)

    def undecided(self) -> set[str]:
        """The proposals of other nodes on which nothing is decided."""
        others = (read_json(self._path(node)) for node in self.nodes if node != self._node)
        return {record["proposal"] for record in others if record} - set(self._decision()["proposals"])

    def close(self) -> None:
        """Removes the folder; the first node does it for all."""
        if self.multi_node and self.nodes[0] == self._node:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _decide(self) -> None:
        """Once every node has made a proposal since the last decision."""
        records = [read_json(self._path(node)) for node in self.nodes]
        if not all(records):
            return
        proposals = [record["proposal"] for record in records]
        common = set.intersection(*(set(record["steps"]) for record in records))
        if common and not set(proposals) & set(self._decision()["proposals"]):
            write_json(self._folder / "decision.json", {"step": max(common), "proposals": proposals})

    def _decision(self) -> dict[str, Any]:
        return read_json(self._folder / "decision.json") or {"step": None, "proposals": []}

    def _path(self, node: str) -> Path:
        return self._folder / f"node-{self.nodes.index(node):05d}.json"
