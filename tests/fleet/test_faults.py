"""What a fleet promises whatever happens to workers and messages, on stand-ins and a clock of the test's own."""

import collections
import json
import random

import numpy as np
import pytest
from fleet.standins import SAMPLES, Chaos, Source, ToySampler, damaged, make_stream, plain, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet import FleetError, Patience
from jaxrl_llm.fleet.dispatcher import FAULTS
from jaxrl_llm.fleet.weights import DamagedWeightsError, check, pack, unpack
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.collect import trajectory_of
from jaxrl_llm.rollout.stream import StreamState

STEPS, GROUPS, AGE = 5, 3, 2


def trained(plan=(), seed=0, *, during=None, **options):
    """(batches, events, transport, figures) of a run of some train steps in which the plan's harm is done."""
    transport, events = Chaos(plan, seed), []
    fleet, stream = make_stream(transport, groups=GROUPS, max_age=AGE, report=events.append, **options)
    batches, figures = [], collections.Counter()
    for version in range(STEPS):
        batch, found = stream.next_batch(weights(version), version)
        batches.append(batch)
        figures.update(found)
        if during is not None:
            during(version, fleet, transport)
    for _ in range(500):  # until whatever is late has come, and whoever says nothing has been missed
        fleet.pump(0.1)
    figures.update(fleet.figures())
    return batches, events, transport, figures


@pytest.fixture(scope="module")
def undisturbed():
    batches, events, _, _ = trained()
    assert {event.kind for event in events} == {"joined"}
    return [plain(batch) for batch in batches]


def promised(batches, undisturbed):
    """No prompt is lost or trained on twice, in the order of the source, none too old; every token is the same."""
    uids = [t.prompt.uid for batch in batches for t in batch]
    assert uids == [f"p{i}" for i in range(STEPS * GROUPS) for _ in range(SAMPLES)]
    for version, batch in enumerate(batches):
        stamps = np.concatenate([t.version[t.mask] for t in batch])
        assert stamps.min() == stamps.max() == max(0, version - AGE)
    assert [plain(batch) for batch in batches] == undisturbed


def reported(events, transport):
    """Every harm that somebody could notice is in the events, as often as it was done."""
    kinds = collections.Counter(event.kind for event in events)
    done = collections.Counter((harm, kind) for harm, kind, _ in transport.done)
    bad = sum(done[harm, "load"] for harm in ("truncate", "flip", "miss", "relist"))
    lost = sum(event.kind in FAULTS and event.reissued for event in events)
    assert kinds["died"] == done["kill", "turn"]
    assert kinds["invalid_answer"] <= done["forge", "answer"]
    assert kinds["refused_weights"] <= bad
    calm = not (done["kill", "turn"] or done["hang", "turn"] or lost)
    if calm:  # nobody whose messages were harmed has been given up for another reason
        assert kinds["refused_weights"] == bad
        assert 0 <= kinds["unanswered_weights"] - done["lose", "load"] <= done["lose", "held"]
    return kinds, done


