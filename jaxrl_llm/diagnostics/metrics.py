"""metrics.jsonl and samples.jsonl: what a run leaves behind, one JSON object a line.

Two runs that compute the same numbers write the same bytes: keys are sorted, floats are written so that
they read back exactly, and every figure that depends on the clock or on memory has a key that starts
with `time/` or `memory/` (others that look like one are refused), so the rest can be compared as is.
"""

from __future__ import annotations

import collections
import enum
import json
import math
import os
import pathlib
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Protocol

import jax
import numpy as np

from jaxrl_llm.diagnostics.catalog import METRICS, describe_metric
from jaxrl_llm.diagnostics.redact import hide_credentials
from jaxrl_llm.diagnostics.resources import Timers, memory_metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Trajectory

__all__ = [
    "METRICS",
    "LedgerWriter",
    "MetricsWriter",
    "SamplesWriter",
    "Timers",
    "Tracker",
    "describe_metric",
    "memory_metrics",
    "read_jsonl",
    "read_metrics",
]

_KEY = re.compile(r"[^/\x00-\x1f\x7f]+(/[^/\x00-\x1f\x7f]+)*")
_CLOCK_WORDS = re.compile(
    r"(?:^|[/_])(?:seconds?|secs?|ms|millis|milliseconds|minutes|hours|duration|elapsed|latency|wall|wallclock"
    r"|walltime|clock|timestamp|eta|per_second|per_sec|tok_s|rss|hbm|bytes|mb|gb|mib|gib|flops|mfu|throughput)(?:$|[/_])"
)
_CLOCK_PREFIXES = ("time/", "memory/")
_USER_NAMED = re.compile(
    r"reward/part_.*|policy/penalty_.*|eval/.*/"
)  # names from tasks and rewards say nothing
# str.splitlines breaks lines at these; inside JSON strings they can be written as escapes.
_LINE_BREAKS = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}


class Tracker(Protocol):
    """An outside service that receives the same figures, for example `track_wandb.WandbTracker`."""

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        """Records finite numbers of one update."""

    def close(self) -> None:
        """Sends what is pending."""


