"""The stream of rollouts: ages, what is dropped, and that a barrier changes nothing but the keys and values."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.carry import from_data, to_data, trajectory_of_data
from jaxrl_llm.rollout.collect import rollout_metrics, staleness_metrics, trajectory_of
from jaxrl_llm.rollout.stream import Schedule, Stream, StreamState
from jaxrl_llm.sampler import Sampler, SamplingParams, decode
from jaxrl_llm.types import Prompt

GROUPS, SAMPLES = 3, 2


class Prompts:
    """Endless prompts of one to five tokens."""

    def __init__(self, cursor=0):
        self.cursor = cursor

    def next_batch(self, n):
        numbers = range(self.cursor, self.cursor + n)
        self.cursor += n
        return [
            Prompt(uid=f"p{i}", tokens=np.arange(1, 2 + i % 5, dtype=np.int32) + i % 7, task=f"task{i % 2}")
            for i in numbers
        ]


def judge(completions, group):
    """Rewards that differ within most groups: whether the first token is even."""
    return [
        trajectory_of(c, Score(float(c.tokens[0] % 2)), group=group, temperature=1.0) for c in completions
    ]


def sampling(**changes):
    # Half of the vocabulary stops, so that lengths differ.
    stops = tuple(range(0, TINY.vocab_size, 8))
    return SamplingParams(
        **{"max_tokens": 24, "n": SAMPLES, "stop_ids": stops, "seed": 5, "min_tokens": 1} | changes
    )


def stream(source, schedule, judge=judge, devices=(), **changes):
    sampler = Sampler(TINY, slots=8, page_size=4, max_context=32, steps_per_dispatch=2)
    return Stream(lambda: sampler.engine(64, devices), source, judge, sampling(**changes), schedule)


@pytest.fixture(scope="module")
def weights(tiny_params):
    """weights(version): other ones for each."""
    return lambda version: jax.tree.map(lambda x: x * (1 + 0.05 * version), tiny_params)


def plan(**changes):
    return Schedule(**{"groups": GROUPS, "samples": SAMPLES, "max_age": 2} | changes)


def batches(of, weights, number, start=0):
    return [of.next_batch(weights(version), version) for version in range(start, start + number)]


def ahead(of, weights, number, start=0):
    """Batches of which each is sampled after the one before it was taken, under the weights of that one's step."""
    found = []
    for version in range(start, start + number):
        found.append(of.next_batch(weights(version), version))
        of.serve(weights(version), version)
        of.advance(version + 1)
    return found


def uids(found):
    return [t.prompt.uid for trajectories, _ in found for t in trajectories]


def same(mine, theirs):
    """Equal in everything but the seconds."""
    a, b = to_data(mine), to_data(theirs)
    for record in (*a, *b):
        record.pop("timings")
    return a == b


@pytest.mark.parametrize("swap", ["keep", "recompute", "drain"])
def test_every_prompt_is_trained_on_once_and_none_too_old(weights, swap):
    found = batches(stream(Prompts(), plan(swap=swap)), weights, 6)
    ages = []
    for version, (trajectories, figures) in enumerate(found):
        assert len(trajectories) == GROUPS * SAMPLES
        assert sorted({t.group for t in trajectories}) == list(range(GROUPS))
        oldest = min(int(t.version[t.mask].min()) for t in trajectories)
        assert 0 <= version - oldest <= 2
        ages.append(version - oldest)
        assert figures["rollout/barrier"] == 0
        spans = {len(set(t.version[t.mask].tolist())) for t in trajectories}
        assert spans == {1} or swap != "drain"
    assert max(ages) > 0
    assert len(uids(found)) == len(set(uids(found))) * SAMPLES


