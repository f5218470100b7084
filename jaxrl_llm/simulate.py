"""A discrete-event model of sampler fleet and learner under the schedule of `rollout.stream`; no wall clock.

The fleet is one engine of `slots` rows that decode in lockstep; between two ends of rows nothing can change, so the
clock jumps from end to end. With split devices and `Schedule.ahead`, as a run has them, the fleet samples the next batch
under the old weights while the learner works, and the sooner one waits. With `Schedule.sync_every` it does so within an
iteration only, unless there is `ahead`, too. Without both the fleet goes on for as long as the learner works, with at most max_age batches outstanding: what a schedule that looks at a wall clock could reach.

Not modelled: prefill, rewards, the greedy answer that some objectives take as a baseline, evaluations, snapshots with
their barriers, and what a failed replica costs.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import math
from collections.abc import Callable

import numpy as np

from jaxrl_llm.rollout.stream import Schedule, in_time

__all__ = ["Fleet", "Learner", "Outcome", "lognormal_lengths", "simulate"]

Lengths = Callable[[int], np.ndarray]  # n -> tokens of the n next samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """What samples."""

    slots: int  # rows of all replicas together
    tick_seconds: float = 1.0  # of a decode step, however few rows
    row_seconds: float = 0.0  # more for each row that runs
    swap_seconds: float = 0.0  # new weights
    # Most decode steps of a tick. While rows wait a tick ends with the first row, else with the last one: as
    # `sampler.engine` dispatches.
    steps_per_dispatch: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learner:
    """What trains."""

    token_seconds: float = 0.0
    update_seconds: float = 0.0
    split: bool = False  # devices of its own, so that sampling goes on meanwhile


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of a simulated run."""

    seconds: float
    ticks: list[int]  # of the fleet, by train step: from the last batch to this one
    decode_steps: list[int]  # likewise
    learned: list[tuple[float, float]]  # begin and end of each update, seconds
    trained_tokens: int
    trained_samples: int
    ages: dict[int, int]  # age of a trained group, versions -> groups
    dropped: dict[str, tuple[int, int]]  # reason -> samples, tokens
    sampler_idle: float  # share of slot-seconds without a row
    learner_idle: float  # share of seconds
    rows: list[tuple[float, int]]  # of the train steps that are watched: from this second on so many rows run

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens."""
        return self.trained_tokens / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(slots=True)
class _Group:
    left: int  # rows that have not ended
    # (version of the first token, tokens) of those that have, first ended first
    done: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    oldest: int | None = None  # version of its first token


def lognormal_lengths(median: float, p99: float, *, most: int, seed: int) -> Lengths:
    """Lengths with this median and 99th percentile, in 1 … most."""
    if not 0 < median <= p99:
        raise ValueError(f"lengths: 0 < median <= p99 is needed, got median={median} and p99={p99}.")
    rng, sigma = np.random.default_rng(seed), np.log(p99 / median) / 2.3263478740408408
    return lambda n: np.clip(np.rint(median * np.exp(sigma * rng.standard_normal(n))), 1, most).astype(int)


def simulate(
    schedule: Schedule,
    fleet: Fleet,
    learner: Learner,
    lengths: Lengths,
    *,
    steps: int,
    n: int | None = None,
    watch: int = 0,
) -> Outcome:
    """Runs `steps` train steps.

    Args:
      lengths: called in the order in which prompts are submitted; every length is at least 1.
      n: samples of a prompt that are begun; None: schedule.samples.
      watch: so many of the last train steps are recorded in `Outcome.rows`.

    Raises:
      ValueError: arguments that contradict each other.
    """
    n = schedule.samples if n is None else n
    if n < schedule.samples:
        raise ValueError(f"simulate: n={n} is below schedule.samples={schedule.samples}.")
    if schedule.max_drops:
        raise ValueError("simulate: rewards are not modelled, so that max_drops must be 0.")
    if steps < 1 or fleet.slots < 1 or fleet.steps_per_dispatch < 1:
        raise ValueError(
            f"simulate: steps, slots and steps_per_dispatch must be at least 1, got {steps}, {fleet.slots} and "
            f"{fleet.steps_per_dispatch}."
        )
    sizes: dict[int, int] = {}  # row that has not ended -> tokens; rows of group g are g * n … g * n + n - 1
    begun: dict[int, tuple[int, int]] = {}  # row that runs -> decode step and version of its start
    ends: dict[int, list[int]] = {}  # decode step -> rows that end with it, ascending
    times: list[int] = []  # heap of the keys of `ends`
    open_: dict[int, _Group] = {}
    ready: list[tuple[int, int, int, int]] = []  # oldest, number, samples, tokens
    ages: collections.Counter[int] = collections.Counter()
    dropped = {"stale": [0, 0], "over_generated": [0, 0]}
    clock = busy = worked = 0.0
    step = tick = submitted = cursor = queued = running = served = 0
    # A split fleet goes on with the iteration while the learner works, as a run has it.
    streamed = learner.split and schedule.sync_every > 1 and not schedule.ahead
    gathered: int | None = None  # the train step whose batch is complete
    per_step: list[int] = []
    steps_of: list[int] = []
    learned: list[tuple[float, float]] = []
    watched: list[tuple[float, int]] = []
    tokens_trained = 0
    watching = False

    def count(reason: str, samples: int, tokens: int) -> None:
        dropped[reason][0] += samples
        dropped[reason][1] += tokens

    def submit(most: int) -> None:
        nonlocal submitted, queued
        groups = most - len(open_) - len(ready)
        if groups <= 0:
            return
        first = submitted * n
        sizes.update(zip(range(first, first + groups * n), lengths(groups * n).tolist(), strict=True))
        for number in range(submitted, submitted + groups):
            open_[number] = _Group(n)
        submitted, queued = submitted + groups, queued + groups * n

    def cancel(number: int) -> tuple[int, int]:
        """(rows, tokens) of a group that had not ended."""
        nonlocal running, queued
        rows = tokens = 0
        for id in range(number * n, number * n + n):
            size = sizes.pop(id, None)
            if size is None:
                continue
            rows += 1
            start = begun.pop(id, None)
            if start is None:
                queued -= 1
            else:
                running -= 1
                tokens += step - start[0]
                ends[start[0] + size].remove(id)
        return rows, tokens

    def place() -> None:
        nonlocal cursor, queued, running
        now = (step, served)
        while queued and running < fleet.slots:
            id, cursor = cursor, cursor + 1
            size = sizes.get(id)
            if size is None:  # cancelled
                continue
            begun[id] = now
            if not id % n:  # rows begin in order, and those that wait are cancelled with their group
                open_[id // n].oldest = served
            end = step + size
            if end in ends:
                ends[end].append(id)
            else:
                ends[end] = [id]
                heapq.heappush(times, end)
            running += 1
            queued -= 1

    def advance(most: int | None, until: float, limit: int) -> None:
        """To the tick in which the next row ends, by at most so many ticks and not beyond the one that passes `until`."""
        nonlocal step, tick, clock, busy, running
        place()
        if watching:
            watched.append((clock, running))
        while not ends[times[0]]:  # cancelled
            del ends[heapq.heappop(times)]
        each, per = fleet.tick_seconds + fleet.row_seconds * running, fleet.steps_per_dispatch
        short = times[0] - step
        ticks = -(-short // per)
        if most is not None:
            ticks = min(ticks, most)
        if until < np.inf and each > 0:
            ticks = max(1, min(ticks, math.ceil((until - clock) / (each * per))))
        jump = ticks * per
        if queued and short < jump:
            jump = short
        ended: list[int] = []
        useful = jump * running  # row-steps
        last = step + jump
        while times and times[0] <= last:
            time = heapq.heappop(times)
            rows = ends.pop(time)
            ended += rows
            useful -= (last - time) * len(rows)
        if ended and len(ended) == running:  # nothing is left to decode
            jump, last = time - step, time
        tick, step, clock, busy = tick + ticks, last, clock + jump * each, busy + useful * each
        running -= len(ended)
        if per > 1:
            ended.sort()
        settle(ended)
        submit(limit)

    def settle(ended: list[int]) -> None:
        full: list[int] = []
        for id in ended:
            number = id // n
            group = open_[number]
            group.done.append((begun.pop(id)[1], sizes.pop(id)))
            group.left -= 1
            if len(group.done) >= schedule.samples and (not full or full[-1] != number):
                full.append(number)
        for number in full:
            group = open_.pop(number)
            if group.left:
                count("over_generated", *cancel(number))
            over = group.done[schedule.samples :]
            count("over_generated", len(over), sum(size for _, size in over))
            kept = group.done[: schedule.samples]
            ready.append((min(kept)[0], number, len(kept), sum(size for _, size in kept)))

    def due(oldest: int | None, version: int) -> bool:
        return version - (served if oldest is None else oldest) >= schedule.max_age

    def complete(version: int) -> bool:
        oldest = [served if g.oldest is None else g.oldest for g in open_.values()]
        if schedule.late == "drop":
            return not any(due(group, version) for group in oldest)
        ready.sort()
        return in_time([*(group[0] for group in ready[schedule.groups :]), *oldest], version, schedule)

    def room(version: int) -> int:
        return schedule.room(max(0, version - schedule.ahead - served))

    def serve(version: int) -> None:
        nonlocal clock, served
        if not version or version - served >= schedule.sync_every:
            clock, served = clock + fleet.swap_seconds, version

    def gather(version: int) -> None:
        nonlocal gathered
        gathered, limit = version, room(version)
        begun_tick = tick
        submit(limit)
        while True:
            if tick - begun_tick >= schedule.ticks or not sizes:
                enough = len(ready) >= schedule.groups
                if schedule.late == "drop" and enough and schedule.max_age:
                    for number in [k for k, g in open_.items() if due(g.oldest, version)]:
                        group = open_.pop(number)
                        count("stale", *cancel(number))
                        count("stale", len(group.done), sum(size for _, size in group.done))
                if enough and complete(version):
                    break
            short = schedule.ticks - (tick - begun_tick)
            advance(short if short > 0 else None, np.inf, limit)
        while schedule.swap == "drain" and sizes and (schedule.ahead or streamed or not learner.split):
            advance(None, np.inf, limit)

    begun_tick = begun_step = 0
    for version in range(steps):
        watching = version >= steps - watch
        if not (schedule.ahead or streamed):
            begun_tick, begun_step = tick, step
        if watching:
            watched.append((clock, 0))
        if gathered != version:
            serve(version)
            gather(version)
        if schedule.ahead or streamed:
            per_step.append(tick - begun_tick)
            steps_of.append(step - begun_step)
            begun_tick, begun_step = tick, step
        ready.sort()
        batch, left = ready[: schedule.groups], ready[schedule.groups :]
        for oldest, _, samples, tokens in left:
            if due(oldest, version):
                count("stale", samples, tokens)
        ready[:] = [group for group in left if not due(group[0], version)]
        tokens = sum(group[3] for group in batch)
        tokens_trained += tokens
        ages.update(version - oldest for oldest, *_ in batch)
        took = learner.update_seconds + learner.token_seconds * tokens
        worked += took
        end = clock + took
        learned.append((clock, end))
        if schedule.ahead and version + 1 < steps:
            serve(version)
            gather(version + 1)
        elif streamed:
            if version + 1 < steps and version + 1 - served < schedule.sync_every:
                gather(version + 1)
        elif learner.split and schedule.max_age:
            most = min(schedule.outstanding, schedule.max_age * schedule.groups)
            submit(most)
            while sizes and (clock < end or schedule.swap == "drain"):
                # Nothing new begins once the weights are there and the fleet is being drained.
                advance(None, end if clock < end else np.inf, most if clock < end else 0)
        if watching:
            watched.append((clock, 0))
        clock = max(clock, end)
        if not (schedule.ahead or streamed):
            per_step.append(tick - begun_tick)
            steps_of.append(step - begun_step)
    if watch:
        watched.append((clock, 0))
    return Outcome(
        seconds=clock,
        ticks=per_step,
        decode_steps=steps_of,
        learned=learned,
        trained_tokens=tokens_trained,
        trained_samples=steps * schedule.groups * schedule.samples,
        ages=dict(sorted(ages.items())),
        dropped={reason: (samples, size) for reason, (samples, size) in dropped.items()},
        sampler_idle=1.0 - busy / (fleet.slots * clock) if clock else 0.0,
        learner_idle=1.0 - worked / clock if clock else 0.0,
        rows=watched,
    )
