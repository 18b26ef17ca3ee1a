"""`--profile FIRST:LAST`: traces of some steps by torch's profiler, one file per rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.system.errors import UsageError
from holdfast.system.progress import log


def profiled_steps(text: str | None) -> range:
    """The steps that `FIRST:LAST` names, both included."""
    if text is None:
        return range(0)
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UsageError(f"--profile {text}: give FIRST:LAST, the first and the last step to trace, such as 10:13")
    return range(int(first), int(last) + 1)


class StepProfiler:
    """Traces the given steps of this rank into RUN/profile/rank-N.json.gz (Chrome's trace format, for Perfetto)."""

    def __init__(self, steps: range, run: Path | None, rank: int) -> None:
        self._steps = steps
        self._file = (run or Path.cwd()) / "profile" / f"rank-{rank}.json.gz"
        self._profile: Any = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surrounds one step. A run that resumes in the middle traces the steps that are left."""
        if number in self._steps and self._profile is None:
            import torch  # here: `holdfast train` checks --profile before it loads torch

            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
            self._profile.start()
        yield
        if self._profile is not None and number + 1 not in self._steps:
            self.close()

    def close(self) -> None:
        """Writes what was traced so far."""
        if self._profile is None:
            return
        self._profile.stop()
        temporary = self._file.with_name(f".{self._file.name}")  # the profiler compresses by the suffix
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(temporary))
            temporary.replace(self._file)
            log(f"wrote the trace of the profiled steps to {self._file}")
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            log(f"warning: cannot write {self._file}: {error}")
        self._profile = None