class _JsonLines:
    """An append-only JSONL file that process 0 writes, cut back to a version when a run resumes."""

    def __init__(self, path: pathlib.Path, resume_version: int | None, process_index: int | None) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        if (jax.process_index() if process_index is None else process_index) != 0:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_version is not None:
                _truncate(path, resume_version)
            elif path.exists() and path.stat().st_size:
                raise InputError(
                    f"{path} holds the figures of another run. Continue that run with --resume, or give another "
                    "folder with --run."
                )
            self._file = open(path, "ab")
        except OSError as error:
            raise InputError(
                f"The run folder cannot be written: {error.strerror or error} ({path}). Give another folder with "
                "--run, or make this one writable."
            ) from error

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.write(_encode(record))
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class MetricsWriter:
    """Writes metrics.jsonl: one object per update, with `version`, flushed at once.

    Args:
      run_dir: the run folder.
      resume_version: None for a new run (the file must not hold anything yet); otherwise the version that
        the run resumes from: later lines, and a half-written last line, are removed. -1 removes all.
        A run must therefore write the line of version v before it saves snapshot v. A warning names train steps up
        to there that have no line, or several.
      trackers: outside services that get the same figures.
      process_index: only process 0 writes; default `jax.process_index()`.

    Raises:
      InputError: the folder cannot be written, or a new run finds the figures of another.
    """

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        resume_version: int | None = None,
        *,
        trackers: Sequence[Tracker] = (),
        process_index: int | None = None,
    ) -> None:
        self._lines = _JsonLines(pathlib.Path(run_dir) / "metrics.jsonl", resume_version, process_index)
        if resume_version is not None and self._lines._file is not None:
            _check_rows(self._lines.path, resume_version)
        self._trackers = tuple(trackers) if self._lines._file is not None else ()
        self.path = self._lines.path

    def write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Writes one line and returns the row as Python numbers.

        Args:
          row: figures by key, `version` (train steps done) among them. Values may be numbers, 0-d arrays of
            NumPy or JAX, `Mean`s, strings or None. NaN and infinities are written as the strings "NaN",
            "Infinity" and "-Infinity", so that every line is valid JSON.

        Raises:
          ValueError: `version` is missing, or a key is malformed, or looks like a time or a size but is not
            under time/ or memory/.
        """
        if "version" not in row:
            raise ValueError("A row of metrics needs its 'version' (train steps done).")
        for key in row:
            _check_key(key)
        figures = {key: _number(key, value) for key, value in _fetch(row).items()}
        version = int(figures.pop("version"))
        self._lines.write({"version": version, **dict(sorted(figures.items()))})
        finite = {
            key: float(value)
            for key, value in figures.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for tracker in self._trackers:
            tracker.log(version, finite)
        return {"version": version, **figures}

    def close(self) -> None:
        """Closes the file and the trackers."""
        self._lines.close()
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class LedgerWriter:
    """Writes ledger.jsonl: what became of the samples of a train step, by reason, task and length.

    Arguments as for `MetricsWriter`.
    """

    def __init__(self, run_dir: str | pathlib.Path, resume_version: int | None = None) -> None:
        self._lines = _JsonLines(pathlib.Path(run_dir) / "ledger.jsonl", resume_version, None)

    def write(self, version: int, lines: Iterable[Mapping[str, Any]]) -> None:
        """Lines of one train step (`rollout.ledger.Ledger.step`)."""
        for line in lines:
            self._lines.write({"version": int(version), **line})

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._lines.close()


class SamplesWriter:
    """Writes samples.jsonl: one object per kept completion, with `version`.

    Arguments as for `MetricsWriter`.
    """

    def __init__(
        self,
        run_dir: str | pathlib.Path,
        resume_version: int | None = None,
        *,
        process_index: int | None = None,
    ) -> None:
        self._lines = _JsonLines(pathlib.Path(run_dir) / "samples.jsonl", resume_version, process_index)
        self.path = self._lines.path

    def write(
        self,
        version: int,
        trajectories: Sequence[Trajectory],
        tokenizer: Any,
        *,
        limit: int = 16,
        shares: Sequence[float] | None = None,
    ) -> None:
        """Writes trajectories as text.

        Args:
          version: train steps done after the update that they were used for.
          trajectories: of one batch; when there are more than `limit`, they are picked at equal distances.
          tokenizer: has `decode(ids, skip_special=...)`.
          limit: most lines that are written.
          shares: the part of each trajectory in the gradient, written as `gradient_share`; None: not known.
        """
        picked = list(range(len(trajectories)))
        if len(trajectories) > limit:
            picked = sorted({round(i * (len(trajectories) - 1) / max(1, limit - 1)) for i in range(limit)})
        records = [_sample(trajectories[i], tokenizer) for i in picked]
        if shares is not None:
            records = [
                record | {"gradient_share": shares[i]} for record, i in zip(records, picked, strict=True)
            ]
        self.write_records(version, records)

    def write_records(self, version: int, records: Iterable[Mapping[str, Any]]) -> None:
        """Writes one line per record of JSON values or NumPy scalars.

        The report knows the keys prompt, completion, reward (None = no signal), reason, stop and task.
        """
        for record in records:
            self._lines.write({"version": int(version), **{key: record[key] for key in sorted(record)}})

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()

    def __enter__(self) -> SamplesWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_metrics(run_dir: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl of a run, "NaN", "Infinity" and "-Infinity" turned back into floats."""
    return [
        {
            key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
            for key, value in row.items()
        }
        for row in read_jsonl(pathlib.Path(run_dir) / "metrics.jsonl")
    ]


