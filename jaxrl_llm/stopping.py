"""How a run is asked to stop."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

__all__ = ["EXIT_STOPPED", "StopRequest", "StoppedError"]

EXIT_STOPPED = 75  # exit code: stopped on request or preemption with a snapshot saved


class StoppedError(Exception):
    """The run was asked to stop while a rollout was under way; the state before it is whole."""


class StopRequest:
    """SIGINT and SIGTERM ask the loop to stop where a snapshot can be saved; a second SIGINT stops at once.

    Outside the main thread signals cannot be caught: nothing asks there.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        print("\nStopping: a snapshot will be saved. Press Ctrl-C again to stop at once.", file=sys.stderr)

    def check(self, *_: object) -> None:
        """Raises StoppedError when a stop was asked for; usable as a progress callback."""
        if self.asked:
            raise StoppedError
