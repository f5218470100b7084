"""What several processes decide together. In one process each of these is the plain thing.

Every process must call them in the same order: they wait for each other, as any collective does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxrl_llm.errors import DamagedError, InputError, SnapshotError

__all__ = ["any_process", "check_same", "do_on_first", "is_first", "on_first", "several", "together"]

T = TypeVar("T")

_FRAME = 512  # bytes of the first message: its length, and all of it where it is short
_HEAD = 8


def several() -> bool:
    """Whether this process works with others."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_first() -> bool:
    """Whether this is the process that writes files and shows progress."""
    return not several() or jax.process_index() == 0


def on_first(function: Callable[[], T]) -> T:
    """What the function gives in process 0, which alone calls it; what it raises there is raised everywhere.

    Args:
      function: its result consists of JSON values (tuples reach the others as lists). It must not wait for them.
    """
    if not several():
        return function()
    outcome = _attempt(function) if is_first() else None
    value, error = _unpacked(_gather(_packed(*outcome) if outcome else b"")[0])
    if error is not None:
        raise outcome[1] if outcome and outcome[1] else error
    return outcome[0] if outcome else value


def do_on_first(function: Callable[[], object]) -> None:
    """As `on_first`, for what it does; when it returns, it has been done."""

    def do() -> None:
        function()

    on_first(do)


def together(function: Callable[[], T]) -> T:
    """What the function gives in each process; where it raises in one, all raise that (of several: the first's).

    Args:
      function: must not wait for other processes.
    """
    if not several():
        return function()
    value, error = _attempt(function)
    errors = [_unpacked(message)[1] for message in _gather(_packed(None, error))]
    if error is not None:
        raise error
    for other in errors:
        if other is not None:
            raise other
    return value


def any_process(asked: bool) -> bool:
    """Whether any process says so."""
    if not several():
        return asked
    return any(flag != b"\0" for flag in _exchange(bytes([asked]), 1))


def check_same(what: str, mine: dict[str, Any]) -> None:
    """Refuses processes that were not started alike.

    Args:
      what: the name of the values in the error.
      mine: flat values of this process, by key.

    Raises:
      InputError: in every process, when one has other values than process 0.
    """
    mine = json.loads(json.dumps(mine, default=str))
    firsts = on_first(lambda: mine)

    def compare() -> None:
        other = sorted(key for key in {*firsts, *mine} if firsts.get(key, _ABSENT) != mine.get(key, _ABSENT))
        if other:
            raise InputError(
                f"{what}: process {jax.process_index()} has {other[0]}={mine.get(other[0])!r} and process 0 has "
                f"{firsts.get(other[0])!r}. All processes of a run must be started with the same config and the same software."
            )

    together(compare)


_ABSENT = object()


def _attempt(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # raised by the caller, once the others know
        return None, error


_KINDS = {kind.__name__: kind for kind in (InputError, SnapshotError, DamagedError)}


def _packed(value: Any, error: Exception | None) -> bytes:
    if error is None:
        return json.dumps({"value": value}).encode()
    kind, text = type(error).__name__, str(error)
    if kind not in _KINDS:  # what kinds of errors a library has nobody knows; the text says enough
        kind, text = "", f"process {jax.process_index()}: {kind}: {text}"
    return json.dumps({"error": [kind, text]}).encode()


def _unpacked(message: bytes) -> tuple[Any, Exception | None]:
    data = json.loads(message)
    if "error" not in data:
        return data["value"], None
    kind, text = data["error"]
    return None, _KINDS.get(kind, RuntimeError)(text)


def _gather(message: bytes) -> list[bytes]:
    """The message of each process."""
    frames = _exchange(len(message).to_bytes(_HEAD, "big") + message, _FRAME)
    lengths = [int.from_bytes(frame[:_HEAD], "big") for frame in frames]
    whole = _HEAD + max(lengths)
    if whole > _FRAME:
        # Rounded up, so that few sizes are compiled.
        frames = _exchange(len(message).to_bytes(_HEAD, "big") + message, 1 << (whole - 1).bit_length())
    return [frame[_HEAD : _HEAD + length] for frame, length in zip(frames, lengths, strict=True)]


def _exchange(message: bytes, size: int) -> list[bytes]:
    padded = np.frombuffer(message[:size].ljust(size, b"\0"), np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded)]
