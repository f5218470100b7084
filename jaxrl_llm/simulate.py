"""A discrete-event model of sampler fleet and learner under the schedule of `rollout.stream`; no wall clock.

The fleet is one engine of `slots` rows that decode in lockstep, one token a tick; between two ends of rows nothing
can change, so the clock jumps from end to end. With split devices the fleet goes on under the old weights while the
learner works, with at most max_age batches outstanding, so that waiting never makes a group too old.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Callable

import numpy as np

from jaxrl_llm.rollout.stream import Schedule

__all__ = ["Fleet", "Learner", "Outcome", "lognormal_lengths", "simulate"]

Lengths = Callable[[int], np.ndarray]  # n -> tokens of the n next samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """What samples."""

    slots: int  # rows of all replicas together
    tick_seconds: float = 1.0  # of a decode step, however few rows
    row_seconds: float = 0.0  # more for each row that runs
    swap_seconds: float = 0.0  # new weights


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
    trained_tokens: int
    trained_samples: int
    ages: dict[int, int]  # age of a trained group, versions -> groups
    dropped: dict[str, tuple[int, int]]  # reason -> samples, tokens
    sampler_idle: float  # share of slot-seconds without a row
    learner_idle: float  # share of seconds

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens."""
        return self.trained_tokens / self.seconds if self.seconds else 0.0


@dataclasses.dataclass
class _Group:
    rows: set[int]  # that have not ended
    done: list[tuple[int, int]] = dataclasses.field(
        default_factory=list
    )  # version of the first token, tokens
    oldest: int | None = None  # version of its first token


def lognormal_lengths(median: float, p99: float, *, most: int, seed: int) -> Lengths:
    """Lengths with this median and 99th percentile, in 1 … most."""
    if not 0 < median <= p99:
        raise ValueError(f"lengths: 0 < median <= p99 is needed, got median={median} and p99={p99}.")
    rng, sigma = np.random.default_rng(seed), np.log(p99 / median) / 2.3263478740408408
    return lambda n: np.clip(np.rint(median * np.exp(sigma * rng.standard_normal(n))), 1, most).astype(int)


