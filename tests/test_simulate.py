"""The simulator against values by hand and against the stream itself."""

import collections
import dataclasses
import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.models.config import TINY
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.collect import trajectory_of
from jaxrl_llm.rollout.stream import Schedule, Stream, in_time
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.simulate import Fleet, Learner, lognormal_lengths, simulate
from jaxrl_llm.types import Prompt


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


def idle(max_age, slots, learner_share=0.95):
    """(of the slots, of the learner) on split meshes, p99 = 8 x median; the learner needs a bit less than the fleet."""
    median, p99, groups, samples = 200, 1600, 64, 8
    mean = float(lognormal_lengths(median, p99, most=8000, seed=9)(200_000).mean())
    learner = Learner(update_seconds=learner_share * groups * samples * mean / slots, split=True)
    schedule = Schedule(groups=groups, samples=samples, max_age=max_age)
    lengths = lognormal_lengths(median, p99, most=8000, seed=1)
    found = simulate(schedule, Fleet(slots=slots), learner, lengths, steps=40)
    assert max(found.ages) <= max_age
    return found.sampler_idle, found.learner_idle


def test_with_a_tail_the_asynchronous_schedule_keeps_both_busy_and_the_synchronous_one_neither():
    assert min(idle(0, slots=64)) >= 0.4
    assert max(idle(4, slots=64)) <= 0.1


def test_what_the_tail_asks_of_max_age():
    """max_age updates must last longer than the longest sample; twice the slots make an update half as long."""
    assert max(idle(4, slots=128)) > 0.1 >= max(idle(8, slots=128))
    assert min(idle(4, slots=512)) >= 0.4


@pytest.mark.slow
def test_thousands_of_slots_and_of_updates_keep_their_books():
    """Every slot-second without a row is idle, and every other one is a token of some sample."""
    drawn = []
    source = lognormal_lengths(200, 1600, most=4000, seed=2)

    def lengths(n):
        drawn.append(source(n))
        return drawn[-1]

    schedule = Schedule(groups=64, samples=8, max_age=8)
    found = simulate(schedule, Fleet(slots=4096), Learner(), lengths, steps=1000, n=9)
    dropped = sum(tokens for _, tokens in found.dropped.values())
    busy = (1 - found.sampler_idle) * 4096 * found.seconds
    done = found.trained_tokens + dropped
    under_way = 8 * 64 * 9 * 4000
    assert done <= busy * (1 + 1e-9) and busy <= done + under_way
    assert found.trained_samples == 1000 * 64 * 8 == 8 * sum(found.ages.values())
    begun = sum(map(len, drawn))
    assert 0 <= begun - found.trained_samples - sum(n for n, _ in found.dropped.values()) <= 8 * 64 * 9
    assert sum(found.decode_steps) == sum(found.ticks) == found.seconds


def test_what_is_watched_is_the_integral_of_the_rows():
    schedule = Schedule(groups=4, samples=2, max_age=2)
    lengths = lognormal_lengths(20, 100, most=400, seed=4)
    learner = Learner(update_seconds=30.0, split=True)
    found = simulate(schedule, Fleet(slots=6, swap_seconds=2.0), learner, lengths, steps=9, watch=9)
    times, rows = np.array([t for t, _ in found.rows]), np.array([n for _, n in found.rows])
    assert (np.diff(times) >= 0).all() and times[0] == 0 and times[-1] == found.seconds
    assert rows.max() <= 6
    busy = (np.diff(times) * rows[:-1]).sum()
    assert busy == pytest.approx((1 - found.sampler_idle) * 6 * found.seconds)
    assert [end - begin for begin, end in found.learned] == pytest.approx([30.0] * 9)
    part = simulate(
        schedule,
        Fleet(slots=6, swap_seconds=2.0),
        learner,
        lognormal_lengths(20, 100, most=400, seed=4),
        steps=9,
        watch=2,
    )
    assert part.rows == found.rows[-len(part.rows) :] and len(part.rows) < len(found.rows)


