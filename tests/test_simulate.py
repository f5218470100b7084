"""The simulator against values by hand and against the stream itself."""

import collections
import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from jaxrl_llm.rollout.stream import Schedule, Stream
from jaxrl_llm.simulate import Fleet, Learner, lognormal_lengths, simulate


def test_equal_lengths_take_one_round_and_one_update_each():
    found = simulate(
        Schedule(groups=2, samples=2),
        Fleet(slots=4, tick_seconds=0.5, row_seconds=0.25, swap_seconds=1.0),
        Learner(token_seconds=0.1, update_seconds=2.0),
        lambda n: np.full(n, 10),
        steps=3,
    )
    assert found.ticks == [10, 10, 10] and found.ages == {0: 6}
    assert found.seconds == pytest.approx(3 * (1.0 + 10 * 1.5 + 2.0 + 40 * 0.1))
    assert found.learner_idle == pytest.approx(1 - 6.0 / 22.0)


def test_two_lengths_leave_the_slots_of_the_short_ones_idle():
    sizes = itertools.cycle([5, 20])
    lengths = lambda n: np.array([next(sizes) for _ in range(n)])  # noqa: E731
    found = simulate(Schedule(groups=2, samples=2), Fleet(slots=4), Learner(), lengths, steps=4)
    assert found.ticks == [20] * 4 and found.trained_tokens == 4 * 50
    assert found.sampler_idle == pytest.approx(1 - 50 / 80)


def test_long_tails_idle_the_synchronous_fleet_and_not_the_asynchronous_one():
    fleet = Fleet(slots=128)

    def idle(max_age):
        lengths = lognormal_lengths(100, 900, most=2000, seed=1)
        learner = Learner(update_seconds=50.0, split=True)
        found = simulate(Schedule(groups=64, samples=8, max_age=max_age), fleet, learner, lengths, steps=40)
        assert max(found.ages) <= max_age and found.dropped["stale"] == (0, 0)
        return found.sampler_idle

    assert idle(0) >= 0.4
    assert idle(4) <= 0.1


class TickEngine:
    """Rows of lengths known beforehand in slots, first come first served.

    A step adds up to `per` tokens to each; it ends early as a dispatch of `sampler.engine` does.
    """

    def __init__(self, slots, sizes, per=1):
        self.slots, self.sizes, self.version, self.per = slots, sizes, 0, per
        self.waiting, self.placed, self.next = collections.deque(), {}, 0

    def swap(self, params, *, version, pages):
        self.version = version

    def submit(self, prompt, sampling):
        ids = list(range(self.next, self.next + sampling.n))
        self.next += sampling.n
        for index, id in enumerate(ids):
            row = SimpleNamespace(index=index, size=next(self.sizes), versions=[], prompt=prompt)
            self.waiting.append((id, row))
        return ids

    def step(self):
        while self.waiting and len(self.placed) < self.slots:
            id, row = self.waiting.popleft()
            self.placed[id] = row
        running = list(self.placed.values())
        for _ in range(self.per):
            for row in running:
                row.versions.append(self.version)
            before, running = running, [row for row in running if len(row.versions) < row.size]
            if not running or (self.waiting and len(running) < len(before)):
                break
        ended = sorted(id for id, row in self.placed.items() if len(row.versions) == row.size)
        return [SimpleNamespace(id=id, completion=_completion(self.placed.pop(id))) for id in ended]

    def cancel(self, id):
        if id in self.placed:
            return _completion(self.placed.pop(id))
        row = next(row for other, row in self.waiting if other == id)
        self.waiting = collections.deque(pair for pair in self.waiting if pair[0] != id)
        return _completion(row)

    def begun_at(self):
        return {id: min(row.versions) for id, row in self.placed.items()}

    @property
    def busy(self):
        return bool(self.waiting or self.placed)

    def release(self):
        assert not self.busy


def _completion(row):
    versions = np.array(row.versions, int)
    return SimpleNamespace(index=row.index, tokens=versions, versions=versions, prompt=row.prompt)


@dataclasses.dataclass(frozen=True)
class Row:
    prompt: object
    mask: np.ndarray
    oldest: int
    reward: float = 0.0
    group: int = 0


@pytest.mark.parametrize("slots, per", [(5, 1), (16, 1), (100, 1), (5, 4), (16, 3), (100, 8)])
@pytest.mark.parametrize(
    "settings, n",
    [
        ({}, 2),
        ({"max_age": 1, "swap": "drain"}, 2),
        ({"max_age": 4}, 3),
        ({"max_age": 2, "late": "drop"}, 2),
        ({"max_age": 1, "late": "drop", "ticks": 9}, 4),
        ({"max_age": 3, "in_flight": 6, "ticks": 3}, 2),
    ],
)
def test_counts_are_those_of_the_stream(settings, n, slots, per):
    schedule, steps = Schedule(groups=4, samples=2, **settings), 25
    sizes = lognormal_lengths(6, 50, most=200, seed=3)(20_000).tolist()
    engine_sizes, own = iter(sizes), iter(sizes)
    engine = TickEngine(slots, engine_sizes, per)
    source = SimpleNamespace(next_batch=lambda k: [SimpleNamespace(task="t") for _ in range(k)])

    def judge(done, number):
        return [Row(c.prompt, np.ones(len(c.tokens)), min(int(d.versions.min()) for d in done)) for c in done]

    sampling = SimpleNamespace(n=n, greedy_too=False)
    stream = Stream(lambda: engine, source, judge, sampling, schedule)
    ages, ticks, tokens = collections.Counter(), [], 0
    for version in range(steps):
        rows, figures = stream.next_batch(None, version)
        ages.update(version - row.oldest for row in rows[:: schedule.samples])
        ticks.append(int(figures["rollout/ticks"]))
        tokens += sum(int(row.mask.sum()) for row in rows)
    sums = stream.ledger.state()["sums"]
    found = simulate(
        schedule,
        Fleet(slots=slots, steps_per_dispatch=per),
        Learner(),
        lambda k: np.array([next(own) for _ in range(k)]),
        steps=steps,
        n=n,
    )
    assert found.ticks == ticks and found.trained_tokens == tokens
    assert found.ages == dict(sorted(ages.items()))
    for reason, counts in found.dropped.items():
        assert counts == tuple(sums.get(reason, (0, 0, 0))[:2])
