"""What a run folder says of lengths and speeds, and how well the simulator foretells that run."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxrl_llm.config import Config, load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl, read_metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.planning.lengths import MOST_TOKENS, Source, drawn_from
from jaxrl_llm.rollout.stream import Schedule
from jaxrl_llm.simulate import Fleet, Learner, Lengths, Outcome, simulate

__all__ = ["MOST_SECONDS", "Calibration", "Record", "calibrate", "planned", "read_run", "simulated"]


MOST_SECONDS = 1e9  # thirty years


def planned(config: Config) -> tuple[Schedule, int]:
    """(the schedule of a config, samples of a prompt that are begun).

    Raises:
      InputError: settings that exclude each other or that are not modelled.
    """
    s, r = config.schedule, config.rollout
    if r.refill_rounds:
        raise InputError(
            f"rollout.refill_rounds: {r.refill_rounds} replaces groups by their rewards, which are not simulated. Add "
            "--set rollout.refill_rounds=0."
        )
    if s.max_age == 0 and s.swap != "keep":
        raise InputError(
            f"schedule.swap: {s.swap} needs samples that go on under the next weights, and with max_age=0 there are none. "
            "Raise schedule.max_age, or leave swap out."
        )
    schedule = Schedule(
        groups=r.prompts,
        samples=r.group_size,
        max_age=s.max_age,
        sync_every=s.sync_every,
        swap=s.swap,
        ahead=bool(config.mesh.sampler and s.max_age >= s.sync_every),
    )
    return schedule, r.group_size + s.over_generation


@dataclasses.dataclass(frozen=True)
class Record:
    """What a run folder says of lengths and times, by train step."""

    folder: str
    config: Config
    lengths: list[np.ndarray]  # i64[samples] each: those in samples.jsonl
    sampling: np.ndarray  # f64[N] seconds of the rollout
    learning: np.ndarray  # f64[N] seconds of scoring and update
    ticks: np.ndarray | None  # i64[N] dispatches of the sampler, of an asynchronous run

    def source(self) -> Source:
        """Draws from all lengths of the run."""
        return drawn_from(np.concatenate(self.lengths))

    def source_by_step(self, samples: int) -> Source:
        """Draws from the lengths of the train step that a sample belongs to, were they trained on in order.

        Args:
          samples: that are begun for a train step.
        """

        def start(seed: int) -> Lengths:
            rng, drawn = np.random.default_rng(seed), 0

            def lengths(n: int) -> np.ndarray:
                nonlocal drawn
                steps = np.minimum(np.arange(drawn, drawn + n) // samples, len(self.lengths) - 1)
                drawn += n
                return np.array([self.lengths[v][rng.integers(len(self.lengths[v]))] for v in steps])

            return lengths

        return start


def read_run(folder: pathlib.Path) -> Record:
    """What `jaxrl train` recorded.

    Raises:
      InputError: it is not a run folder, or the run recorded no samples or no train steps, or figures that are none.
    """
    if not os.path.isfile(folder / "config.yaml"):
        raise InputError(
            f"--from {folder}: it is not a run folder: it has no config.yaml. Give the folder that `jaxrl train` wrote."
        )
    config = load_config(folder / "config.yaml")
    rows = [row for row in read_metrics(folder) if "time/rollout" in row and "time/update" in row]
    if not rows:
        raise InputError(
            f"--from {folder}: metrics.jsonl has no train step with a rollout. Let `jaxrl train` do a few, or give "
            "--lengths, --decode-seconds and --update-seconds instead."
        )
    by_step: dict[int, list[int]] = {}
    for sample in read_jsonl(folder / "samples.jsonl"):
        if isinstance(sample.get("version"), int) and isinstance(sample.get("tokens"), int):
            if sample["tokens"] > MOST_TOKENS:
                raise InputError(
                    f"--from {folder}: samples.jsonl has a sample of {str(sample['tokens'])[:20]} tokens; {MOST_TOKENS:,} are "
                    "the most. Give another run."
                )
            by_step.setdefault(sample["version"], []).append(max(1, sample["tokens"]))
    for row in rows:
        if not isinstance(row.get("version"), int):
            raise InputError(
                f"--from {folder}: metrics.jsonl has a train step whose version is {str(row.get('version'))[:40]!r}, not a "
                "number. Give another run, or --lengths with --decode-seconds and --update-seconds."
            )
    if missing := [row["version"] for row in rows if row["version"] not in by_step]:
        raise InputError(
            f"--from {folder}: samples.jsonl has no samples of train step {missing[0]}"
            f"{f' and {len(missing) - 1} more' if missing[1:] else ''}. Give another run, or --lengths with "
            "--decode-seconds and --update-seconds."
        )
    ticks = [_figure(folder, row, "rollout/ticks") if "rollout/ticks" in row else None for row in rows]
    return Record(
        folder=str(folder),
        config=config,
        lengths=[np.array(by_step[row["version"]], np.int64) for row in rows],
        sampling=np.array([_figure(folder, row, "time/rollout") for row in rows], np.float64),
        learning=np.array(
            [
                _figure(folder, row, "time/learner")
                if "time/learner" in row  # sampled meanwhile
                else sum(_figure(folder, row, key) for key in ("time/update", "time/score") if key in row)
                for row in rows
            ],
            np.float64,
        ),
        ticks=None if None in ticks else np.array(ticks, np.int64),
    )


def _figure(folder: pathlib.Path, row: Mapping[str, Any], key: str) -> float:
    """A figure of a train step, seconds or a count. Raises InputError."""
    value = row[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_SECONDS:
        raise InputError(
            f"--from {folder}: {key} of train step {row['version']} in metrics.jsonl is {str(value)[:40]!r}; expected a number "
            f"in [0, {MOST_SECONDS:g}]. Give another run, or --lengths with --decode-seconds and --update-seconds."
        )
    return value


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Speeds of a recorded run, and how well they foretell it."""

    decode_seconds: float  # of a decode step, with what else a rollout does: prefill, rewards, the host
    update_seconds: float  # scoring included
    steps: int  # train steps that the speeds are the mean of
    left_out: int  # others: the first one, and those that took several times as long (compiling)
    # Speeds of every second of these steps, applied to the others:
    checked: int  # steps
    simulated_seconds: float
    measured_seconds: float
    simulated_ticks: int | None  # dispatches of the whole run, where they were recorded
    measured_ticks: int | None

    @property
    def relative_error(self) -> float:
        """Of the simulated seconds of the steps that were not used."""
        return self.simulated_seconds / self.measured_seconds - 1.0


