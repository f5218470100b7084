"""How far a download or a conversion is, for whoever wants to show it.

Loading a model happens deep inside other calls (of a run, an evaluation, an export), so the listener is not
an argument of each of them: it is set around the call with `reporting`.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["Listener", "listening", "report", "reporting", "watching"]

Listener = Callable[[str, float, float | None], None]  # (what is done, how much, of how much or None)

_LISTENER: contextvars.ContextVar[Listener | None] = contextvars.ContextVar("listener", default=None)
_PAUSE = 0.25  # seconds between two looks at a folder
_MEGABYTE = 1e6


@contextlib.contextmanager
def reporting(listener: Listener) -> Iterator[None]:
    """Inside, `listener` is told of downloads and conversions; from another thread while a folder is watched."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def listening() -> bool:
    """Whether anybody is told."""
    return _LISTENER.get() is not None


def report(what: str, done: float = 0, total: float | None = None) -> None:
    """Tells the listener, if there is one."""
    if (listener := _LISTENER.get()) is not None:
        listener(what, done, total)


def _size(folder: Path) -> int:
    """Bytes of the files below a folder in which files come and go."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # gone between the two looks
            if path.is_file() and not path.is_symlink():
                size += path.stat().st_size
    return size


@contextlib.contextmanager
def watching(what: str, folder: Path, total: float | None = None) -> Iterator[None]:
    """Inside, reports how many megabytes have been added below `folder`; `total` is in bytes."""
    listener = _LISTENER.get()
    if listener is None:
        yield
        return
    whole = total / _MEGABYTE if total else None
    before = _size(folder)
    done = threading.Event()

    def look() -> None:
        while not done.wait(_PAUSE):
            added = max(0, _size(folder) - before) / _MEGABYTE
            listener(f"{what} (MB)", min(added, whole) if whole else added, whole)

    listener(f"{what} (MB)", 0, whole)
    thread = threading.Thread(target=look, name="download progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
