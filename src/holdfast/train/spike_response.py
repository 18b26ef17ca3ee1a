"""What a run does after a loss spike (`--spike-guard`): it skips the step, or rewinds (`--spike-action rewind`).

A rewind puts weights, optimizer and loss scale back to the newest memory snapshot. The step numbers and the data go on: the
batches since that snapshot are left out. So a rewind is a step like any other: a run that is killed resumes from the same
snapshot, repeats the steps after it, meets the same spike and ends bit-identical.
"""

from holdfast.snapshot import Snapshots
from holdfast.system.errors import HoldfastError
from holdfast.system.progress import count_of, log
from holdfast.train.spike_guard import SpikeGuard
from holdfast.train.state import NoSnapshots, Progress

# Rewinds to one snapshot. Spikes after each of them come from its weights, not from the batches.
MAX_REWINDS = 3


class SpikeResponse:
    """Compares each loss with the guard's threshold and responds to spikes, on all ranks after the same step."""

    def __init__(
        self, guard: SpikeGuard, progress: Progress, snapshots: Snapshots | NoSnapshots, *, rewinds: bool
    ) -> None:
        self.guard, self._progress, self._snapshots, self._rewinds = guard, progress, snapshots, rewinds
        self._target, self._count = 0, 0
        """The snapshot of the last rewind, and how many rewinds went there."""

    def check(self, loss: float, threshold: float) -> bool:
        """Whether the loss of the step that is being done is a spike: the step is skipped then. Collective."""
        self.guard.note(loss)
        if not loss > threshold:
            return False
        step = self._progress.step + 1
        spike = f"iteration {step}: loss {loss:.4f} exceeds {threshold:.4f} (--spike-guard)"
        target = self._rewind(spike) if self._rewinds else None
        if target is None:
            log(f"warning: {spike}; step skipped")
            details: dict[str, str | int] = {"action": "skip"}
        else:
            batches = step - target
            log(f"warning: {spike}; back to the weights of step {target}, {count_of(batches, 'batch')} left out")
            details = {"action": "rewind", "to_step": target, "batches": batches}
        self._snapshots.event("spike", step=step, loss=loss, threshold=threshold, **details)
        return True

    def _rewind(self, spike: str) -> int | None:
        """Loads the newest memory snapshot and returns its step; None if there is none."""
        progress = self._progress
        now = progress.state_dict()
        target = self._snapshots.rewind()
        if target is None:
            return None
        self._count = self._count + 1 if target == self._target else 1
        self._target = target
        if self._count > MAX_REWINDS:
            raise HoldfastError(
                f"{spike} after {MAX_REWINDS} rewinds to step {target}: the weights of that step lead to spikes whatever the "
                "batch is. Continue from an older checkpoint in a new folder (--load RUN/checkpoints/step-N --save NEW), "
                "with a lower --lr, or with a higher --spike-guard"
            )
        skipped = progress.skipped + now["step"] - target
        progress.load_state_dict({**now, "skipped": skipped})
        return target