class TickEngine:
    """Rows of lengths known beforehand in slots, first come first served.

    A step adds up to `per` tokens to each; it ends early as a dispatch of `sampler.engine` does.
    """

    def __init__(self, slots, sizes, per=1):
        self.slots, self.sizes, self.version, self.per = slots, sizes, 0, per
        self.waiting, self.placed, self.next, self.delivered = collections.deque(), {}, 0, []

    def swap(self, params, *, version, pages, own):
        self.version = version
        self.delivered.append(version)

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
        rows = [*self.placed.items(), *self.waiting]
        return {id: min(row.versions) for id, row in rows if row.versions}

    def unfinished(self):
        rows = [*self.placed.items(), *self.waiting]
        self.placed, self.waiting = {}, collections.deque()
        return rows

    def resume(self, row, sampling):
        self.waiting.append((self.next, row))
        self.next += 1
        return self.next - 1

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


def stream_of(engine, schedule, n):
    """A stream of `n` samples of a prompt, whose groups all earn the same."""

    def judge(done, number):
        return [Row(c.prompt, np.ones(len(c.tokens)), min(int(d.versions.min()) for d in done)) for c in done]

    numbers = itertools.count()
    source = SimpleNamespace(
        next_batch=lambda k: [SimpleNamespace(task="t", payload={}, uid=next(numbers)) for _ in range(k)]
    )
    return Stream(lambda: engine, source, judge, SimpleNamespace(n=n, greedy_too=False), schedule)


def batches(stream, steps, *, apart=False, barriers=()):
    """(version, batch, figures) of the train steps; `apart`: what can be is sampled while the step before it learns."""
    for version in range(steps):
        yield version, *stream.next_batch(None, version)
        following = version + 1
        if following < steps and stream.schedule.ahead:
            stream.sync(None, version)
            stream.advance(following)
        elif following < steps and apart and not stream.is_due(following):
            stream.advance(following)
        if following in barriers:
            stream.restore(stream.state())


@pytest.mark.parametrize("slots, per", [(5, 1), (16, 1), (100, 1), (5, 4), (16, 3), (100, 8)])
@pytest.mark.parametrize(
    "changes, n",
    [
        ({}, 2),
        ({"max_age": 1, "swap": "drain"}, 2),
        ({"max_age": 4}, 3),
        ({"max_age": 2, "late": "drop"}, 2),
        ({"max_age": 1, "late": "drop", "ticks": 9}, 4),
        ({"max_age": 3, "in_flight": 6, "ticks": 3}, 2),
        ({"max_age": 4, "ahead": True}, 3),
        ({"max_age": 1, "ahead": True, "swap": "drain"}, 2),
        ({"max_age": 3, "sync_every": 4}, 3),
        ({"max_age": 4, "sync_every": 3, "ahead": True}, 2),
        ({"max_age": 5, "sync_every": 2, "in_flight": 9, "ticks": 2}, 2),
        ({"max_age": 2, "sync_every": 3, "swap": "drain"}, 2),
    ],
)
def test_counts_are_those_of_the_stream(changes, n, slots, per):
    schedule, steps = Schedule(groups=4, samples=2, **changes), 25
    sizes = lognormal_lengths(6, 50, most=200, seed=3)(20_000).tolist()
    engine = TickEngine(slots, iter(sizes), per)
    stream = stream_of(engine, schedule, n)
    taken = list(batches(stream, steps))
    ages = collections.Counter(version - row.oldest for version, rows, _ in taken for row in rows[::2])
    ticks = [int(figures["rollout/ticks"]) for _, _, figures in taken]
    tokens = sum(int(row.mask.sum()) for _, rows, _ in taken for row in rows)
    own = iter(sizes)
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


