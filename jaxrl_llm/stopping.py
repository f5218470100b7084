"""How a run is asked to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["EXIT_STOPPED", "StopRequest", "StoppedError", "TerminatedError", "terminable"]

_EVERY = 8  # calls of `StopRequest.check(often=True)` in which several processes agree once
EXIT_STOPPED = 75  # exit code: stopped on request or preemption with a snapshot saved


class StoppedError(Exception):
    """The run was asked to stop while a rollout was under way; the state before it is whole."""


class TerminatedError(KeyboardInterrupt):
    """SIGTERM where there is nothing to save: the command ends like on Ctrl-C, and cleans up."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises TerminatedError, so that what was begun is removed and child processes end too."""

    def handle(*_: object) -> None:
        raise TerminatedError

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopRequest:
    """SIGINT and SIGTERM ask the loop to stop where a snapshot can be saved; a second SIGINT stops at once.

    Outside the main thread signals cannot be caught: nothing asks there.

    Args:
      agree: of several processes, whether any was asked (`parallel.agree.any_process`): all of them then stop at the same
        place. None: there are no others.
    """

    def __init__(self, agree: Callable[[bool], bool] | None = None) -> None:
        self.asked = False
        self._agree = agree
        self._looks = 0
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

    def check(self, *, often: bool = False) -> None:
        """Raises StoppedError when a stop was asked for. Every process calls it at the same places.

        Args:
          often: it is called many times a second, so that not every call is worth asking the other processes.
        """
        if often and self._agree is not None:
            self._looks += 1
            if self._looks % _EVERY:
                return
        if self.asked if self._agree is None else self._agree(self.asked):
            raise StoppedError
