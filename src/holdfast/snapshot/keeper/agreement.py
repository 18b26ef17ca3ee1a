"""The keepers of several nodes agree on a step to write: each says what it holds, and the one with rank 0 names the newest that
all hold. After a crash the nodes' newest steps may differ; one that all of them hold is always there.

They meet in a folder beside the checkpoints, on the disk that the nodes share. What a keeper says bears the stamp of its errand,
and a choice bears the stamps that it is made from: so one that was made for an earlier errand is not mistaken for an answer.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.snapshot.memory.run_memory import read_json, write_json

FOLDER = ".meeting"


class Meeting:
    """As one of the nodes sees it, which are numbered in the order of their ranks."""

    def __init__(self, checkpoints: Path, node: int, nodes: int) -> None:
        self._folder, self._node, self._nodes = checkpoints / FOLDER, node, nodes

    def agree(self, stamp: str, steps: Sequence[int]) -> int | None:
        """Says what this node holds; the step to write once it is known, None before. Does not wait."""
        said = {"stamp": stamp, "steps": list(steps)}
        if read_json(self._path(self._node)) != said:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_json(self._path(self._node), said)
        if self._node == 0:
            self._choose()
        choice = self._choice()
        return choice["step"] if stamp in choice["stamps"] else None

    def leave(self, stamp: str) -> None:
        """This node waits no longer: nobody should count on what it said."""
        said = read_json(self._path(self._node))
        if said and said["stamp"] == stamp and stamp not in self._choice()["stamps"]:
            self._path(self._node).unlink(missing_ok=True)

    def waiting(self) -> set[str]:
        """The stamps of other nodes that have not been answered."""
        others = (read_json(self._path(node)) for node in range(self._nodes) if node != self._node)
        return {said["stamp"] for said in others if said} - set(self._choice()["stamps"])

    def over(self) -> bool:
        return not self._folder.exists()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _choose(self) -> None:
        """When every node has said something since the last choice."""
        said = [read_json(self._path(node)) for node in range(self._nodes)]
        if not all(said):
            return
        stamps = [one["stamp"] for one in said]
        common = set.intersection(*(set(one["steps"]) for one in said))
        if common and not set(stamps) & set(self._choice()["stamps"]):
            write_json(self._folder / "choice.json", {"step": max(common), "stamps": stamps})

    def _choice(self) -> dict[str, Any]:
        return read_json(self._folder / "choice.json") or {"step": None, "stamps": []}

    def _path(self, node: int) -> Path:
        return self._folder / f"node-{node:05d}.json"
