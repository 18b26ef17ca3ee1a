"""A request to write a step to disk: which step, where the request comes from, and what has been done about it."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FROM_PEER = "another node asks"
LAST = "stopped"
"""the newest step of a run that has no live rank, before its memory is freed"""


@dataclass(eq=False)
class SaveRequest:
    reason: str
    """persist, save, died, hung, the name of a trigger file, FROM_PEER or LAST"""
    step: int | None = None
    """None: the newest that all ranks hold"""
    retention: tuple[int | None, int | None] = (None, None)
    token: str | None = None
    """The start of the run that requests the step: a checkpoint that carries it is the requested one."""
    resumed: int | None = None
    """The step that the run resumed from, which retention never removes."""
    file: str | None = None
    """Its file in the run's memory: a new keeper reads it again."""
    trigger: Path | None = None
    stop: bool = False
    """The run ends after it."""

    since: float = field(default_factory=time.monotonic)
    tries: int = 0
    not_before: float = 0.0
    error: str | None = None
    damaged: list[int] = field(default_factory=list)

    save_requested: bool = False
    """The ranks were requested to choose a step and save it..."""
    save: "SaveRequest | None" = None
    """...and this is their request."""

    proposal: str | None = None
    """What this node proposed to the other nodes for it."""
    waiting_since: float | None = None
    """When this node began to wait for the proposals of the others."""
    solo: bool = False
    """The others made none in time: this node writes by itself."""

    @classmethod
    def from_file(cls, name: str, record: dict[str, Any]) -> "SaveRequest":
        last, every = record.get("retention") or (None, None)
        return cls(
            record["kind"],
            record.get("step"),
            (last, every),
            record.get("token"),
            record.get("resumed"),
            name,
            stop=record.get("stop", False),
        )

    @property
    def wants_answer(self) -> bool:
        """Whether the command `persist` waits for the result."""
        return self.reason == "persist" and self.file is not None

    def reset_agreement(self) -> None:
        """The step that the nodes agreed on could not be written: they agree again."""
        self.proposal, self.waiting_since, self.solo = None, None, False
