"""Checks of hyper-parameters, made when a stage is built. Traced values (from `scheduled`) pass unchecked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

__all__ = ["choice", "number"]


def number(
    stage: str,
    argument: str,
    value: Any,
    *,
    low: float | None = None,
    high: float | None = None,
    positive: bool = False,
    finite: bool = True,
    optional: bool = False,
) -> None:
    """Raises ValueError unless `value` is a number in [low, high] (> 0 where `positive`)."""
    if (value is None and optional) or isinstance(value, jax.core.Tracer):
        return
    allowed = "a number"
    if positive:
        allowed += " > 0"
    elif low is not None:
        allowed += f" ≥ {low:g}"
    if high is not None:
        allowed += f" and ≤ {high:g}"
    if optional:
        allowed += ", or None"
    error = ValueError(f"{stage}: {argument} must be {allowed}, got {value!r}.")
    if isinstance(value, (bool, str)):
        raise error
    try:
        x = float(value)
    except (TypeError, ValueError):
        raise error from None
    if math.isnan(x) or (finite and math.isinf(x)) or (positive and x <= 0):
        raise error
    if (low is not None and x < low) or (high is not None and x > high):
        raise error


def choice(stage: str, argument: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises ValueError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ValueError(
            f"{stage}: {argument} must be one of {', '.join(map(repr, allowed))}, got {value!r}."
        )