def read_jsonl(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file.

    A missing file gives an empty list; a last line that was cut by a crash is left out.

    Raises:
      InputError: a line in the middle is not a JSON object.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    records = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is None:
            if number >= len(lines) - 1:
                break
            raise InputError(f"{path}, line {number} is not a JSON object: {line[:60]!r}. Remove that line.")
        records.append(record)
    return records


_NOT_FINITE: dict[str, Any] = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # the caller reports it
        return None
    return record if isinstance(record, dict) else None


def _truncate(path: pathlib.Path, version: int) -> None:
    """Keeps the lines up to `version`, byte for byte; atomic."""
    if not path.exists():
        return
    kept, broken = [], 0
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = _parse(line)
        if record is None or not isinstance(record.get("version"), int):
            broken += number < len(lines)  # a cut last line is what a crash leaves
        elif record["version"] <= version:
            kept.append(line + b"\n")
    if broken:
        warnings.warn(
            f"{path}: removed {broken} lines that are not JSON objects with a version.", stacklevel=4
        )
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _check_rows(path: pathlib.Path, version: int) -> None:
    """Warns unless the train steps 1 … `version` have one line each: a run writes those, so something else was here."""
    rows = collections.Counter(row["version"] for row in read_jsonl(path))
    missing = [v for v in range(1, version + 1) if not rows[v]]
    repeated = sorted(v for v, count in rows.items() if count > 1)
    for what, versions in (("has no line for", missing), ("has several lines for", repeated)):
        if versions:
            listed = ", ".join(map(str, versions[:8])) + (", …" if len(versions) > 8 else "")
            warnings.warn(
                f"{path} {what} {len(versions)} of the train steps before the snapshot: {listed}. The run goes on from the "
                "snapshot, which is whole; its curves and what jaxrl replay compares are not.",
                stacklevel=4,
            )


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"Metric key {key!r} is malformed. Use printable names joined by single '/', such as reward/mean."
        )
    if not key.startswith(_CLOCK_PREFIXES) and _CLOCK_WORDS.search(_USER_NAMED.sub("", key.lower())):
        raise ValueError(
            f"Metric key {key!r} looks like a time or a memory size, and such figures differ between equal runs. "
            "Start it with 'time/' or 'memory/'."
        )


def _fetch(metrics: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, value in metrics.items():
        total, count = getattr(value, "total", None), getattr(value, "count", None)
        is_mean = total is not None and count is not None and not callable(count)
        values[key] = (total, count) if is_mean else value
    arrays = {key: value for key, value in values.items() if isinstance(value, tuple | jax.Array)}
    values.update(jax.device_get(arrays))
    for key, value in values.items():
        if isinstance(value, tuple):
            total, count = (np.asarray(part) for part in value)
            values[key] = total / count if count else np.zeros_like(total)
    return values


def _number(key: str, value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float | np.generic | np.ndarray):
        if np.size(value) != 1:
            raise ValueError(f"Metric {key!r} must be one number, got an array of shape {np.shape(value)}.")
        value = np.asarray(value).reshape(()).item()
        if isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            return value
    try:
        return float(np.asarray(value, np.float64))  # bfloat16 scalars come here
    except (TypeError, ValueError) as error:
        raise ValueError(f"Metric {key!r} must be a number, got {type(value).__name__}.") from error


def _encode(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False)
    for character, escape in _LINE_BREAKS.items():
        text = text.replace(character, escape)
    try:
        return (text + "\n").encode()
    except UnicodeEncodeError:  # a lone surrogate in a completion: only escapes can carry it
        return (json.dumps(_plain(record), allow_nan=False) + "\n").encode()


def _plain(value: Any) -> Any:
    """JSON values only: secrets out of text, NumPy scalars to Python, non-finite floats to strings."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return hide_credentials(value)
    return value


def _sample(trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    # One that fills a batch and trains nothing has an empty mask; what follows its prompt was sampled all the same.
    written = (
        trajectory.completion if trajectory.mask.any() else trajectory.tokens[len(trajectory.prompt.tokens) :]
    )
    return {
        "prompt": tokenizer.decode([int(t) for t in trajectory.prompt.tokens], skip_special=False),
        "completion": tokenizer.decode([int(t) for t in written], skip_special=True),
        "uid": trajectory.prompt.uid,
        "task": trajectory.prompt.task,
        "group": int(trajectory.group),
        "tokens": len(written),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "reason": trajectory.reason,
        "stop": trajectory.stop,
    }
