"""Counters, gauges and histograms in Prometheus' text format (version 0.0.4)."""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

__all__ = ["CONTENT_TYPE", "Counter", "Histogram", "Rate", "SECONDS", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def _labels(names: Sequence[str], values: Sequence[str]) -> str:
    def escaped(value: str) -> str:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    pairs = ",".join(f'{n}="{escaped(v)}"' for n, v in zip(names, values, strict=True))
    return f"{{{pairs}}}" if pairs else ""


def _value(number: float) -> str:
    return repr(int(number)) if float(number).is_integer() else repr(float(number))


class Counter:
    """A number that only grows, for each combination of labels."""

    kind = "counter"

    def __init__(self, name: str, help: str, labels: Sequence[str] = ()):
        self.name, self.help, self._names = name, help, tuple(labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, **labels: str) -> None:
        """Adds to the number with these labels."""
        key = tuple(labels[name] for name in self._names)
        self._values[key] = self._values.get(key, 0) + amount

    def lines(self) -> Iterable[str]:
        """The samples."""
        for key, value in sorted(self._values.items()):
            yield f"{self.name}{_labels(self._names, key)} {_value(value)}"


class Histogram:
    """How often a quantity was below each bound."""

    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float] = SECONDS):
        self.name, self.help, self._bounds = name, help, tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self) -> Iterable[str]:
        """The samples: cumulative counts, sum and count."""
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{self.name}_bucket{{le="{bound}"}} {total}'
        yield f"{self.name}_sum {_value(self._sum)}"
        yield f"{self.name}_count {total}"


class Rate:
    """Amount a second over the last `window` seconds, or since the start when that is shorter."""

    def __init__(self, window: float = 60.0, clock: Callable[[], float] = time.monotonic):
        self._window, self._clock = window, clock
        self._began = clock()
        self._recent: deque[tuple[float, float]] = deque()  # (when, amount), oldest first
        self._sum = 0.0

    def add(self, amount: float) -> None:
        """Counts an amount, now."""
        self._recent.append((self._clock(), amount))
        self._sum += amount
        self._drop()

    def per_second(self) -> float:
        """The rate at this moment."""
        self._drop()
        seconds = min(self._window, self._clock() - self._began)
        return self._sum / seconds if seconds > 0 else 0.0

    def _drop(self) -> None:
        oldest = self._clock() - self._window
        while self._recent and self._recent[0][0] < oldest:
            self._sum -= self._recent.popleft()[1]


def render(measured: Iterable[Counter | Histogram], now: Mapping[str, tuple[str, str, float]]) -> str:
    """The page that Prometheus reads; `now` = {name: (kind, help, value)} of what is read off at this moment."""
    lines = []
    for metric in measured:
        lines += [
            f"# HELP {metric.name} {metric.help}",
            f"# TYPE {metric.name} {metric.kind}",
            *metric.lines(),
        ]
    for name, (kind, help, value) in now.items():
        lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}", f"{name} {_value(value)}"]
    return "\n".join(lines) + "\n"
