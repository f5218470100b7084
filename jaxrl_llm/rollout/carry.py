"""What a run carries over its train steps as JSON values, exactly: arrays keep every bit, their type and their shape.

What JSON has no word for is written as a mapping with one of the keys of `_MARKS`: arrays, tuples, numbers that are not
finite, and mappings whose keys are not texts.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.sampler.base import Completion
from jaxrl_llm.types import Prompt, StopReason, Trajectory

_MARKS = frozenset({"array", "float", "items", "tuple"})

__all__ = ["answer_to", "completion_of", "from_data", "to_data", "trajectory_of_data"]


def to_data(value: Any) -> Any:
    """JSON values of a record (`Trajectory`, `Completion`, `Prompt`) with everything in it.

    Raises:
      TypeError: something in it is no JSON value, array or record; a prompt's payload, for example.
    """
    kind: Any = type(value)
    if kind is str or kind is int or kind is bool or value is None:  # most of what there is
        return value
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        return {"array": data, "dtype": array.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if names := _fields(kind):  # a record
        return {name: to_data(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not _MARKS & value.keys():
            return {key: to_data(entry) for key, entry in value.items()}
        return {"items": [[to_data(key), to_data(entry)] for key, entry in value.items()]}
    if isinstance(value, list):
        return [to_data(entry) for entry in value]
    if isinstance(value, tuple):
        return {"tuple": [to_data(entry) for entry in value]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is no JSON value.")


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    """Names of the fields of a record; none of what is no record."""
    return tuple(field.name for field in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else ()


def from_data(data: Any) -> Any:
    """The arrays in JSON values of `to_data`; records stay mappings."""
    if isinstance(data, Mapping):
        if set(data) == {"array", "dtype", "shape"}:
            raw = base64.b64decode(data["array"])
            return np.frombuffer(raw, np.dtype(data["dtype"])).reshape(data["shape"]).copy()
        if set(data) == {"items"}:
            return {from_data(key): from_data(value) for key, value in data["items"]}
        if set(data) == {"tuple"}:
            return tuple(from_data(entry) for entry in data["tuple"])
        if set(data) == {"float"}:
            return float(data["float"])
        return {key: from_data(value) for key, value in data.items()}
    return [from_data(value) for value in data] if isinstance(data, list) else data


def answer_to(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """`to_data` of a completion, without its prompt where it is this very one, which is written elsewhere."""
    known = completion.prompt is prompt
    names = (name for name in _fields(Completion) if not (known and name == "prompt"))
    return {name: to_data(getattr(completion, name)) for name in names}


def completion_of(data: Any, prompt: Prompt) -> Completion:
    """The completion that `answer_to` was given, with the prompt."""
    fields = from_data(data)
    if "prompt" in fields:
        prompt = Prompt(**fields["prompt"])
    return Completion(**fields | {"prompt": prompt, "stop": StopReason(fields["stop"])})


def trajectory_of_data(data: Any) -> Trajectory:
    """The trajectory that `to_data` was given."""
    fields = from_data(data)
    return Trajectory(**fields | {"prompt": Prompt(**fields["prompt"]), "stop": StopReason(fields["stop"])})
