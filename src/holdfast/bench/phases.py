"""What a step costs: the time of its phases on the device, and its peak memory."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch


class PhaseClock:
    """Call it with a phase's name when the phase begins. On CUDA it records events, so that the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._moments: list[tuple[str, Any]] = []
        """Phases and when they began: CUDA events, or seconds on the CPU."""

    def __call__(self, phase: str) -> None:
        moment: Any = torch.cuda.Event(enable_timing=True) if self._cuda else time.perf_counter()
        if self._cuda:
            moment.record()
        self._moments.append((phase, moment))

    def milliseconds(self) -> dict[str, float]:
        """Time per phase since the last call."""
        if self._cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (phase, start), (_, end) in zip(self._moments, self._moments[1:], strict=False):
            spent = start.elapsed_time(end) if self._cuda else (end - start) * 1e3
            found[phase] = found.get(phase, 0.0) + spent
        self._moments = []
        return found


def median_phases(steps: list[dict[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}


class DeviceMemory:
    """Bytes of tensors on a CUDA device; on the CPU, where torch does not count, bytes of the process."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> int:
        return torch.cuda.memory_allocated() if self._cuda else _status("VmRSS")

    def reset_peak(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        elif (file := Path("/proc/self/clear_refs")).exists():
            file.write_text("5")  # resets the high-water mark to what is resident now

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._cuda else _status("VmHWM")


def _status(key: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0  # not Linux: unknown
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":")), 0)
