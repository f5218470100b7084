"""What idles in real runs whose samples have imposed lengths."""

import pytest

from jaxrl_llm.bench import schedule
from jaxrl_llm.bench.schedule import bench_schedule, describe
from jaxrl_llm.config import load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.planning.recorded import planned
from jaxrl_llm.planning.study import plan_name

SETTINGS = ("rollout.prompts=2", "rollout.group_size=4", "rollout.max_tokens=24", "mesh.sampler=1")


@pytest.mark.slow
def test_lengths_are_those_imposed_and_shares_are_those_of_both_schedules():
    """Constant lengths fill every slot: 8 samples in 8 slots, all of which end at once."""
    more = ("sampler.slots=8", "schedule.over_generation=0", "learner.micro_batch_rows=8")
    config = load_config("configs/tiny_async.yaml", [*SETTINGS, *more])
    result = bench_schedule(config, "constant:tokens=24", updates=2)
    assert result["lengths"] == {"median": 24, "mean": 24, "p99": 24, "max": 24}
    synchronous, asynchronous = result["schedules"]
    assert [synchronous["schedule"], asynchronous["schedule"]] == ["synchronous", "asynchronous, max_age 4"]
    assert synchronous["age_max"] == 0 < asynchronous["age_max"] <= 4
    for row in (synchronous, asynchronous):
        tokens = row["trained_tokens_per_second"] * row["step_seconds"]
        assert tokens == pytest.approx(8 * 24)
        for key in ("chips_idle", "slots_idle", "learner_idle"):
            assert 0 <= row[key] < 1 and 0 <= row["simulated"][key] < 1
        assert row["chips_idle"] == pytest.approx((row["slots_idle"] + row["learner_idle"]) / 2)
    # The two take turns: what one does the other waits for.
    assert synchronous["slots_idle"] + synchronous["learner_idle"] >= 1
    assert "chips idle" in describe(result)


def test_iterations_are_compared_with_the_synchronous_schedule(monkeypatch):
    config = load_config(
        "configs/tiny_async.yaml", [*SETTINGS, "schedule.sync_every=4", "schedule.max_age=3"]
    )
    monkeypatch.setattr(schedule, "_measure", lambda measured, *_: plan_name(planned(measured)[0]))
    names = bench_schedule(config, "constant:tokens=4")["schedules"]
    assert names == ["synchronous", "sync_every 4, max_age 3"]


@pytest.mark.parametrize(
    ("settings", "lengths", "updates", "words"),
    [
        (("mesh.sampler=0",), "constant:tokens=4", 2, "mesh.sampler=1"),
        (("schedule.max_age=0", "schedule.over_generation=0"), "constant:tokens=4", 2, "schedule.max_age=4"),
        (("rollout.max_tokens=null",), "constant:tokens=4", 2, "rollout.max_tokens"),
        ((), "normal:tokens=4", 2, "neither a distribution nor a file"),
        ((), "constant:tokens=4", 0, "--updates must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, lengths, updates, words):
    config = load_config("configs/tiny_async.yaml", [*SETTINGS, *settings])
    with pytest.raises(InputError, match=words):
        bench_schedule(config, lengths, updates=updates)