@pytest.mark.parametrize("changes", [{}, {"swap": "drain"}, {"sync_every": 3}], ids=str)
def test_counts_are_those_of_a_stream_with_the_real_engine(tiny_params, changes):
    """Lengths come from a model whose weights change; the simulator is given those that were sampled."""
    schedule, steps, more = Schedule(groups=3, samples=2, max_age=2, **changes), 8, 6
    numbers = itertools.count()
    source = SimpleNamespace(
        next_batch=lambda k: [
            Prompt(uid=f"p{i}", tokens=np.arange(1, 2 + i % 5, dtype=np.int32), task="t")
            for i in itertools.islice(numbers, k)
        ]
    )
    sampled = {}

    def judge(done, number):
        sampled[number] = [len(c.tokens) for c in sorted(done, key=lambda c: c.index)]
        return [trajectory_of(c, Score(0.0), group=number, temperature=1.0) for c in done]

    sampler = Sampler(TINY, slots=8, page_size=4, max_context=32, steps_per_dispatch=2)
    sampling = SamplingParams(
        max_tokens=24, n=2, stop_ids=tuple(range(0, TINY.vocab_size, 8)), seed=5, min_tokens=1
    )
    stream = Stream(lambda: sampler.engine(64), source, judge, sampling, schedule)
    ages, ticks, tokens = collections.Counter(), [], 0
    for version in range(steps + more):  # the last ones, so that samples under way get to their ends
        params = jax.tree.map(lambda x, v=version: x * (1 + 0.05 * v), tiny_params)
        trajectories, figures = stream.next_batch(params, version)
        if version < steps:
            ticks.append(int(figures["rollout/ticks"]))
            tokens += sum(int(t.mask.sum()) for t in trajectories)
            for first, second in zip(trajectories[::2], trajectories[1::2], strict=True):
                oldest = min(int(t.version[t.mask].min()) for t in (first, second))
                ages[version - oldest] += 1
    sizes = itertools.chain.from_iterable(sampled.get(number, [24, 24]) for number in itertools.count())
    found = simulate(
        schedule,
        Fleet(slots=8, steps_per_dispatch=2),
        Learner(),
        lambda k: np.array(list(itertools.islice(sizes, k))),
        steps=steps,
    )
    assert len(set(itertools.chain(*sampled.values()))) > 5
    assert found.ticks == ticks and found.trained_tokens == tokens
    assert found.ages == dict(sorted(ages.items())) and max(ages) > 0


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_groups_that_are_waited_for_are_never_too_old(data):
    """Two long prompts among short ones are due in the same train step, and only one of them fits into it."""
    groups = data.draw(st.integers(1, 3), "groups")
    schedule = Schedule(
        groups=groups, samples=data.draw(st.integers(1, 2)), max_age=data.draw(st.integers(0, 4))
    )
    sizes = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 9, 50]), min_size=8, max_size=60), "sizes")
    slots = data.draw(st.integers(1, 20), "slots")
    given_sizes = itertools.cycle(sizes)
    found = simulate(
        schedule,
        Fleet(slots=slots),
        Learner(update_seconds=data.draw(st.sampled_from([0.0, 7.0])), split=data.draw(st.booleans())),
        lambda k: np.array([next(given_sizes) for _ in range(k)]),
        steps=12,
    )
    assert found.dropped["stale"] == (0, 0) and max(found.ages) <= schedule.max_age
    assert sum(found.ages.values()) == 12 * groups


