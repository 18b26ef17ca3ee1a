"""Skips steps whose loss is far above the recent ones, before their gradient changes the weights."""

import math
import statistics

from holdfast.train.state import Progress

# The guard compares with this many losses at most, and skips nothing before it has seen the least number.
RECENT, LEAST = 128, 20
# Standard deviation of a normal distribution in units of its median absolute deviation.
DEVIATION_PER_MAD = 1.4826
# Losses that hardly vary must not make an ordinary one a spike.
SMALLEST_SHARE = 0.01


class SpikeGuard:
    """The threshold above which a loss is a spike. The losses that it depends on are part of every snapshot."""

    def __init__(self, progress: Progress, deviations: float) -> None:
        self._progress, self._deviations = progress, deviations

    def threshold(self) -> float:
        """Median of the recent losses plus `deviations` robust standard deviations; infinite with too few losses."""
        losses = self._progress.recent_losses
        if len(losses) < LEAST:
            return math.inf
        median = statistics.median(losses)
        spread = DEVIATION_PER_MAD * statistics.median(abs(loss - median) for loss in losses)
        return median + self._deviations * max(spread, SMALLEST_SHARE * abs(median))

    def note(self, loss: float) -> None:
        """Counts a loss, a spike too: a lasting change of the data then stops being one."""
        if math.isfinite(loss):
            self._progress.recent_losses = [*self._progress.recent_losses, loss][-RECENT:]
