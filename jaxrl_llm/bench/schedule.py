"""What idles while a run trains: the synchronous schedule and that of a config, measured and as simulated.

Real runs with a learner and a sampler on devices of their own. Only the lengths of the samples are imposed, so that
they have the tail that is asked for whatever the model would say: a sample ends after its length and at nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
import time
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.config import Config
from jaxrl_llm.diagnostics.metrics import read_metrics
from jaxrl_llm.errors import InputError
from jaxrl_llm.planning.lengths import Source, limited, read_lengths, summary
from jaxrl_llm.planning.recorded import planned
from jaxrl_llm.planning.study import Chips, Plan, figures, plan_name, run_plan
from jaxrl_llm.sampler.engine import Engine
from jaxrl_llm.train import Run, session

__all__ = ["bench_schedule", "describe"]

_WARM = 4  # train steps that are not counted: they compile, and fill what is under way
_SIMULATED = 200  # updates


@dataclasses.dataclass
class _Clock:
    """What the sampler of a run has done so far, and when each train step began."""

    busy: float = 0.0  # seconds of dispatches, each times the share of slots that held a row
    dispatched: float = 0.0  # seconds of dispatches
    decode_steps: int = 0
    marks: list[tuple[float, float, float, int]] = dataclasses.field(default_factory=list)

    def mark(self) -> None:
        """Notes the state at the begin of a train step."""
        self.marks.append((time.perf_counter(), self.busy, self.dispatched, self.decode_steps))


def _imposed(engine: Any, source: Source, clock: _Clock) -> Any:
    """The engine, with lengths from `source`, which each sample has whatever the schedule, and with its work noted."""
    if not isinstance(engine, Engine):
        raise InputError("bench schedule: one device that samples is measured; add --set mesh.sampler=1.")
    submit, step, stats = engine._submit, engine.step, engine.stats

    def limit(prompt: Any, *args: Any, **kwargs: Any) -> list[int]:
        ids = submit(prompt, *args, **kwargs)
        for id in ids:
            row = engine._rows[id]
            length = int(source(zlib.crc32(f"{prompt.uid}/{row.request.index}".encode()))(1)[0])
            row.limit = min(row.limit, len(row.prompt_tokens) + max(1, length))
        return ids

    def timed() -> Any:
        begin, slots, tokens, steps = (
            time.perf_counter(),
            stats.slot_steps,
            stats.decoded_tokens,
            stats.decode_steps,
        )
        events = step()
        seconds = time.perf_counter() - begin
        if stats.slot_steps > slots:
            clock.dispatched += seconds
            clock.busy += seconds * (stats.decoded_tokens - tokens) / (stats.slot_steps - slots)
            clock.decode_steps += stats.decode_steps - steps
        return events

    vars(engine).update(_submit=limit, step=timed)
    return engine


class _TimedRun(Run):
    """A run whose samples have imposed lengths."""

    def __init__(self, config: Config, folder: pathlib.Path, *, resume: bool, source: Source, clock: _Clock):
        super().__init__(config, folder, resume=resume)
        self.clock = clock
        sampler = self.policy.sampler
        for name in ("engine", "_engine"):
            make: Callable[..., Any] = getattr(sampler, name)
            setattr(sampler, name, lambda *args, make=make: _imposed(make(*args), source, clock))

    def gather(self, on_progress: Any) -> Any:
        self.clock.mark()
        return super().gather(on_progress)


def _measure(config: Config, source: Source, updates: int) -> dict[str, Any]:
    """A run of the config for so many counted train steps, and what the simulator says of it."""
    config = dataclasses.replace(
        config,
        steps=_WARM + updates + 1,
        evaluation=dataclasses.replace(config.evaluation, items=0),
        snapshots=dataclasses.replace(config.snapshots, every=0),
        # Nothing else ends a sample.
        rollout=dataclasses.replace(config.rollout, min_tokens=config.rollout.max_tokens or 0),
    )
    schedule, n = planned(config)
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        make = functools.partial(_TimedRun, source=source, clock=clock)
        session(make, config, pathlib.Path(folder) / "run")
        rows = [row for row in read_metrics(pathlib.Path(folder) / "run") if "time/update" in row]
    (begin, busy, dispatched, steps), (end, *after) = clock.marks[_WARM], clock.marks[_WARM + updates]
    counted = rows[_WARM : _WARM + updates]
    seconds = end - begin
    learning = sum(row.get("time/learner", row["time/score"] + row["time/update"]) for row in counted)
    sampler_idle, learner_idle = 1.0 - (after[0] - busy) / seconds, 1.0 - learning / seconds
    learners = config.mesh.learner
    chips = Chips(
        slots=config.sampler.slots,
        steps_per_dispatch=config.sampler.steps_per_dispatch,
        decode_seconds=(after[1] - dispatched) / (after[2] - steps),
        update_seconds=learning / updates * learners,
        learner_chips=learners,
        split=True,
    )
    foretold = figures(
        run_plan(Plan(plan_name(schedule), schedule, n), chips, source, updates=_SIMULATED, seed=config.seed),
        chips,
    )
    return {
        "schedule": plan_name(schedule),
        "step_seconds": seconds / updates,
        "trained_tokens_per_second": sum(row["rollout/tokens"] for row in counted) / seconds,
        "age_max": max(row.get("staleness/age_max", 0.0) for row in counted),
        "chips_idle": (sampler_idle + learners * learner_idle) / (1 + learners),
        "slots_idle": sampler_idle,
        "learner_idle": learner_idle,
        "simulated": {
            "chips_idle": foretold["bubble"],
            "slots_idle": foretold["sampler_idle"],
            "learner_idle": foretold["learner_idle"],
        },
    }


def bench_schedule(config: Config, lengths: str, *, updates: int = 8) -> dict[str, Any]:
    """What idles in a synchronous run and in one with the schedule of the config.

    Args:
      config: with `mesh.sampler` 1, `schedule.max_age` of at least 1 and `rollout.max_tokens`.
      lengths: tokens of a sample, see `planning.lengths.read_lengths`; at most `rollout.max_tokens` of the config.
      updates: train steps that are counted, after four that are not.

    Returns:
      JSON values: lengths, and for each schedule shares of 1, measured and simulated with the measured speeds.

    Raises:
      InputError: a config or lengths that cannot be used.
    """
    if updates < 1:
        raise InputError(f"--updates must be at least 1, got {updates}.")
    if config.mesh.sampler != 1 or not config.schedule.max_age:
        raise InputError(
            "bench schedule compares a config that samples on a device of its own with the synchronous schedule; add --set "
            f"mesh.sampler=1 --set schedule.max_age=4 (now {config.mesh.sampler} and {config.schedule.max_age})."
        )
    if config.rollout.max_tokens is None:
        raise InputError("bench schedule: give the longest sample, for example --set rollout.max_tokens=128.")
    source = limited(read_lengths(lengths), config.rollout.max_tokens)
    together = dataclasses.replace(config.schedule, max_age=0, sync_every=1, swap="keep", over_generation=0)
    synchronous = dataclasses.replace(config, schedule=together)
    drawn = np.array([source(seed)(1)[0] for seed in range(4096)])
    return {
        "lengths": summary(lambda _: lambda n: drawn[:n], 0, len(drawn)),
        "schedules": [_measure(c, source, updates) for c in (synchronous, config)],
    }


def describe(result: dict[str, Any]) -> str:
    """`bench_schedule` as a table."""
    lengths, rows = result["lengths"], result["schedules"]
    lines = [("", *(row["schedule"] for row in rows))]
    for name, key in (
        ("chips idle", "chips_idle"),
        ("  slots without a row", "slots_idle"),
        ("  learner not training", "learner_idle"),
    ):
        lines.append((name, *(f"{row[key]:.1%} ({row['simulated'][key]:.1%})" for row in rows)))
    lines.append(("seconds a train step", *(f"{row['step_seconds']:.3g}" for row in rows)))
    lines.append(("trained tokens/s", *(f"{row['trained_tokens_per_second']:.4g}" for row in rows)))
    lines.append(("oldest sample, train steps", *(f"{row['age_max']:.0f}" for row in rows)))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    table = "\n".join(
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    )
    return (
        f"Samples of {lengths['median']:.0f} tokens (median), {lengths['mean']:.1f} (mean), {lengths['p99']:.0f} (p99), "
        f"{lengths['max']:.0f} at most. In brackets: simulated.\n{table}"
    )