def test_a_batch_waits_where_more_would_be_due_than_can_be_consumed():
    # Found at version 1: both long prompts are due at 2, where one group is consumed.
    schedule = Schedule(groups=1, samples=1, max_age=2)
    assert in_time([0], 1, schedule) and not in_time([0, 0], 1, schedule)
    assert not in_time([0], 2, schedule) and in_time([1, 2], 2, schedule)
    assert in_time([], 0, Schedule(groups=1, samples=1)) and not in_time(
        [0], 0, Schedule(groups=1, samples=1)
    )
    sizes = itertools.chain([1, 50, 50], itertools.repeat(1))
    found = simulate(
        schedule, Fleet(slots=100), Learner(), lambda k: np.array([next(sizes) for _ in range(k)]), steps=5
    )
    assert found.ages == {0: 2, 1: 1, 2: 2} and found.dropped["stale"] == (0, 0)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_of_an_iteration_no_group_is_too_old_and_none_is_lost(data):
    """Whatever the lengths, the slots and the barriers: prompts are trained on once, and tokens say what sampled them."""
    groups, every = data.draw(st.integers(1, 3), "groups"), data.draw(st.integers(1, 4), "sync_every")
    ahead = data.draw(st.booleans(), "ahead")
    max_age = every - 1 + ahead + data.draw(st.integers(0, 3), "more")
    schedule = Schedule(groups=groups, samples=2, max_age=max_age, sync_every=every, ahead=ahead)
    sizes = itertools.cycle(data.draw(st.lists(st.sampled_from([1, 1, 2, 9, 50]), min_size=8, max_size=60)))
    engine = TickEngine(data.draw(st.integers(1, 20), "slots"), sizes, data.draw(st.integers(1, 3), "per"))
    barriers = data.draw(st.sets(st.integers(1, 11), max_size=3), "barriers")
    stream = stream_of(engine, schedule, 2)
    trained = []
    for version, rows, figures in batches(stream, 12, apart=data.draw(st.booleans()), barriers=barriers):
        assert len(rows) == 2 * groups
        assert all(version - max_age <= row.oldest <= version - ahead * (version > 0) for row in rows)
        assert all(row.oldest in engine.delivered for row in rows)
        if every > 1:
            assert figures["rollout/barrier"] == (version in barriers)
        trained += [row.prompt.uid for row in rows[::2]]
    assert len(set(trained)) == len(trained) == 12 * groups
    assert stream.ledger.state()["sums"].keys() == {"trained"}
    # a delivery every so many train steps, counted from a barrier anew
    expected, last = [], None
    for version in range(12 - ahead):
        if version in barriers or last is None or version - last >= every:
            expected, last = [*expected, version], version
    assert sorted(set(engine.delivered)) == expected
    left = {group.prompt.uid for group in stream._open.values()}
    left |= {group.trajectories[0].prompt.uid for group in stream._ready}
    assert left | set(trained) == set(range(stream._submitted)) and not left & set(trained)


@pytest.mark.parametrize("every", [2, 4])
def test_an_iteration_is_sampled_from_the_weights_that_it_began_with(every):
    """It is submitted at its beginning, trained on as it is completed, and all of it before the next one begins."""
    schedule = Schedule(groups=3, samples=2, max_age=every - 1, sync_every=every)
    sizes = lognormal_lengths(6, 50, most=200, seed=3)(2_000).tolist()
    found = []
    for apart in (False, True):
        engine = TickEngine(7, iter(sizes), 2)
        stream, seen = stream_of(engine, schedule, 2), []
        for version, rows, figures in batches(stream, 3 * every, apart=apart):
            first = version - version % every
            assert {row.oldest for row in rows} == {first}
            iteration = {first * 3 + i for i in range(3 * every)}
            assert {row.prompt.uid for row in rows} <= iteration
            assert stream._submitted == 3 * (first + every)
            seen.append(([row.prompt.uid for row in rows], figures["rollout/ticks"]))
        assert engine.delivered == [0, every, 2 * every]
        found.append(seen)
    assert found[0] == found[1]  # when it is sampled changes nothing
    assert len({ticks for _, ticks in found[0]}) > 2
    whole = [uid for uids, _ in found[0][:every] for uid in uids]
    assert sorted(whole[::2]) != whole[::2]  # the first complete ones first


@pytest.mark.parametrize("max_age", [3, 4])
def test_minibatches_that_are_streamed_shorten_the_wait_of_a_learner_of_its_own(max_age):
    """Beside one train step of all of the iteration's samples, on the same weights and devices."""
    lengths = lambda: lognormal_lengths(200, 1600, most=8000, seed=1)  # noqa: E731

    def run(**changes):
        schedule = Schedule(samples=8, **changes)
        learner = Learner(token_seconds=0.02, split=True)
        found = simulate(schedule, Fleet(slots=64), learner, lengths(), steps=64 * 16 // schedule.groups)
        assert max(found.ages) <= schedule.max_age
        return found.seconds

    whole, ahead = run(groups=64), max_age > 3
    streamed = run(groups=16, sync_every=4, max_age=max_age, ahead=ahead)
    assert streamed < (0.65 if ahead else 0.8) * whole