def simulate(
    schedule: Schedule, fleet: Fleet, learner: Learner, lengths: Lengths, *, steps: int, n: int | None = None
) -> Outcome:
    """Runs `steps` train steps; `n` samples of a prompt are begun (default: schedule.samples)."""
    n = schedule.samples if n is None else n
    if n < schedule.samples:
        raise ValueError(f"simulate: n={n} is below schedule.samples={schedule.samples}.")
    if schedule.max_drops:
        raise ValueError("simulate: rewards are not modelled, so that max_drops must be 0.")
    if steps < 1 or fleet.slots < 1:
        raise ValueError(f"simulate: steps and slots must be at least 1, got {steps} and {fleet.slots}.")
    waiting: collections.deque[int] = collections.deque()
    ends: list[tuple[int, int]] = []  # heap of (tick, row)
    rows: dict[
        int, tuple[int, int, int | None, int]
    ] = {}  # row -> group, tokens, tick and version of its start
    open_: dict[int, _Group] = {}
    ready: list[tuple[int, int, list[int]]] = []  # oldest, number, tokens
    ages: collections.Counter[int] = collections.Counter()
    dropped = {"stale": [0, 0], "over_generated": [0, 0]}
    clock = busy = worked = 0.0
    tick = submitted = next_row = running = served = 0
    per_step: list[int] = []
    tokens_trained = 0

    def count(reason: str, sizes: list[int]) -> None:
        dropped[reason][0] += len(sizes)
        dropped[reason][1] += sum(sizes)

    def submit(most: int) -> None:
        nonlocal submitted, next_row
        for _ in range(most - len(open_) - len(ready)):
            ids = range(next_row, next_row + n)
            for id, size in zip(ids, lengths(n), strict=True):
                rows[id] = submitted, int(size), None, -1
                waiting.append(id)
            open_[submitted] = _Group(set(ids))
            submitted, next_row = submitted + 1, next_row + n

    def cancel(id: int) -> int:
        nonlocal running
        _, _, begun, _ = rows.pop(id)
        if begun is None:
            waiting.remove(id)
            return 0
        running -= 1
        return tick - begun

    def advance(most: int | None, until: float, limit: int) -> None:
        """To the next end of a row, by at most so many ticks and not beyond the tick that passes `until`."""
        nonlocal tick, clock, busy, running
        while waiting and running < fleet.slots:
            id = waiting.popleft()
            number, size, _, _ = rows[id]
            rows[id] = number, size, tick, served
            if open_[number].oldest is None:
                open_[number].oldest = served
            heapq.heappush(ends, (tick + size, id))
            running += 1
        while ends[0][1] not in rows:  # cancelled
            heapq.heappop(ends)
        each = fleet.tick_seconds + fleet.row_seconds * running
        jump = ends[0][0] - tick
        if most is not None:
            jump = min(jump, most)
        if until < np.inf and each > 0:
            jump = max(1, min(jump, int(np.ceil((until - clock) / each))))
        tick, clock, busy = tick + jump, clock + jump * each, busy + jump * each * running
        touched = set()
        while ends and ends[0][0] == tick:
            id = heapq.heappop(ends)[1]
            if id in rows:
                number, size, _, first = rows.pop(id)
                running -= 1
                open_[number].rows.discard(id)
                open_[number].done.append((first, size))
                touched.add(number)
        for number in sorted(touched):
            group = open_[number]
            if len(group.done) >= schedule.samples:
                over = [cancel(id) for id in sorted(group.rows)]
                over += [size for _, size in group.done[schedule.samples :]]
                count("over_generated", over)
                del open_[number]
                kept = group.done[: schedule.samples]
                ready.append((min(first for first, _ in kept), number, [size for _, size in kept]))
        submit(limit)

    def due(oldest: int | None, version: int) -> bool:
        return version - (version if oldest is None else oldest) >= schedule.max_age

    for version in range(steps):
        served, begun = version, tick
        clock += fleet.swap_seconds
        submit(schedule.outstanding)
        while True:
            if tick - begun >= schedule.ticks or not rows:
                enough = len(ready) >= schedule.groups
                if schedule.late == "drop" and enough and schedule.max_age:
                    for number in [k for k, g in open_.items() if due(g.oldest, version)]:
                        group = open_.pop(number)
                        cut = [cancel(id) for id in sorted(group.rows)]
                        count("stale", [*(s for _, s in group.done), *cut])
                if enough and not any(due(g.oldest, version) for g in open_.values()):
                    break
            short = schedule.ticks - (tick - begun)
            advance(short if short > 0 else None, np.inf, schedule.outstanding)
        while schedule.swap == "drain" and rows and not learner.split:
            advance(None, np.inf, schedule.outstanding)
        ready.sort()
        batch, left = ready[: schedule.groups], ready[schedule.groups :]
        for oldest, _, sizes in left:
            if due(oldest, version):
                count("stale", sizes)
        ready[:] = [group for group in left if not due(group[0], version)]
        tokens = sum(sum(sizes) for _, _, sizes in batch)
        tokens_trained += tokens
        ages.update(version - oldest for oldest, _, _ in batch)
        took = learner.update_seconds + learner.token_seconds * tokens
        worked += took
        end = clock + took
        if learner.split and schedule.max_age:
            most = min(schedule.outstanding, schedule.max_age * schedule.groups)
            submit(most)
            while rows and (clock < end or schedule.swap == "drain"):
                # Nothing new begins once the weights are there and the fleet is being drained.
                advance(None, end if clock < end else np.inf, most if clock < end else 0)
        clock = max(clock, end)
        per_step.append(tick - begun)
    return Outcome(
        seconds=clock,
        ticks=per_step,
        trained_tokens=tokens_trained,
        trained_samples=steps * schedule.groups * schedule.samples,
        ages=dict(sorted(ages.items())),
        dropped={reason: (samples, size) for reason, (samples, size) in dropped.items()},
        sampler_idle=1.0 - busy / (fleet.slots * clock) if clock else 0.0,
        learner_idle=1.0 - worked / clock if clock else 0.0,
    )
