"""Keeps what Orbax and TensorStore print off the screen; what matters is reported by the store."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["reported"]


class _OrbaxLogs(logging.Filter):
    """Drops what Orbax logs below `limit`: its notices always, its errors where we report them."""

    limit = logging.ERROR

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.limit or "orbax" not in record.pathname


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """False for what asyncio logs when an abandoned task of Orbax, whose error was reported, is freed."""
    trace = record.exc_info[2] if record.exc_info else None
    while trace is not None:
        if "orbax" in trace.tb_frame.f_code.co_filename:
            return False
        trace = trace.tb_next
    return "orbax" not in record.getMessage()


_LOGS = _OrbaxLogs()
logging.getLogger("asyncio").addFilter(_not_of_orbax)
logging.getLogger("absl").addFilter(_LOGS)  # for good: background threads log whenever they like


@contextmanager
def reported() -> Iterator[None]:
    """Silences what Orbax prints about its own errors while the caller turns its exceptions into ours.

    After a failed read TensorStore calls back into an event loop that Orbax has closed, and abandoned
    coroutines are freed; Python reports both through `sys.unraisablehook`.
    """
    # The hook is called from threads of TensorStore that hold no reference to it: a function of ours, freed when
    # this ends, crashed the interpreter. A builtin that ignores its argument is never freed.
    hook = sys.unraisablehook
    _LOGS.limit, sys.unraisablehook = logging.CRITICAL + 1, id
    try:
        yield
    finally:
        _LOGS.limit, sys.unraisablehook = logging.ERROR, hook
