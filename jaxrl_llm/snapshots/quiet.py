"""Keeps what Orbax and TensorStore print off the screen; what matters is reported by the store."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

__all__ = ["quiet_threads", "reported"]


def _in_orbax(trace: TracebackType | None) -> bool:
    """Whether a traceback goes through Orbax."""
    while trace is not None:
        if "orbax" in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False


def _not_by_orbax(record: logging.LogRecord) -> bool:
    """False for what Orbax logs: notices, and errors that it raises as well, now or when the store waits for a save."""
    return "orbax" not in record.pathname


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """False for what asyncio logs when an abandoned task of Orbax, whose error was reported, is freed."""
    return not (record.exc_info and _in_orbax(record.exc_info[2])) and "orbax" not in record.getMessage()


logging.getLogger("asyncio").addFilter(_not_of_orbax)
logging.getLogger("absl").addFilter(_not_by_orbax)  # for good: background threads log whenever they like


@contextmanager
def reported() -> Iterator[None]:
    """Silences what Orbax prints about its own errors while the caller turns its exceptions into ours.

    After a failed read TensorStore calls back into an event loop that Orbax has closed, and abandoned
    coroutines are freed; Python reports both through `sys.unraisablehook`.
    """
    # The hook is called from threads of TensorStore that hold no reference to it: a function of ours, freed when
    # this ends, crashed the interpreter. A builtin that ignores its argument is never freed.
    hook = sys.unraisablehook
    sys.unraisablehook = id
    try:
        yield
    finally:
        sys.unraisablehook = hook


_previous: Any = sys.__unraisablehook__


def _unless_of_orbax(unraisable: Any) -> None:
    error = unraisable.exc_value
    closed = isinstance(error, RuntimeError) and "Event loop is closed" in str(error)
    if not closed and not _in_orbax(unraisable.exc_traceback) and "orbax" not in repr(unraisable.object):
        _previous(unraisable)


def quiet_threads() -> None:
    """Silences for good what the threads of a failed save leave behind, as `reported` does around a call.

    They fail between two calls of the store, which raises their error when it waits for the save. What Python reports of
    anything else goes on to the hook that was there. Lives as long as the process, as its threads may.
    """
    global _previous
    if sys.unraisablehook is not _unless_of_orbax:
        _previous, sys.unraisablehook = sys.unraisablehook, _unless_of_orbax
