"""Lengths of samples: from a distribution, a file, or whatever else has drawn them.

They are drawn independently of each other, also within a group; in a real run the samples of a hard prompt are long
together, so that its groups are slower than here.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.simulate import Lengths, lognormal_lengths

__all__ = ["MOST_TOKENS", "Source", "drawn_from", "limited", "read_lengths", "summary"]

Source = Callable[[int], Lengths]  # seed -> lengths

MOST_TOKENS = 10**9  # of a sample


def drawn_from(values: np.ndarray) -> Source:
    """Draws from the lengths i64[N], with replacement."""

    def start(seed: int) -> Lengths:
        rng = np.random.default_rng(seed)
        return lambda n: values[rng.integers(len(values), size=n)]

    return start


def _lognormal(median: float, p99: float, max: float = MOST_TOKENS) -> Source:
    if not median <= p99 <= max:
        raise InputError(f"median <= p99 <= max is needed, got {median:g}, {p99:g} and {max:g}.")
    return lambda seed: lognormal_lengths(median, p99, most=int(max), seed=seed)


def _uniform(low: float, high: float) -> Source:
    if low > high:
        raise InputError(f"low <= high is needed, got {low:g} and {high:g}.")

    def start(seed: int) -> Lengths:
        rng = np.random.default_rng(seed)
        return lambda n: rng.integers(round(low), round(high) + 1, size=n)

    return start


def _constant(tokens: float) -> Source:
    return drawn_from(np.array([round(tokens)]))


# name -> (function, arguments that must be given, those that may be)
_DISTRIBUTIONS: dict[str, tuple[Callable[..., Source], tuple[str, ...], tuple[str, ...]]] = {
    "lognormal": (_lognormal, ("median", "p99"), ("max",)),
    "uniform": (_uniform, ("low", "high"), ()),
    "constant": (_constant, ("tokens",), ()),
}
_ALLOWED = "lognormal:median=200,p99=2000[,max=8000], uniform:low=10,high=500 or constant:tokens=200"


def read_lengths(text: str) -> Source:
    """Lengths of samples, in tokens, from a distribution or a file.

    Args:
      text: `lognormal:median=…,p99=…[,max=…]`, `uniform:low=…,high=…`, `constant:tokens=…`; or a file with a JSON list of
        numbers, with numbers between spaces, commas or line breaks, or with a JSON object a line that has `tokens`, as
        in samples.jsonl of a run.

    Raises:
      InputError: neither, or numbers that are no lengths.
    """
    name, colon, rest = text.partition(":")
    if name not in _DISTRIBUTIONS:
        path = pathlib.Path(text)
        if os.path.isfile(path):
            return drawn_from(_lengths_of_file(path))
        hint = did_you_mean(name, _DISTRIBUTIONS)
        raise InputError(
            f"--lengths {text}: neither a distribution nor a file that exists. Give {_ALLOWED}, or a file of numbers.{hint}"
        )
    make, must, may = _DISTRIBUTIONS[name]
    arguments: dict[str, float] = {}
    for item in rest.split(",") if colon and rest else []:
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in (*must, *may) or key in arguments:
            found = "is given twice" if key in arguments else f"is not an argument of {name}"
            raise InputError(f"--lengths {text}: {key or item!r} {found}. Write {_ALLOWED}.")
        try:
            arguments[key] = _checked(float(value))
        except ValueError as error:
            why = error if isinstance(error, InputError) else f"{value!r} is not a number."
            raise InputError(f"--lengths {text}: {key}: {why}") from None
    if missing := [key for key in must if key not in arguments]:
        raise InputError(f"--lengths {text}: {' and '.join(missing)} must be given. Write {_ALLOWED}.")
    try:
        return make(**arguments)
    except InputError as error:
        raise InputError(f"--lengths {text}: {error}") from None


def _checked(value: float) -> float:
    if not 1 <= value <= MOST_TOKENS:  # also False for NaN
        shown = f"{value:g}" if abs(value) < 1e300 or not isinstance(value, int) else "a larger integer"
        raise InputError(f"a length is between 1 and {MOST_TOKENS:,} tokens, got {shown}.")
    return value


def _lengths_of_file(path: pathlib.Path) -> np.ndarray:
    """The lengths in a file, i64[N]."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise InputError(f"--lengths {path}: the file cannot be read: {error}.") from None
    values: list[Any] = []
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, list):
        values = whole
    else:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                if line.lstrip().startswith("{"):
                    values.append(json.loads(line)["tokens"])
                else:
                    values += [float(word) for word in line.replace(",", " ").split()]
            except (KeyError, ValueError, RecursionError):
                raise InputError(
                    f"--lengths {path}, line {number}: expected numbers, or a JSON object with tokens, found "
                    f"{line.strip()[:60]!r}."
                ) from None
    if not values:
        raise InputError(f"--lengths {path}: the file holds no numbers. Give one length or more.")
    for place, value in enumerate(values, 1):
        try:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{str(value)[:60]!r} is not a number.")
            _checked(value)
        except InputError as error:
            raise InputError(f"--lengths {path}, number {place}: {error}") from None
    return np.rint(np.asarray(values, np.float64)).astype(np.int64)


def summary(source: Source, seed: int, n: int = 20_000) -> dict[str, float]:
    """Median, mean, 99th percentile and the largest of `n` draws."""
    values = source(seed)(n)
    return {
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "p99": float(np.percentile(values, 99)),
        "max": float(values.max()),
    }


def limited(source: Source, most: int) -> Source:
    """Lengths of at most so many tokens."""

    def start(seed: int) -> Lengths:
        lengths = source(seed)
        return lambda n: np.minimum(lengths(n), most)

    return start