harms = st.sampled_from([(kind, harm) for kind, all_of in Chaos.HARM.items() for harm in all_of])
plans = st.lists(
    st.tuples(st.integers(0, 40), harms).map(lambda p: (p[1][0], p[0], p[1][1])), min_size=1, max_size=12
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(plan=plans, seed=st.integers(0, 3))
def test_any_faults_change_nothing_that_is_trained_on(undisturbed, plan, seed):
    batches, events, transport, figures = trained(plan, seed)
    promised(batches, undisturbed)
    kinds, _ = reported(events, transport)
    assert figures["time/fleet/faults"] == sum(kinds[kind] for kind in FAULTS)
    assert all(figures[f"time/fleet/{kind}"] == kinds[kind] for kind in (*FAULTS, "joined", "left"))


@pytest.mark.parametrize("harm", [(kind, h) for kind, all_of in Chaos.HARM.items() for h in all_of])
def test_every_single_fault_is_reported_by_its_name(undisturbed, harm):
    """One kind of harm at many occasions, each alone."""
    kind, what = harm
    expected = {
        ("turn", "kill"): "died",
        ("turn", "hang"): "hung",
        ("load", "truncate"): "refused_weights",
        ("load", "flip"): "refused_weights",
        ("load", "miss"): "refused_weights",
        ("load", "relist"): "refused_weights",
        ("load", "lose"): "unanswered_weights",
        ("work", "lose"): "slow",
        ("answer", "lose"): "slow",
        ("answer", "forge"): "invalid_answer",
    }.get(harm)
    for occasion in (0, 1, 4, 7, 11):
        batches, events, transport, _ = trained([(kind, occasion, what)], seed=occasion)
        promised(batches, undisturbed)
        kinds = collections.Counter(event.kind for event in events)
        if what == "reorder":  # nothing that anybody could notice
            continue
        assert len(transport.done) == 1
        if expected is not None:
            assert kinds[expected] == 1
            (event,) = (event for event in events if event.kind == expected)
            assert event.worker == transport.done[0][2]
        elif what == "double" and kind == "answer":
            assert kinds["duplicate_answer"] == 1
        elif harm == (
            "held",
            "lose",
        ):  # unless all prompts of the version had been answered before it was missed
            assert set(kinds) <= {"joined", "unanswered_weights"}
        elif kind != "answer":  # what comes twice is done once, what comes in any order is done
            assert set(kinds) == {"joined"}
        if kind == "answer" and what == "delay" and kinds["slow"]:
            assert kinds["late_answer"] + kinds["duplicate_answer"] == 1


def test_prompts_of_a_dead_worker_are_issued_once_more_and_no_oftener(undisturbed):
    batches, events, transport, figures = trained([("turn", 2, "kill")])
    promised(batches, undisturbed)
    (died,) = (event for event in events if event.kind == "died")
    assert died.reissued == 3 == figures["time/fleet/reissued"]  # a fair share of nine outstanding groups
    assert transport.started == ["worker-0", "worker-1", "worker-2", "worker-3"]


def test_workers_join_and_leave_during_a_run(undisturbed):
    sizes = {0: 1, 1: 5, 3: 2}

    def during(version, fleet, transport):
        if version in sizes:
            fleet.resize(sizes[version])

    batches, events, transport, figures = trained(during=during)
    promised(batches, undisturbed)
    assert (
        figures["time/fleet/left"] == 2 + 3
        and figures["time/fleet/joined"] == 3 + 4
        and not figures["time/fleet/faults"]
    )
    assert len(transport.workers) == 2


@pytest.mark.parametrize("size", [1, 2, 7])
def test_the_number_of_workers_changes_nothing(undisturbed, size):
    batches, *_ = trained(size=size)
    promised(batches, undisturbed)


def test_groups_that_say_nothing_are_replaced_in_order_and_in_time():
    """Groups of some prompts have equal rewards; a batch takes the next ones instead, up to a limit."""

    def dull(number):
        return number % 3 == 1 or 12 <= number < 21  # the second: more in a row than may be dropped

    def judged(completions, group):
        number = int(completions[0].prompt.uid[1:])
        rewards = [1.0] * SAMPLES if dull(number) else [0.0, *[1.0] * (SAMPLES - 1)]
        return [
            trajectory_of(c, Score(reward), group=group, temperature=1.0)
            for c, reward in zip(completions, rewards, strict=True)
        ]

    def run(plan):
        transport = Chaos(plan)
        _, stream = make_stream(transport, max_drops=4, judge=judged)
        return [stream.next_batch(weights(version), version)[0] for version in range(STEPS)]

    batches = run([])
    order = [[int(t.prompt.uid[1:]) for t in batch[::SAMPLES]] for batch in batches]
    assert order[:2] == [[0, 2, 3], [5, 6, 8]]
    # 10, 12, 13 and 14 were dropped; 15 would be the fifth: it fills the batch and trains nothing.
    assert order[2] == [9, 11, 15] and [t.mask.any() for t in batches[2][::SAMPLES]] == [True, True, False]
    for version, batch in enumerate(batches):
        stamps = np.concatenate([t.version[t.mask] for t in batch if t.mask.any()])
        assert max(0, version - AGE) <= stamps.min() <= stamps.max() <= version
    again = run([("turn", 3, "kill"), ("turn", 9, "hang"), ("answer", 6, "lose")])
    assert [plain(batch) for batch in again] == [plain(batch) for batch in batches]


def test_a_stream_goes_on_from_its_state(undisturbed):
    """The state is taken while groups are under way, and completed when it is written down."""
    source = Source()
    fleet, stream = make_stream(Chaos(), source=source)
    for version in range(2):
        stream.next_batch(weights(version), version)
    state, number = stream.state(), source.number
    assert any(fleet.answer(group.number) is None and group.trajectories is None for group in state.groups)
    stream.next_batch(weights(2), 2)  # what happens afterwards does not belong to it
    data = json.loads(json.dumps(state.as_data()))
    stream.restore(state)
    other = Source()
    other.number = number
    _, resumed = make_stream(Chaos([("turn", 2, "kill")]), size=2, source=other)
    resumed.restore(StreamState.of(data))
    for version in range(2, STEPS):
        assert plain(resumed.next_batch(weights(version), version)[0]) == undisturbed[version]


def test_a_stream_refuses_samples_that_another_process_had_under_way():
    _, stream = make_stream(Chaos())
    rows = [(0, Source().next_batch(1)[0], [])]
    state = StreamState(submitted=1, ticks=1, taken_at=1, open=rows, rows=[], ready=[], ledger={})
    with pytest.raises(InputError, match="1 groups whose samples were under way.* Resume without --workers"):
        stream.restore(state)


def test_weights_that_always_arrive_damaged_end_the_run_with_the_name_of_the_leaf():
    patience = Patience(weights=6.0, losses=2, start=20.0)
    plan = [("load", n, "flip") for n in range(200)]
    with pytest.raises(
        FleetError, match=r"the digest of 1 of 2 leaves is not the one that was sent: (a|b/c)"
    ) as e:
        trained(plan, patience=patience)
    assert "sent 4 times" in str(e.value) and "--resume" in str(e.value)


def test_a_prompt_that_kills_its_workers_ends_the_run_with_its_name():
    class Deadly(Chaos):
        def send(self, worker, request):
            super().send(worker, request)
            if any(a.prompt.uid == "p4" for a in getattr(request, "assignments", ())):
                self.plan["turn", self.counts["turn"]] = "kill"
                self.chance.choice = lambda live: worker if worker in live else live[0]

    transport = Deadly()
    fleet, stream = make_stream(transport, patience=Patience(start=20.0))
    with pytest.raises(FleetError, match="5 workers in a row were lost while they had the prompt p4"):
        for version in range(STEPS):
            stream.next_batch(weights(version), version)


def test_a_fleet_that_does_not_come_up_says_so():
    class Mute(Chaos):
        def start(self, worker):
            self.started.append(worker)

    events = []
    _, stream = make_stream(Mute(), report=events.append)
    with pytest.raises(FleetError, match="none of 3 workers has come up in 20 s"):
        stream.next_batch(weights(0), 0)
    assert [event.kind for event in events] == ["not_started"] * 3


def test_a_prompt_that_can_never_be_answered_is_bad_input():
    class Picky(ToySampler):
        def engine(self, rows):
            engine = super().engine(rows)

            def submit(prompt, sampling):
                raise InputError("prompts without a token: 0 (p0).")

            engine.submit = submit
            return engine

    transport = Chaos()
    _, stream = make_stream(transport)
    transport.employ(Picky(), *transport.arguments[1:])
    for worker in transport.workers:
        transport.workers[worker]._sampler = Picky()
    with pytest.raises(InputError, match="the prompt p0 cannot be answered"):
        stream.next_batch(weights(0), 0)


def test_a_long_update_makes_nobody_slow():
    def during(version, fleet, transport):
        transport.clock += 10_000.0

    _, events, _, _ = trained(during=during)
    assert {event.kind for event in events} == {"joined"}


def test_weights_that_changed_on_the_way_are_named():
    package = pack(weights(1), 1)
    check(package)
    np.testing.assert_array_equal(unpack(package)["b"]["c"], weights(1)["b"]["c"])
    for how, text in (
        ("truncate", r"is truncated: \d+ of \d+ bytes"),
        ("flip", "the digest of 1 of 2 leaves"),
        ("miss", "1 of 2 leaves are missing"),
        ("relist", "the list of leaves of version 1"),
    ):
        for seed in range(8):
            with pytest.raises(DamagedWeightsError, match=text):
                check(damaged(package, how, random.Random(seed)))


def test_the_learner_may_change_its_arrays_after_publishing():
    params = weights(1)
    package = pack(params, 1)
    params["a"][:] = 7
    check(package)
    np.testing.assert_array_equal(unpack(package)["a"], weights(1)["a"])
