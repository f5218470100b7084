"""metrics.jsonl and samples.jsonl: what a run leaves behind, one JSON object a line.

Two runs that compute the same numbers write the same bytes: keys are sorted, floats are written so that
they read back exactly, and every figure that depends on the clock or on memory has a key that starts
with `time/` or `memory/` (others that look like one are refused), so the rest can be compared as is.
"""

from __future__ import annotations

import enum
import json
import math
import os
import pathlib
import re
import resource
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol

import jax
import numpy as np

from jaxrl_llm.diagnostics.redact import hide_environment_secrets
from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Trajectory

__all__ = [
    "METRICS",
    "MetricsWriter",
    "SamplesWriter",
    "Timers",
    "Tracker",
    "describe_metric",
    "memory_metrics",
    "read_jsonl",
    "read_metrics",
]

METRICS: dict[str, str] = {
    "version": "train steps done after this update; snapshot `version` holds exactly these weights",
    "reward/mean": "mean reward of the trajectories whose reward could be computed",
    "reward/std": "standard deviation of those rewards over the batch",
    "reward/accuracy": "fraction of sampled completions whose answer is right, during training",
    "reward/no_signal": "fraction of trajectories whose reward could not be computed (not counted as 0)",
    "reward/errors": "trajectories whose reward could not be computed",
    "reward/part_NAME": "mean of the part NAME of the reward",
    "completion/length_mean": "mean tokens of a completion, the stop token included",
    "completion/length_max": "most tokens of a completion in the batch",
    "completion/truncated_fraction": "fraction of completions cut by the length limit",
    "completion/stop_NAME": "fraction of completions that ended for the reason NAME",
    "policy/entropy": "mean entropy of the policy per trained token, in nats",
    "policy/kl_behavior": "KL(behavior || current) per token, mean log-ratio (k1), in nats; may be slightly negative",
    "policy/kl_behavior_k3": "KL(behavior || current) per token, k3 estimate (never negative), in nats",
    "policy/kl_proximal": "KL(proximal || current) per token, mean log-ratio (k1), in nats",
    "policy/kl_reference": "KL(current || reference) per token, as the penalty estimates it, in nats",
    "policy/kl_in_reward": "KL per token that was taken off the reward, in nats",
    "policy/clip_fraction": "fraction of trained tokens whose gradient the surrogate clipped away",
    "policy/clip_fraction_low": "the same, at the lower bound (ratio too small, negative advantage)",
    "policy/clip_fraction_high": "the same, at the upper bound (ratio too large, positive advantage)",
    "policy/clip_fraction_dual": "fraction of trained tokens at the dual bound",
    "policy/ratio": "mean ratio current / anchor over trained tokens",
    "policy/ratio_min": "smallest ratio current / anchor over trained tokens",
    "policy/ratio_max": "largest ratio current / anchor over trained tokens",
    "policy/ratio_low": "smallest ratio current / anchor of a sequence, averaged over sequences",
    "policy/ratio_high": "largest ratio current / anchor of a sequence, averaged over sequences",
    "policy/log_ratio_abs": "mean |log ratio current / anchor| over trained tokens",
    "policy/logprob_gap_mean": "mean |log-prob of the sampler - log-prob of the learner|, same weights, in nats",
    "policy/logprob_gap_max": "largest |log-prob of the sampler - log-prob of the learner|, same weights, in nats",
    "policy/loss": "value of the objective that was minimised",
    "policy/loss_policy": "its policy term",
    "policy/penalty_NAME": "its penalty NAME",
    "policy/length": "mean trained tokens of a sequence",
    "policy/reward": "mean reward of a trajectory as the objective sees it",
    "policy/reward_missing": "fraction of trajectories that the objective sees without a reward",
    "policy/truncated": "fraction of trajectories that the objective sees as truncated",
    "policy/group_no_signal": "fraction of groups whose rewards are all equal or missing",
    "policy/group_reward_std": "standard deviation of the rewards within a group, averaged over groups",
    "policy/overlong_penalty": "mean penalty for length",
    "policy/importance_weight": "mean importance weight after the cut",
    "policy/importance_weight_square": "mean square of the importance weight after the cut",
    "policy/importance_truncated": "fraction of trained tokens whose importance weight was cut",
    "policy/importance_masked": "fraction of trained tokens that the importance mask removed",
    "policy/age": "mean age of a trained token, in versions",
    "policy/stale": "fraction of trained tokens that were dropped as too old",
    "optimizer/grad_norm": "global norm of the gradient before clipping",
    "optimizer/learning_rate": "learning rate of this update",
    "optimizer/skipped": "updates of this train step that were skipped because a gradient was not finite",
    "optimizer/trained_tokens": "tokens that this update trained on",
    "rollout/tokens": "tokens sampled for this update",
    "rollout/trajectories": "trajectories sampled for this update",
    "rollout/groups": "groups sampled for this update",
    "rollout/no_signal_groups": "groups whose rewards are all equal or missing, so that they teach nothing",
    "rollout/prompts_skipped": "prompts left out so far because they are too long",
    "eval/TASK/items": "held-out items of TASK in this evaluation",
    "eval/TASK/prompts_skipped": "held-out items left out because their prompt is too long",
    "eval/TASK/constant_baseline": "accuracy of always giving the most frequent answer of TASK",
    "eval/TASK/format_rate": "fraction of greedy completions from which an answer can be read at all",
    "eval/TASK/KIND_accuracy": "accuracy on held-out items of TASK; KIND is greedy, or sampled as in training",
    "eval/TASK/KIND_accuracy_low": "lower end of its 95% confidence interval",
    "eval/TASK/KIND_accuracy_high": "upper end of its 95% confidence interval",
    "eval/TASK/KIND_accuracy_given_format": "accuracy among the completions from which an answer can be read",
    "eval/TASK/KIND_lenient_accuracy": "fraction of completions with the right answer anywhere in the text",
    "eval/TASK/KIND_format_rate": "fraction of completions from which an answer can be read",
    "eval/TASK/KIND_length_mean": "mean tokens of a completion",
    "eval/TASK/KIND_truncated_fraction": "fraction of completions cut by the length limit",
    "eval/TASK/KIND_reward_errors": "completions that could not be scored",
    "time/rollout": "seconds spent sampling completions",
    "time/score": "seconds spent on rewards and on log-probs of fixed policies",
    "time/update": "seconds spent on the optimiser updates",
    "time/eval": "seconds spent on evaluation",
    "time/snapshot": "seconds that the loop waited for a snapshot since the row before",
    "time/total": "seconds of the whole train step",
    "time/tokens_per_second": "sampled tokens per second of sampling",
    "memory/peak_bytes": "peak memory of the device (of the process, where the device does not tell)",
    "memory/host_peak_bytes": "peak resident memory of the process",
}
"""Definition of every metric that the loop writes.

TASK stands for the name of a task, KIND for greedy or sampled, NAME for a part, a penalty or a reason.
"""

