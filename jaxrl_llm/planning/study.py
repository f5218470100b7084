"""Schedules beside each other on hardware that is given: what idles, how old samples get, what is dropped.

Speeds are seconds per decode step of a full batch and seconds per update; a chip more in the fleet brings its slots, a
chip more in the learner divides the update. Both scale perfectly here: what communication costs has to be in the
seconds that are given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.config import Config
from jaxrl_llm.diagnostics.timeline import Panel
from jaxrl_llm.errors import InputError
from jaxrl_llm.planning.lengths import Source, limited, read_lengths, summary
from jaxrl_llm.planning.recorded import MOST_SECONDS, Calibration, Record, calibrate, planned
from jaxrl_llm.rollout.stream import Schedule
from jaxrl_llm.simulate import Fleet, Learner, Outcome, simulate

__all__ = ["Chips", "Plan", "Run", "Study", "compared", "figures", "plan_name", "run_plan", "study", "table"]

_MOST_SAMPLES = 100_000_000  # about five minutes
_MOST_UNDER_WAY = 10_000_000  # samples: a few gigabytes
_LEAST_SECONDS = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chips:
    """Hardware and its speed."""

    slots: int  # of one replica
    replicas: int = 1
    steps_per_dispatch: int = 1
    decode_seconds: float = 1.0  # of a decode step
    swap_seconds: float = 0.0  # new weights in the fleet
    update_seconds: float = 0.0  # of one chip
    learner_chips: int = 1
    split: bool = False  # the learner has chips of its own; else those of the fleet train

    @property
    def fleet(self) -> Fleet:
        """For the simulator."""
        return Fleet(
            slots=self.slots * self.replicas,
            tick_seconds=self.decode_seconds,
            swap_seconds=self.swap_seconds,
            steps_per_dispatch=self.steps_per_dispatch,
        )

    @property
    def learner(self) -> Learner:
        """For the simulator."""
        chips = self.learner_chips if self.split else self.replicas
        return Learner(update_seconds=self.update_seconds / chips, split=self.split)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One schedule to simulate."""

    name: str
    schedule: Schedule
    n: int  # samples of a prompt that are begun


@dataclasses.dataclass(frozen=True)
class Run:
    """A simulated plan."""

    plan: Plan
    outcome: Outcome


def plan_name(schedule: Schedule) -> str:
    """What a schedule is called."""
    if schedule.sync_every > 1:
        return f"sync_every {schedule.sync_every}, max_age {schedule.max_age}"
    if not schedule.max_age:
        return "synchronous"
    if schedule.max_age == 1 and schedule.swap == "drain":
        return "one step off"
    return f"asynchronous, max_age {schedule.max_age}"


def compared(config: Config) -> list[Plan]:
    """Synchronous, one step off and asynchronous: with the max_age of the config if it is 2 or more, else with 4.

    And with the sync_every of the config, if it is 2 or more.
    """
    own, n = planned(config)
    schedule = dataclasses.replace(own, sync_every=1, ahead=False)
    most = schedule.max_age if schedule.max_age > 1 else 4
    swap = "keep" if schedule.swap == "drain" else schedule.swap
    schedules = [
        dataclasses.replace(schedule, max_age=0, swap="keep"),
        dataclasses.replace(schedule, max_age=1, swap="drain"),
        dataclasses.replace(schedule, max_age=most, swap=swap),
        *([own] if own.sync_every > 1 else []),
    ]
    return [Plan(plan_name(schedule), schedule, n) for schedule in schedules]


def scheduled(schedule: Schedule, chips: Chips) -> Schedule:
    """A schedule as a run has it on these chips: with a learner of its own the fleet samples ahead."""
    return dataclasses.replace(schedule, ahead=chips.split and schedule.max_age >= schedule.sync_every)


def run_plan(plan: Plan, chips: Chips, source: Source, *, updates: int, seed: int, watch: int = 0) -> Run:
    """Simulates a plan; `watch`: as in `simulate`.

    Raises:
      InputError: it would take too long.
    """
    samples = updates * plan.schedule.groups * plan.n
    if samples > _MOST_SAMPLES:
        raise InputError(
            f"{samples:,} samples are too many to simulate, at most {_MOST_SAMPLES:,} are allowed. Lower --updates."
        )
    if (rows := scheduled(plan.schedule, chips).outstanding * plan.n) > _MOST_UNDER_WAY:
        raise InputError(
            f"{plan.name}: {rows:,} samples under way are too many to simulate, at most {_MOST_UNDER_WAY:,} are allowed. Lower "
            "schedule.max_age, rollout.prompts or rollout.group_size."
        )
    lengths = source(seed)
    outcome = simulate(
        scheduled(plan.schedule, chips),
        chips.fleet,
        chips.learner,
        lengths,
        steps=updates,
        n=plan.n,
        watch=watch,
    )
    return Run(plan, outcome)


# -------------------------------------------------------------------------------------- figures