_OUTLIER = 4.0  # times the median


def simulated(record: Record, *, seed: int = 0) -> Outcome:
    """A recorded run under its own schedule, in decode steps: no speeds are needed to count them.

    Raises:
      InputError: the run did what is not modelled.
    """
    if record.config.rollout.refill_rounds:
        raise InputError(
            f"--from {record.folder}: the run replaced groups by their rewards (rollout.refill_rounds), which are not "
            "simulated. Give another run, or --decode-seconds and --update-seconds."
        )
    schedule, n = planned(record.config)
    sampler = record.config.sampler
    return simulate(
        schedule,
        Fleet(slots=sampler.slots, steps_per_dispatch=sampler.steps_per_dispatch),
        Learner(),
        record.source_by_step(schedule.groups * n)(seed),
        steps=len(record.lengths),
        n=n,
    )


def calibrate(record: Record, *, seed: int = 0) -> Calibration:
    """Takes the speeds of a recorded run from its seconds and from the decode steps that `simulated` counts.

    Raises:
      InputError: fewer than two train steps are left to compare.
    """
    found = simulated(record, seed=seed)
    steps = np.array(found.decode_steps, np.float64)
    kept = np.arange(len(steps)) > 0  # the first compiles
    if kept.any():
        usual = np.median(record.sampling[kept] / np.maximum(1.0, steps[kept]))
        kept &= record.sampling <= _OUTLIER * usual * np.maximum(1.0, steps)
        kept &= record.learning <= _OUTLIER * np.median(record.learning[1:])
    used, others = np.flatnonzero(kept)[::2], np.flatnonzero(kept)[1::2]
    if not len(others) or not steps[used].sum():
        raise InputError(
            f"--from {record.folder}: of its {len(steps)} train steps {int(kept.sum())} can be used (the first one compiles); "
            "at least 2 that sample are needed. Let it train longer, or give --lengths, --decode-seconds and "
            "--update-seconds."
        )

    def speeds(of: np.ndarray) -> tuple[float, float]:
        return float(record.sampling[of].sum() / steps[of].sum()), float(record.learning[of].mean())

    decode, update = speeds(used)
    all_decode, all_update = speeds(np.flatnonzero(kept))
    return Calibration(
        decode_seconds=all_decode,
        update_seconds=all_update,
        steps=int(kept.sum()),
        left_out=int((~kept).sum()),
        checked=len(others),
        simulated_seconds=float(steps[others].sum() * decode + len(others) * update),
        measured_seconds=float((record.sampling + record.learning)[others].sum()),
        simulated_ticks=None if record.ticks is None else sum(found.ticks),
        measured_ticks=None if record.ticks is None else int(record.ticks.sum()),
    )