_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:\-]*(/[A-Za-z0-9_.:\-]+)*")
_CLOCK_WORDS = re.compile(
    r"(?:^|[/_])(?:seconds?|secs?|ms|millis|milliseconds|minutes|hours|duration|elapsed|latency|wall|wallclock"
    r"|walltime|clock|timestamp|eta|per_second|per_sec|tok_s|rss|hbm|bytes|mb|gb|mib|gib|flops|mfu|throughput)(?:$|[/_])"
)
_CLOCK_PREFIXES = ("time/", "memory/")
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
        A run must therefore write the line of version v before it saves snapshot v.
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
        self, version: int, trajectories: Sequence[Trajectory], tokenizer: Any, *, limit: int = 16
    ) -> None:
        """Writes trajectories as text.

        Args:
          version: train steps done after the update that they were used for.
          trajectories: of one batch; when there are more than `limit`, they are picked at equal distances.
          tokenizer: has `decode(ids, skip_special=...)`.
          limit: most lines that are written.
        """
        picked = list(range(len(trajectories)))
        if len(trajectories) > limit:
            picked = sorted({round(i * (len(trajectories) - 1) / max(1, limit - 1)) for i in range(limit)})
        self.write_records(version, (_sample(trajectories[i], tokenizer) for i in picked))

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


class Timers:
    """Adds up seconds by phase, under keys that start with time/.

    >>> timers = Timers()
    >>> with timers("rollout"):
    ...     pass
    >>> sorted(timers.metrics())
    ['time/rollout', 'time/total']
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Adds the seconds of the block to `time/<phase>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def seconds(self, phase: str) -> float:
        """Seconds of a phase since the last `metrics()`, 0 if it did not run."""
        return self._seconds.get(phase, 0.0)

    def metrics(self, tokens: int | None = None) -> dict[str, float]:
        """The figures since the last call, and starts anew.

        Args:
          tokens: tokens sampled meanwhile; gives time/tokens_per_second of the phase "rollout" if there is one,
            else of everything.
        """
        now = time.perf_counter()
        total = now - self._start
        figures = {f"time/{phase}": seconds for phase, seconds in self._seconds.items()}
        figures["time/total"] = total
        if tokens is not None:
            figures["time/tokens_per_second"] = tokens / max(self._seconds.get("rollout", total), 1e-9)
        self._seconds, self._start = {}, now
        return figures


def describe_metric(key: str) -> str:
    """The definition of a key of metrics.jsonl, "" if it has none.

    >>> describe_metric("eval/addition/greedy_accuracy_low")
    'lower end of its 95% confidence interval'
    """
    if key in METRICS:
        return METRICS[key]
    return next((text for pattern, text in _PATTERNS if pattern.fullmatch(key)), "")


def _pattern(key: str) -> re.Pattern[str]:
    for name, expression in (("TASK", ".+"), ("KIND", "(?:greedy|sampled)"), ("NAME", "[^/]+")):
        key = key.replace(name, expression)
    return re.compile(key)


_PATTERNS = [(_pattern(key), text) for key, text in METRICS.items() if re.search("TASK|KIND|NAME", key)]


def memory_metrics() -> dict[str, int]:
    """memory/peak_bytes (device, or the process on CPU) and memory/host_peak_bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    device_peak = max((int(stat.get("peak_bytes_in_use", 0)) for stat in stats), default=0)
    return {"memory/peak_bytes": device_peak or peak, "memory/host_peak_bytes": peak}


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


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"Metric key {key!r} is malformed. Use words of letters, digits, _ . : - joined by '/', such as "
            "reward/mean."
        )
    if not key.startswith(_CLOCK_PREFIXES) and _CLOCK_WORDS.search(key.lower()):
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
        return hide_environment_secrets(value)
    return value


def _sample(trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    return {
        "prompt": tokenizer.decode([int(t) for t in trajectory.prompt.tokens], skip_special=False),
        "completion": tokenizer.decode([int(t) for t in trajectory.completion], skip_special=True),
        "uid": trajectory.prompt.uid,
        "task": trajectory.prompt.task,
        "group": int(trajectory.group),
        "tokens": int(trajectory.mask.sum()),
        "reward": trajectory.reward,
        "rewards": dict(trajectory.rewards),
        "reason": trajectory.reason,
        "stop": trajectory.stop,
    }