def figures(run: Run, chips: Chips) -> dict[str, Any]:
    """What is reported of a simulated plan, as JSON values; shares are of 1."""
    found, schedule = run.outcome, run.plan.schedule
    groups = sum(found.ages.values())
    samples = found.trained_samples + sum(samples for samples, _ in found.dropped.values())
    learning = 1.0 - found.learner_idle
    if chips.split:
        idle = chips.replicas * found.sampler_idle + chips.learner_chips * found.learner_idle
        bubble = idle / (chips.replicas + chips.learner_chips)
    else:
        bubble = max(0.0, found.sampler_idle - learning)  # while the chips train no row runs
    return {
        "schedule": run.plan.name,
        "max_age": schedule.max_age,
        "swap": schedule.swap,
        "over_generation": run.plan.n - schedule.samples,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "updates_per_hour": 3600.0 * len(found.ticks) / found.seconds,
        "bubble": bubble,
        "sampler_idle": found.sampler_idle,
        "learner_idle": found.learner_idle,
        "age_mean": sum(age * number for age, number in found.ages.items()) / groups,
        "age_max": max(found.ages),
        "ages": {str(age): number for age, number in found.ages.items()},
        "dropped": {
            reason: {"samples": number, "tokens": tokens, "share": number / samples}
            for reason, (number, tokens) in found.dropped.items()
        },
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """`figures` of several plans beside each other, as text."""
    lines = [
        ("", [row["schedule"] for row in rows]),
        ("trained tokens/s", [f"{row['tokens_per_second']:,.4g}" for row in rows]),
        ("updates/h", [f"{row['updates_per_hour']:,.4g}" for row in rows]),
        ("chips idle (bubble)", [_percent(row["bubble"]) for row in rows]),
        ("  slots without a row", [_percent(row["sampler_idle"]) for row in rows]),
        ("  learner not training", [_percent(row["learner_idle"]) for row in rows]),
        ("age, mean", [f"{row['age_mean']:.2f}" for row in rows]),
        ("age, max", [str(row["age_max"]) for row in rows]),
    ]
    for age in sorted({int(age) for row in rows for age in row["ages"]}):
        cells = [_percent(row["ages"].get(str(age), 0) / sum(row["ages"].values())) for row in rows]
        lines.append((f"  groups of age {age}", cells))
    for reason in rows[0]["dropped"]:
        dropped = [row["dropped"][reason] for row in rows]
        lines.append((f"samples dropped, {reason}", [_percent(d["share"]) for d in dropped]))
        lines.append(("  their tokens", [f"{d['tokens']:,}" for d in dropped]))
    left = max(len(name) for name, _ in lines)
    widths = [max(len(cells[i]) for _, cells in lines) for i in range(len(rows))]
    return "\n".join(
        f"{name:<{left}}  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for name, cells in lines
    )


def panel(run: Run, chips: Chips, watch: int) -> Panel:
    """The last `watch` train steps for `timeline_svg`."""
    shown = figures(run, chips)
    title = (
        f"{run.plan.name}: chips idle {_percent(shown['bubble'])}, slots {_percent(shown['sampler_idle'])}, learner "
        f"{_percent(shown['learner_idle'])}"
    )
    return Panel(title, chips.slots * chips.replicas, run.outcome.rows, run.outcome.learned[-watch:])


@dataclasses.dataclass(frozen=True)
class Study:
    """Simulated plans, with what they were simulated from."""

    runs: list[Run]
    chips: Chips
    lengths: dict[str, float]  # tokens: median, mean, p99, max
    calibration: Calibration | None
    notes: list[str]

    def as_data(self) -> dict[str, Any]:
        """JSON values."""
        calibration = None
        if self.calibration is not None:
            error = {"relative_error": self.calibration.relative_error}
            calibration = dataclasses.asdict(self.calibration) | error
        return {
            "schedules": [figures(run, self.chips) for run in self.runs],
            "chips": dataclasses.asdict(self.chips),
            "lengths": self.lengths,
            "calibration": calibration,
            "notes": self.notes,
        }

    def as_text(self) -> str:
        """For a person."""
        c, size = self.chips, self.lengths
        own = f"{c.learner_chips} of its own" if c.split else "those of the fleet"
        lines = [
            f"{c.replicas} x {c.slots} slots, {c.decode_seconds:.3g} s a decode step; learner: {own}, "
            f"{c.learner.update_seconds:.3g} s an update; {len(self.runs[0].outcome.ticks)} updates",
            f"lengths: median {size['median']:g}, mean {size['mean']:.1f}, p99 {size['p99']:.0f}, max {size['max']:g} tokens",
        ]
        if (k := self.calibration) is not None:
            lines.append(
                f"check: {k.checked} train steps of the run, with speeds taken from others, {k.simulated_seconds:.4g} s "
                f"simulated, {k.measured_seconds:.4g} s measured ({100 * k.relative_error:+.1f} %); {k.left_out} left out as "
                "compiling or disturbed"
            )
            if k.simulated_ticks is not None:
                lines.append(
                    f"       dispatches {k.simulated_ticks:,} simulated, {k.measured_ticks:,} counted"
                )
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes), "", self.table])

    @property
    def table(self) -> str:
        """`table` of all plans."""
        return table([figures(run, self.chips) for run in self.runs])

    def panels(self, watch: int) -> list[Panel]:
        """For `timeline_svg`; `watch`: as it was given to `study`."""
        return [panel(run, self.chips, watch) for run in self.runs]


