"""Seconds by phase and peak memory, under the keys that such figures must have (time/, memory/)."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

__all__ = ["Timers", "memory_metrics"]


class Timers:
    """Adds up seconds by phase, under keys that start with time/.

    >>> timers = Timers()
    >>> with timers("rollout"):
    ...     pass
    >>> sorted(timers.metrics())
    ['time/rollout', 'time/total']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block to `time/<phase>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def seconds(self, phase: str) -> float:
        """Seconds of a phase since the last `metrics()`, 0 if it did not run."""
        return self._seconds.get(phase, 0.0)

    def metrics(self, tokens: int | None = None) -> dict[str, float]:
        """The figures since the last call, and starts anew.

        Args:
          tokens: tokens sampled meanwhile; gives time/tokens_per_second of the phase "rollout" if there is one,
            else of everything.
        """
        now = time.perf_counter()
        total = now - self._start
        figures = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        figures["time/total"] = total
        if tokens is not None:
            figures["time/tokens_per_second"] = tokens / max(self._seconds.get("rollout", total), 1e-9)
        self._seconds, self._start = {}, now
        return figures


def memory_metrics() -> dict[str, int]:
    """memory/peak_bytes (device, or the process on CPU) and memory/host_peak_bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    device_peak = max((int(stat.get("peak_bytes_in_use", 0)) for stat in stats), default=0)
    return {"memory/peak_bytes": device_peak or peak, "memory/host_peak_bytes": peak}