def test_prompts_wait_for_no_longer_than_the_bound(weights):
    """With late="wait" the first prompts are consumed first, and none is lost."""
    found = batches(stream(Prompts(), plan(max_age=1)), weights, 8)
    numbers = sorted({int(uid[1:]) for uid in uids(found)})
    # Never more than one batch is left behind: prompt i is consumed by the train step i / GROUPS + max_age.
    assert numbers[: 7 * GROUPS] == list(range(7 * GROUPS))
    for version, (trajectories, _) in enumerate(found):
        assert all(int(t.prompt.uid[1:]) // GROUPS <= version + 1 for t in trajectories)


def test_without_age_it_is_what_generate_samples(weights):
    source = Prompts()
    found = batches(stream(source, plan(max_age=0)), weights, 2)
    sampler = Sampler(TINY, slots=8, page_size=4, max_context=32, steps_per_dispatch=2)
    prompts = Prompts()
    for version, (trajectories, figures) in enumerate(found):
        completions = sampler.generate(
            weights(version), prompts.next_batch(GROUPS), sampling(), version=version
        )
        expected = [
            trajectory_of(c, Score(float(c.tokens[0] % 2)), group=0, temperature=1.0) for c in completions
        ]
        for mine, theirs in zip(trajectories, expected, strict=True):
            assert mine.prompt.uid == theirs.prompt.uid
            np.testing.assert_array_equal(mine.tokens, theirs.tokens)
            np.testing.assert_array_equal(mine.logprob, theirs.logprob)
            np.testing.assert_array_equal(mine.version, theirs.version)
        assert figures["rollout/in_flight_groups"] == figures["rollout/ready_groups"] == 0
    assert source.cursor == 2 * GROUPS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"swap": "recompute"},
        {"swap": "drain"},
        {"late": "drop", "max_age": 1},
        {"ticks": 5},
        {"max_drops": 2},
        {"max_age": 3, "sync_every": 4},
        {"max_age": 3, "sync_every": 2},
    ],
    ids=str,
)
def test_a_stream_that_is_saved_goes_on_as_the_one_that_was_not_stopped(weights, changes):
    source = Prompts()
    first = stream(source, plan(**changes), n=SAMPLES + 1)
    batches(first, weights, 3)
    state = first.state()
    text = json.dumps({"state": state.as_data(), "cursor": source.cursor})
    assert state.rows or changes.get("swap") == "drain"
    first.restore(state)  # the barrier of the run that goes on
    went_on = batches(first, weights, 3, start=3)

    data = json.loads(text)
    second = stream(Prompts(data["cursor"]), plan(**changes), n=SAMPLES + 1)
    second.restore(StreamState.of(data["state"]))
    resumed = batches(second, weights, 3, start=3)
    for (mine, figures), (theirs, others) in zip(went_on, resumed, strict=True):
        assert same(mine, theirs)
        assert figures == others
    assert first.ledger.state() == second.ledger.state()
    assert first.ticks == second.ticks


@pytest.mark.parametrize("changes", [{"max_age": 3}, {"max_age": 4, "sync_every": 3}], ids=str)
def test_what_a_state_holds_is_consumed_in_time_with_the_max_age_that_it_needs(weights, changes):
    source, needed = Prompts(), []
    of = stream(source, plan(**changes))
    for version in range(1, 5):
        of.next_batch(weights(version - 1), version - 1)
        state = of.state()
        needed.append(state.least_max_age(version, GROUPS))
    assert 1 < max(needed) <= changes["max_age"]  # its own is always enough

    def goes_on(max_age):
        second = stream(Prompts(source.cursor), plan(max_age=max_age))
        second.restore(state)
        batches(second, weights, 3, start=4)

    goes_on(needed[-1])
    with pytest.raises(RuntimeError, match="beyond max_age|nothing to wait for"):
        goes_on(needed[-1] - 1)


@pytest.mark.parametrize("swap", ["keep", "drain"])
def test_ahead_no_batch_waits_and_none_is_too_old(weights, swap):
    of = stream(Prompts(), plan(ahead=True, swap=swap))
    found = ahead(of, weights, 6)
    assert of.state().ready  # the next batch, which has not been taken
    for version, (trajectories, figures) in enumerate(found):
        ages = [version - t.version[t.mask] for t in trajectories]
        assert min(a.min() for a in ages) >= min(
            version, 1
        )  # from the weights before, but for the first batch
        assert max(a.max() for a in ages) <= 2
        assert figures["rollout/ticks"] > 0
    assert len(uids(found)) == len(set(uids(found))) * SAMPLES == 6 * GROUPS * SAMPLES


