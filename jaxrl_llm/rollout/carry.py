"""What a run carries over its train steps as JSON values, exactly: arrays keep every bit, their type and their shape.

What JSON has no word for is written as a mapping with one of the keys of `_MARKS`: arrays, tuples, numbers that are not
finite, and mappings whose keys are not texts.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.sampler.base import Completion
from jaxrl_llm.types import Prompt, StopReason, Trajectory

_MARKS = frozenset({"array", "float", "items", "tuple"})

__all__ = ["completion_of", "from_data", "to_data", "trajectory_of_data"]


def to_data(value: Any) -> Any:
    """JSON values of a record (`Trajectory`, `Completion`, `Prompt`) with everything in it.

    Raises:
      TypeError: something in it is no JSON value, array or record; a prompt's payload, for example.
    """
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        data = base64.b64encode(array.tobytes()).decode()
        return {"array": data, "dtype": array.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
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


def completion_of(data: Any) -> Completion:
    """The completion that `to_data` was given."""
    fields = from_data(data)
    return Completion(**fields | {"prompt": Prompt(**fields["prompt"]), "stop": StopReason(fields["stop"])})


def trajectory_of_data(data: Any) -> Trajectory:
    """The trajectory that `to_data` was given."""
    fields = from_data(data)
    return Trajectory(**fields | {"prompt": Prompt(**fields["prompt"]), "stop": StopReason(fields["stop"])})
