"""What a keeper has to write: a step, or the newest there is; who asked for it, and how far it has come."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

INVITED = "another node asks"
LAST = "stopped"
"""the newest step of a run that has no live rank, before its memory is freed"""


@dataclass(eq=False)
class SaveRequest:
    reason: str
    """persist, save, died, hung, stopped, the name of a trigger, INVITED"""
    step: int | None = None
    retention: tuple[int | None, int | None] = (None, None)
    token: str | None = None
    """The start of the run that asked for the step: a checkpoint that carries it is the one asked for."""
    resumed: int | None = None
    """The step that the run resumed from, which retention never removes."""
    request: str | None = None
    """Its file in the run's memory, so that a keeper that is killed is followed by one that knows."""
    trigger: Path | None = None
    stop: bool = False
    """The run ends after it."""

    since: float = field(default_factory=time.monotonic)
    tries: int = 0
    not_before: float = 0.0
    trouble: str | None = None
    damaged: list[int] = field(default_factory=list)

    save_requested: bool = False
    """The ranks were asked to save a step..."""
    save: "SaveRequest | None" = None
    """...and this is what they chose."""

    stamp: str | None = None
    """Under which this node speaks of it in a meeting."""
    met: float | None = None
    """Since when the other nodes are waited for."""
    alone: bool = False
    """They did not come."""

    @classmethod
    def of_request(cls, name: str, record: dict[str, Any]) -> "SaveRequest":
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
    def answers(self) -> bool:
        """Whether somebody waits for an answer."""
        return self.reason == "persist" and self.request is not None

    def ask_anew(self) -> None:
        """What the nodes agreed on did not work out."""
        self.stamp, self.met, self.alone = None, None, False
