"""Keeps what Orbax and TensorStore print off the screen; what matters is reported by the store."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["reported"]


class _OrbaxLogs(logging.Filter):
    """Drops what Orbax logs below `limit`: its notices always, its errors where we report them."""

    limit = logging.ERROR

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.limit or "orbax" not in record.pathname


_LOGS = _OrbaxLogs()
logging.getLogger("absl").addFilter(_LOGS)  # for good: background threads log whenever they like


def _origin(event: Any) -> str:
    """File of the code that an unraisable exception comes from."""
    code = getattr(event.object, "cr_code", None)  # a coroutine
    trace = event.exc_traceback
    while trace is not None:
        code, trace = trace.tb_frame.f_code, trace.tb_next
    return code.co_filename if code is not None else ""


@contextmanager
def reported() -> Iterator[None]:
    """Silences what Orbax prints about its own errors while the caller turns its exceptions into ours.

    After a failed read TensorStore calls back into an event loop that Orbax has closed, and abandoned
    coroutines are freed; Python reports both through `sys.unraisablehook`.
    """
    hook = sys.unraisablehook

    def late_echo(event: Any) -> None:
        closed_loop = isinstance(event.exc_value, RuntimeError) and "Event loop is closed" in str(
            event.exc_value
        )
        if not closed_loop and "orbax" not in _origin(event):
            hook(event)

    _LOGS.limit, sys.unraisablehook = logging.CRITICAL + 1, late_echo
    try:
        yield
    finally:
        _LOGS.limit, sys.unraisablehook = logging.ERROR, hook