def study(
    config: Config,
    *,
    record: Record | None = None,
    lengths: str | None = None,
    replicas: int = 1,
    learner_chips: int | None = None,
    split: bool = False,
    decode_seconds: float | None = None,
    update_seconds: float | None = None,
    swap_seconds: float = 0.0,
    updates: int | None = None,
    seed: int = 0,
    compare: bool = False,
    watch: int = 0,
) -> Study:
    """Simulates the schedule of a config, or several beside each other.

    Args:
      config: prompts, group size, schedule and slots of a replica.
      record: a run that lengths and speeds are taken from where they are not given.
      lengths: see `read_lengths`.
      replicas, learner_chips, split: see `Chips`; learner_chips None: one with `split`, else the fleet's.
      decode_seconds, update_seconds, swap_seconds: see `Chips`.
      updates: None: the steps of the config.
      compare: see `compared`.
      watch: train steps for a picture.

    Raises:
      InputError: numbers out of range, or something that is neither given nor recorded.
    """
    updates = config.steps if updates is None else updates
    for name, value in (
        ("--replicas", replicas),
        ("--learner-chips", 1 if learner_chips is None else learner_chips),
        ("--updates", updates),
    ):
        if not 1 <= value < 2**31:
            raise InputError(f"{name}: expected a number in [1, 2^31), got {value}.")
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed: expected a number in [0, 2^63), got {seed}.")
    if learner_chips is not None and not split:
        raise InputError(
            f"--learner-chips {learner_chips}: without --split the chips of the fleet train. Add --split, or leave it out."
        )
    plans = compared(config) if compare else [Plan(plan_name(planned(config)[0]), *planned(config))]
    drawn = None if lengths is None else read_lengths(lengths)
    wanted = {"--lengths": lengths, "--decode-seconds": decode_seconds, "--update-seconds": update_seconds}
    missing = [name for name, value in wanted.items() if value is None]
    notes: list[str] = []
    calibration = None
    if record is None:
        if drawn is None or decode_seconds is None or update_seconds is None:
            raise InputError(
                f"{', '.join(missing)}: not given, and there is no recorded run to take this from. Give it, or a run with "
                "--from RUN."
            )
        source = drawn
    else:
        source = record.source() if drawn is None else drawn
        if drawn is None and record.config.schedule.over_generation:
            notes.append(
                f"{record.folder} cancelled the last of each group to end (over_generation): its lengths are too short."
            )
        if decode_seconds is None or update_seconds is None:
            calibration = calibrate(record, seed=seed)
            if decode_seconds is None:
                decode_seconds = calibration.decode_seconds
            if update_seconds is None:
                update_seconds = calibration.update_seconds * _times(config, record, notes)
    if (most := config.rollout.max_tokens) is not None:
        source = limited(source, most)
    chips = Chips(
        slots=config.sampler.slots,
        replicas=replicas,
        steps_per_dispatch=config.sampler.steps_per_dispatch,
        decode_seconds=_seconds(decode_seconds, "--decode-seconds", positive=True),
        swap_seconds=_seconds(swap_seconds, "--swap-seconds"),
        update_seconds=_seconds(update_seconds, "--update-seconds"),
        learner_chips=learner_chips or 1,
        split=split,
    )
    for plan in plans:
        rows = plan.schedule.outstanding * plan.n
        if rows < chips.fleet.slots:
            notes.append(
                f"{plan.name}: at most {rows:,} samples are under way, fewer than the {chips.fleet.slots:,} slots. Raise "
                "rollout.prompts, rollout.group_size or schedule.max_age, or lower --replicas."
            )
    runs = [run_plan(plan, chips, source, updates=updates, seed=seed, watch=watch) for plan in plans]
    return Study(runs, chips, summary(source, seed), calibration, notes)


def _times(config: Config, record: Record, notes: list[str]) -> float:
    """How many times the samples of a recorded update one of this config trains on."""
    here, there = (c.rollout.prompts * c.rollout.group_size for c in (config, record.config))
    if here != there:
        notes.append(
            f"an update of {record.folder} trained on {there:,} samples, this one on {here:,}: its seconds are taken "
            f"{here / there:.3g} times."
        )
    return here / there


def _seconds(value: float, name: str, *, positive: bool = False) -> float:
    least = _LEAST_SECONDS if positive else 0.0
    if not least <= value <= MOST_SECONDS:  # also False for NaN
        raise InputError(
            f"{name}: expected seconds of at least {least:g} and at most {MOST_SECONDS:g}, got {value:g}."
        )
    return value