@pytest.mark.parametrize("devices", [1, 2])
def test_a_stream_that_is_saved_ahead_goes_on_as_the_one_that_was_not_stopped(weights, devices):
    places = jax.devices()[1 : 1 + devices]
    source = Prompts()
    first = stream(source, plan(ahead=True), devices=places, n=SAMPLES + 1)
    ahead(first, weights, 3)
    state = first.state()
    assert state.rows and len(state.ready) >= GROUPS and state.taken_at < state.ticks
    text = json.dumps({"state": state.as_data(), "cursor": source.cursor})
    first.restore(state)
    went_on = ahead(first, weights, 3, start=3)

    data = json.loads(text)
    second = stream(Prompts(data["cursor"]), plan(ahead=True), devices=places, n=SAMPLES + 1)
    second.restore(StreamState.of(data["state"]))
    resumed = ahead(second, weights, 3, start=3)
    assert [figures["rollout/barrier"] for _, figures in went_on] == [1, 0, 0]
    for (mine, figures), (theirs, others) in zip(went_on, resumed, strict=True):
        assert same(mine, theirs)
        assert figures == others
    assert first.ledger.state() == second.ledger.state()
    assert first.ticks == second.ticks


def test_an_iteration_is_sampled_from_weights_that_the_learner_has_consumed(weights):
    """Minibatch after minibatch, and every sample is what one call with those weights gives."""
    every, kept = 3, {}
    of = stream(Prompts(), plan(max_age=every - 1, sync_every=every), max_tokens=12)
    prompts = Prompts()
    for version in range(2 * every):
        params = jax.tree.map(lambda x: x * 1.0, weights(version))
        if version % every == 0:
            sampler = Sampler(TINY, slots=8, page_size=4, max_context=32, steps_per_dispatch=2)
            iteration = prompts.next_batch(every * GROUPS)
            found = sampler.generate(params, iteration, sampling(max_tokens=12), version=version)
            kept |= {(c.prompt.uid, c.index): c for c in found}
        trajectories, _ = of.next_batch(params, version)
        jax.tree.map(lambda x: x.delete(), params)  # as an update does that is given them to keep
        for number, t in enumerate(trajectories):
            c = kept.pop((t.prompt.uid, number % SAMPLES))
            np.testing.assert_array_equal(t.tokens[t.mask], c.tokens)
            np.testing.assert_array_equal(t.logprob[t.mask], c.logprobs)
            assert set(t.version[t.mask]) == {version - version % every} == set(t.kv_version[t.mask])
    assert not kept


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_owned_share_nothing_with_the_tree(tiny_params, dtype):
    config = dataclasses.replace(TINY, dtype=dtype)
    params = jax.tree.map(lambda x: x * 1.0, tiny_params)
    prepared = decode.prepare_for_sampling(params, config)
    expected = jax.tree.map(np.asarray, decode.owned(prepared, params))
    mine = decode.owned(prepared, params)
    jax.tree.map(lambda x: x.delete(), params)
    jax.tree.map(np.testing.assert_array_equal, mine, expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sync_every": 0}, "sync_every must be at least 1"),
        ({"sync_every": 4}, "sync_every=4 needs max_age of at least 3, since samples get as old, got 2"),
        ({"sync_every": 3, "ahead": True}, "sync_every=3 and ahead needs max_age of at least 3"),
        ({"max_age": 0, "ahead": True}, "sync_every=1 and ahead needs max_age of at least 1"),
    ],
)
def test_schedules_in_which_samples_would_be_too_old(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_a_barrier_changes_only_what_was_under_way(weights):
    """The tokens that were there stay; their keys and values are those of the next weights."""
    source = Prompts()
    other = stream(source, plan())
    batches(other, weights, 2)
    state = other.state()
    begun = {(n, i): row.so_far.tokens.tolist() for n, i, row in state.rows if len(row.so_far.tokens)}
    assert begun
    numbers = {group: prompt.uid for group, prompt, _ in state.open}
    other.restore(state)
    later = {}
    for trajectories, _ in batches(other, weights, 4, start=2):
        for index, t in enumerate(trajectories):
            later[t.prompt.uid, index % SAMPLES] = t
    compared = 0
    for (number, index), tokens in begun.items():
        t = later.get((numbers[number], index))
        if t is not None:
            assert t.tokens[t.mask][: len(tokens)].tolist() == tokens
            assert (t.kv_version[t.mask][len(tokens) :] >= 2).all()
            compared += 1
    assert compared


def test_late_groups_are_dropped_and_told(weights):
    dropping = stream(Prompts(), plan(late="drop", max_age=1), max_tokens=24)
    found = batches(dropping, weights, 8)
    figures, lines = dropping.ledger.step()
    stale = figures["ledger/stale_samples"]
    assert stale > 0 and stale % SAMPLES == 0
    assert sum(line["samples"] for line in lines if line["reason"] == "stale") == stale
    assert {line["task"] for line in lines} == {"task0", "task1"}
    for version, (trajectories, _) in enumerate(found):
        assert all(version - t.version[t.mask].min() <= 1 for t in trajectories)
    trained = {int(uid[1:]) for uid in uids(found)}
    dropped = stale / SAMPLES
    assert len(trained) == 8 * GROUPS
    assert max(trained) + 1 <= 8 * GROUPS + dropped + GROUPS


def test_more_samples_than_needed_are_cancelled(weights):
    over = stream(Prompts(), plan(max_age=0), n=SAMPLES + 2)
    found = batches(over, weights, 2)
    figures, _ = over.ledger.step()
    assert figures["ledger/over_generated_samples"] == 2 * GROUPS * 2
    assert all(len(trajectories) == GROUPS * SAMPLES for trajectories, _ in found)
    whole = batches(stream(Prompts(), plan(max_age=0, samples=SAMPLES + 2), n=SAMPLES + 2), weights, 2)
    lengths = [
        np.mean([t.mask.sum() for trajectories, _ in each for t in trajectories]) for each in (found, whole)
    ]
    assert lengths[0] < lengths[1]  # the longest are cancelled: what the ledger is for
    assert over.ledger.length_bias < 0


def test_groups_that_say_nothing_are_replaced_up_to_a_limit(weights):
    def all_wrong(completions, group):
        return [trajectory_of(c, Score(0.0), group=group, temperature=1.0) for c in completions]

    useless = stream(Prompts(), plan(max_age=0, max_drops=4), judge=all_wrong)
    trajectories, _ = useless.next_batch(weights(0), 0)
    figures, _ = useless.ledger.step()
    assert figures["ledger/uninformative_samples"] == 4 * SAMPLES
    assert len(trajectories) == GROUPS * SAMPLES
    assert not any(t.mask.any() for t in trajectories)  # nothing of them is trained
    # Figures are those of everything that was sampled: four groups that were replaced and three that fill the batch.
    assert len(useless.sampled) == (4 + GROUPS) * SAMPLES
    assert {t.group for t in useless.sampled} == set(range(4 + GROUPS))
    sampled = rollout_metrics(useless.sampled)
    assert sampled["rollout/no_signal_groups"] == 4 + GROUPS
    assert sampled["rollout/tokens"] == sum(int(t.mask.sum()) for t in useless.sampled) > 0
    assert useless.ledger.length_bias == pytest.approx(
        np.mean([t.mask.sum() for t in useless.sampled[: GROUPS * SAMPLES]])
        / np.mean([t.mask.sum() for t in useless.sampled])
        - 1
    )


def test_what_is_dropped_ahead_is_counted_whether_or_not_a_snapshot_comes_between(weights):
    """Rewards that say something for every other prompt, and a barrier after each batch."""

    def judged(completions, group):
        told = int(completions[0].prompt.uid[1:]) % 2
        return [
            trajectory_of(c, Score(float(told * c.index)), group=group, temperature=1.0) for c in completions
        ]

    counts, figures = [], []
    for barrier in (False, True):
        of = stream(Prompts(), plan(ahead=True, max_drops=6, swap="drain"), judge=judged)
        lines, sampled = [], []
        for version in range(4):
            of.next_batch(weights(0), version)
            lines.append(of.ledger.step())
            sampled.append(rollout_metrics(of.sampled))
            of.serve(weights(0), version)
            of.advance(version + 1)
            if barrier:
                of.restore(StreamState.of(json.loads(json.dumps(of.state().as_data()))))
        counts.append(lines)
        figures.append(sampled)
    assert counts[0] == counts[1] and figures[0] == figures[1]
    assert counts[0][2][0]["ledger/uninformative_samples"] > 0
    assert figures[0][2]["rollout/groups"] > GROUPS


def test_records_survive_json(weights):
    trajectories, _ = stream(
        Prompts(), plan(max_age=0), top_logprobs=3, top_k=20, record_support=4
    ).next_batch(weights(0), 0)
    again = [trajectory_of_data(d) for d in json.loads(json.dumps(to_data(trajectories)))]
    assert same(trajectories, again)
    for mine, theirs in zip(trajectories, again, strict=True):
        for name in ("tokens", "logprob", "support_ids", "top_logprob"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert a.dtype == b.dtype and a.shape == b.shape
            np.testing.assert_array_equal(a, b)
    with pytest.raises(TypeError, match="set is no JSON value"):
        to_data({"x": {1, 2}})


def test_payloads_come_back_as_they_were_and_what_cannot_is_refused_before_it_is_sampled(weights):
    payload = {
        "by number": {1: "one", 2.5: None, (3, "x"): [True]},
        "pair": ("a", ["b", ("c",)]),
        "missing": [float("-inf"), {"array": 1, "dtype": 2, "shape": 3}, {"tuple": [1]}],
    }
    text = json.dumps(to_data(payload), allow_nan=False)
    assert from_data(json.loads(text)) == payload
    assert np.isnan(from_data(json.loads(json.dumps(to_data(float("nan")), allow_nan=False))))

    class Odd(Prompts):
        def next_batch(self, n):
            return [dataclasses.replace(p, payload={"answers": {1, 2}}) for p in super().next_batch(n)]

    with pytest.raises(
        InputError, match=r"task0: 'answers' in the payload of prompt p0 .*set is no JSON value"
    ):
        stream(Odd(), plan()).next_batch(weights(0), 0)


def test_ages_of_tokens():
    from jaxrl_llm.sampler.base import Completion
    from jaxrl_llm.types import StopReason

    completion = Completion(
        prompt=Prompt(uid="a", tokens=np.array([1, 2], np.int32)),
        index=0,
        tokens=np.array([3, 4, 5], np.int32),
        logprobs=np.zeros(3, np.float32),
        stop=StopReason.EOS,
        versions=np.array([4, 5, 5], np.int32),
        kv_versions=np.array([4, 4, 5], np.int32),
    )
    trajectory = trajectory_of(completion, Score(1.0), group=0, temperature=1.0)
    found = staleness_metrics([trajectory], 6)
    assert found["staleness/age_mean"] == pytest.approx(4 / 3)
    assert found["staleness/kv_age_mean"] == pytest.approx(5 / 3)
    assert found["staleness/age_max"] == 2 and found["staleness/spans"] == 1
    assert [found[f"staleness/age_{a}"] for a in range(3)] == pytest.approx([0, 2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": 0}, "groups must be at least 1"),
        ({"max_age": -1}, "max_age must be at least 0"),
        ({"in_flight": 2}, r"in_flight must be in \[3, 9\]"),
        ({"in_flight": 10}, r"in_flight must be in \[3, 9\]"),
        ({"in_flight": 7, "ahead": True}, r"in_flight must be in \[3, 6\]"),
        ({"max_age": 0, "ahead": True}, "ahead needs max_age of at least 1"),
    ],
)
def test_schedules_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)
