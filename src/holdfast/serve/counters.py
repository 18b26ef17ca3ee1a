"""Counters and times of the server, in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
NAMES = {
    "requests": ("holdfast_requests_total", "HTTP requests by path and status"),
    "prompt_tokens": ("holdfast_prompt_tokens_total", "Tokens of prompts"),
    "generated_tokens": ("holdfast_generated_tokens_total", "Tokens written"),
    "cancelled": ("holdfast_cancelled_requests_total", "Requests whose client disconnected or that timed out"),
}


class Histogram:
    def __init__(self, name: str, description: str) -> None:
        self._name, self._description = name, description
        self._counts, self._sum = [0] * (len(SECONDS) + 1), 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def lines(self) -> Iterable[str]:
        yield from _head(self._name, self._description, "histogram")
        total = 0
        for bound, count in zip([*map(str, SECONDS), "+Inf"], self._counts, strict=True):
            total += count
            yield f'{self._name}_bucket{{le="{bound}"}} {total}'
        yield f"{self._name}_sum {self._sum}"
        yield f"{self._name}_count {total}"


class Counters:
    """What the server has done since its start. Only the event loop uses it."""

    def __init__(self) -> None:
        self._values: dict[str, Counter[tuple[tuple[str, str], ...]]] = {name: Counter() for name in NAMES}
        self.first_token = Histogram("holdfast_time_to_first_token_seconds", "From a request to its first token")
        self.duration = Histogram("holdfast_request_seconds", "From a request for text to its last token")

    def add(self, name: str, amount: int = 1, **labels: str) -> None:
        self._values[name][tuple(labels.items())] += amount

    def render(self, gauges: Iterable[tuple[str, str, str, int]]) -> str:
        """`gauges`: name, description, model and value."""
        lines: list[str] = []
        for name, counter in self._values.items():
            lines += _head(*NAMES[name], "counter")
            lines += [f"{NAMES[name][0]}{_labels(labels)} {value}" for labels, value in counter.items()]
        for name, description, model, value in gauges:
            if not any(line.startswith(f"# HELP {name} ") for line in lines):
                lines += _head(name, description, "gauge")
            lines.append(f"{name}{_labels((('model', model),))} {value}")
        return "\n".join([*lines, *self.first_token.lines(), *self.duration.lines()]) + "\n"


def _head(name: str, description: str, kind: str) -> list[str]:
    return [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]


def _labels(labels: tuple[tuple[str, str], ...]) -> str:
    escaped = [(key, value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for key, value in labels]
    return "{" + ",".join(f'{key}="{value}"' for key, value in escaped) + "}" if labels else ""
