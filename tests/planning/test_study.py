"""`jaxrl simulate`: speeds of a recorded run, schedules beside each other, what is reported, and bad input."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import yaml

from jaxrl_llm import cli
from jaxrl_llm.config import parse_config
from jaxrl_llm.diagnostics.timeline import Panel, _mean_rows, timeline_svg
from jaxrl_llm.errors import InputError
from jaxrl_llm.planning.recorded import calibrate, read_run
from jaxrl_llm.planning.study import study

SMALL = {
    "steps": 12,
    "rollout": {"prompts": 4, "group_size": 2},
    "sampler": {"slots": 4, "steps_per_dispatch": 4},
}


def config(**changes):
    return parse_config(SMALL | changes)


@pytest.fixture
def recorded(tmp_path):
    """recorded(**changes of a row by version) -> folder of a run whose samples have 6 tokens: 12 decode steps a batch,
    half a second each, and 3 s of learning."""

    def make(rows=9, samples=True, changes=None, **settings):
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump(SMALL | settings))
        with (folder / "metrics.jsonl").open("w") as out:
            out.write('{"version": 0, "time/eval": 1.0}\n')
            for version in range(1, rows + 1):
                row = {"version": version, "time/rollout": 6.0, "time/score": 1.0, "time/update": 2.0}
                out.write(json.dumps(row | (changes or {}).get(version, {})) + "\n")
        if samples:
            with (folder / "samples.jsonl").open("w") as out:
                for version in range(1, rows + 1):
                    out.write(json.dumps({"version": version, "tokens": 6}) + "\n")
        return folder

    return make


@pytest.fixture
def jaxrl(capsys):
    """jaxrl(*arguments) -> (exit code, standard output, standard error), in this process."""

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return run


# ------------------------------------------------------------------------------- recorded runs


def test_speeds_of_a_run_are_found_again(recorded):
    compiled = {"time/rollout": 60.0, "time/update": 40.0}
    found = calibrate(read_run(recorded(changes={1: compiled, 4: compiled, 6: {"time/update": 90.0}})))
    assert found.decode_seconds == pytest.approx(0.5) and found.update_seconds == pytest.approx(3.0)
    assert (found.steps, found.left_out, found.checked) == (6, 3, 3)
    assert found.simulated_seconds == found.measured_seconds == pytest.approx(3 * 9.0)
    assert found.relative_error == pytest.approx(0.0) and found.measured_ticks is None


def test_a_run_is_checked_with_steps_that_gave_no_speeds(recorded):
    # Steps 2, 4, 6, 8 give the speeds; 3, 5, 7, 9 are foretold.
    slower = {version: {"time/rollout": 12.0} for version in (3, 5, 7, 9)}
    found = calibrate(read_run(recorded(changes=slower)))
    assert found.simulated_seconds == pytest.approx(4 * 9.0)
    assert found.measured_seconds == pytest.approx(4 * 15.0)
    assert found.relative_error == pytest.approx(-0.4)
    assert found.decode_seconds == pytest.approx(0.75)


def test_dispatches_of_an_asynchronous_run_are_counted_again(recorded):
    ticks = {version: {"rollout/ticks": 4.0} for version in range(1, 10)}
    record = read_run(recorded(changes=ticks, schedule={"max_age": 2}))
    found = calibrate(record)
    # 9 batches of 8 samples in 4 slots; 6 tokens are two dispatches while nothing waits, and rows always wait.
    assert found.measured_ticks == 36 and found.simulated_ticks == 36


def test_lengths_are_those_of_the_train_step(recorded):
    folder = recorded(rows=2)
    with (folder / "samples.jsonl").open("w") as out:
        for version, tokens in ((1, 3), (1, 5), (2, 40), (2, 0)):
            out.write(json.dumps({"version": version, "tokens": tokens}) + "\n")
    record = read_run(folder)
    lengths = record.source_by_step(8)(0)
    first, second, after = (lengths(4).tolist() + lengths(4).tolist() for _ in range(3))
    assert set(first) == {3, 5}
    assert set(second) | set(after) == {40, 1}  # nothing was sampled: one decode step
    assert set(record.source()(0)(100).tolist()) == {1, 3, 5, 40}


@pytest.mark.parametrize(
    "make, message",
    [
        ({"rows": 0}, "no train step with a rollout"),
        ({"samples": False}, "no samples of train step 1 and 8 more"),
        ({"rollout": SMALL["rollout"] | {"refill_rounds": 1}}, "the run replaced groups by their rewards"),
        ({"rows": 2}, "of its 2 train steps 1 can be used"),
    ],
)
def test_runs_that_say_too_little(recorded, make, message):
    with pytest.raises(InputError, match=message):
        calibrate(read_run(recorded(**make)))


# ------------------------------------------------------------------------------------- studies


@pytest.mark.parametrize(
    "change, message",
    [
        ({"time/rollout": "fast"}, "time/rollout of train step 3 in metrics.jsonl is 'fast'"),
        ({"time/update": None}, "time/update of train step 3"),
        ({"time/score": float("nan")}, "time/score of train step 3"),
        ({"time/rollout": -1}, "time/rollout of train step 3"),
        ({"time/rollout": 1e308}, "time/rollout of train step 3"),
        ({"rollout/ticks": "x"}, "rollout/ticks of train step 3"),
        ({"version": None}, "whose version is 'None'"),
        ({"version": [1]}, "whose version is '"),
    ],
)
def test_figures_of_a_run_that_are_none(recorded, change, message):
    with pytest.raises(InputError, match="--from") as error:
        read_run(recorded(changes={3: change}))
    assert message in str(error.value)


def test_a_sample_of_a_run_that_is_longer_than_any(recorded):
    folder = recorded()
    with (folder / "samples.jsonl").open("a") as out:
        out.write(json.dumps({"version": 1, "tokens": 10**30}) + "\n")
    with pytest.raises(InputError, match="1,000,000,000 are the most"):
        read_run(folder)


def test_a_schedule_with_too_many_samples_under_way():
    with pytest.raises(InputError, match="samples under way are too many"):
        study(
            config(schedule={"max_age": 10**9}),
            lengths="constant:tokens=6",
            decode_seconds=1.0,
            update_seconds=1.0,
            updates=1,
        )


def test_equal_lengths_by_hand():
    """Two rounds of 6 steps in 4 slots for 8 samples, then an update: on the same chips, and on 2 more."""
    given = {"lengths": "constant:tokens=6", "decode_seconds": 0.5, "swap_seconds": 1.0, "updates": 5}
    (row,) = study(config(), update_seconds=8.0, **given).as_data()["schedules"]
    assert row["schedule"] == "synchronous" and row["seconds"] == pytest.approx(5 * (1 + 6 + 8))
    assert row["tokens_per_second"] == pytest.approx(48 / 15) and row["updates_per_hour"] == pytest.approx(
        240
    )
    assert row["bubble"] == pytest.approx(1 / 15)  # the swap
    assert row["sampler_idle"] == pytest.approx(9 / 15) and row["learner_idle"] == pytest.approx(7 / 15)
    assert row["ages"] == {"0": 20} and row["age_mean"] == row["age_max"] == 0
    split = study(config(), update_seconds=8.0, split=True, learner_chips=2, **given)
    (row,) = split.as_data()["schedules"]
    assert row["seconds"] == pytest.approx(5 * (1 + 6 + 4))
    assert row["bubble"] == pytest.approx((1 * 5 / 11 + 2 * 7 / 11) / 3)


def test_replicas_bring_slots_and_train_when_nobody_else_does():
    given = {"lengths": "constant:tokens=6", "decode_seconds": 0.5, "updates": 5, "replicas": 2}
    found = study(config(), update_seconds=8.0, **given)
    assert found.as_data()["schedules"][0]["seconds"] == pytest.approx(5 * (3 + 4))
    assert not found.notes
    given["replicas"] = 3
    assert (
        "at most 8 samples are under way, fewer than the 12 slots"
        in study(config(), update_seconds=8.0, **given).notes[0]
    )


def test_three_schedules_beside_each_other():
    given = {"lengths": "lognormal:median=20,p99=160,max=400", "decode_seconds": 1.0, "update_seconds": 60.0}
    found = study(config(schedule={"max_age": 3, "over_generation": 1}), split=True, compare=True, **given)
    rows = found.as_data()["schedules"]
    assert [row["schedule"] for row in rows] == ["synchronous", "one step off", "asynchronous, max_age 3"]
    assert [(row["max_age"], row["swap"]) for row in rows] == [(0, "keep"), (1, "drain"), (3, "keep")]
    assert [row["age_max"] for row in rows[:2]] == [0, 1] and 1 < rows[2]["age_max"] <= 3
    assert rows[0]["tokens_per_second"] < rows[1]["tokens_per_second"] < rows[2]["tokens_per_second"]
    for row in rows:
        over = row["dropped"]["over_generated"]
        assert over["share"] == pytest.approx(
            over["samples"] / (12 * 8 + over["samples"] + row["dropped"]["stale"]["samples"])
        )
        assert over["samples"] >= 12 * 4 and over["tokens"] > 0
    shown = found.as_text().splitlines()
    for label in ("chips idle (bubble)", "samples dropped, over_generated", "  groups of age 2"):
        assert sum(line.startswith(label) for line in shown) == 1
    # without an asynchronous schedule of its own, four train steps
    assert study(config(), compare=True, **given).as_data()["schedules"][2]["max_age"] == 4


def test_speeds_and_lengths_of_a_run_are_taken_unless_given(recorded):
    record = read_run(recorded(schedule={"max_age": 1, "over_generation": 1}))
    data = study(record.config, record=record).as_data()
    assert data["lengths"]["median"] == 6 and data["calibration"]["relative_error"] == pytest.approx(
        0, abs=0.2
    )
    assert any("too short" in note for note in data["notes"])
    bigger = config(rollout={"prompts": 12, "group_size": 2, "max_tokens": 5})
    found = study(bigger, record=record)
    assert found.chips.update_seconds == pytest.approx(3 * 3.0) and found.lengths["max"] == 5
    assert any("taken 3 times" in note for note in found.notes)
    own = study(bigger, record=record, lengths="constant:tokens=2", decode_seconds=9.0, update_seconds=1.0)
    assert own.calibration is None and own.chips.decode_seconds == 9.0 and own.lengths["mean"] == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"replicas": 0}, "--replicas: expected"),
        ({"updates": 0}, "--updates: expected"),
        ({"seed": -1}, "--seed: expected"),
        ({"learner_chips": 0, "split": True}, "--learner-chips: expected"),
        ({"learner_chips": 2}, "without --split"),
        ({"decode_seconds": 0.0}, "--decode-seconds: expected seconds of at least 1e-09"),
        ({"decode_seconds": 5e-324}, "--decode-seconds: expected seconds of at least 1e-09"),
        ({"decode_seconds": 1e308}, "at most 1e\\+09, got 1e\\+308"),
        ({"update_seconds": float("inf")}, "--update-seconds: expected"),
        ({"update_seconds": -1.0}, "--update-seconds: expected seconds of at least 0"),
        (
            {"swap_seconds": float("nan")},
            "--swap-seconds: expected seconds of at least 0 and at most 1e\\+09, got nan",
        ),
        ({"lengths": None}, "--lengths: not given"),
        ({"update_seconds": None, "decode_seconds": None}, "--decode-seconds, --update-seconds: not given"),
        ({"updates": 2**30}, "too many to simulate"),
    ],
)
def test_bad_numbers(changes, message):
    given = {"lengths": "constant:tokens=6", "decode_seconds": 1.0, "update_seconds": 1.0}
    with pytest.raises(InputError, match=message):
        study(config(), **(given | changes))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rollout": {"prompts": 4, "group_size": 2, "refill_rounds": 1}}, "rollout.refill_rounds=0"),
        ({"schedule": {"swap": "drain"}}, "Raise schedule.max_age"),
    ],
)
def test_settings_that_are_not_modelled(settings, message):
    with pytest.raises(InputError, match=message):
        study(config(**settings), lengths="constant:tokens=6", decode_seconds=1.0, update_seconds=1.0)


# --------------------------------------------------------------------------------- the picture


def test_rows_of_a_picture_are_means():
    rows = [(10.0, 0), (10.0, 4), (12.0, 2), (13.0, 0), (14.0, 0)]
    np.testing.assert_allclose(_mean_rows(rows, np.array([10.0, 11.0, 13.0, 14.0])), [4.0, 3.0, 0.0])


def test_a_picture_has_the_panels_on_one_scale():
    one = Panel("a < b", 4, [(0.0, 4), (50.0, 0), (100.0, 0)], [(50.0, 100.0)])
    two = Panel("c", 4, [(7.0, 2), (57.0, 0)], [(20.0, 30.0), (40.0, 57.0)])
    root = ElementTree.fromstring(timeline_svg([one, two]))
    name = "{http://www.w3.org/2000/svg}"
    first, second = root.findall(f"{name}g")
    assert first.find(f"{name}text").text == "a < b"
    assert [float(r.get("width")) for r in first.findall(f"{name}rect")] == [800, 800, 400]
    assert [float(r.get("width")) for r in second.findall(f"{name}rect")] == [400, 400, 80, 136]
    # 4 of 4 rows for half of the time, then none: the top of the area, then its base
    path = first.find(f"{name}path").get("d")
    assert "V34.0H400.0V114.0H401.0" in path and path.endswith("V114Z")


# ------------------------------------------------------------------------------------- command


def test_the_command_writes_a_picture_and_one_json_object(jaxrl, recorded, tmp_path):
    plot = tmp_path / "who.svg"
    more = ("--compare", "--split", "--replicas", "2", "--plot", plot, "--json")
    code, out, err = jaxrl("simulate", "--from", recorded(), *more, "--set", "schedule.max_age=2")
    assert code == 0, err
    data = json.loads(out)
    assert [row["max_age"] for row in data["schedules"]] == [0, 1, 2]
    assert data["chips"]["replicas"] == 2 and data["chips"]["decode_seconds"] == pytest.approx(0.5)
    assert len(ElementTree.parse(plot).findall("{http://www.w3.org/2000/svg}g")) == 3


def test_the_command_needs_no_config(jaxrl):
    given = ("--lengths", "uniform:low=2,high=9", "--decode-seconds", "0.1", "--update-seconds", "2")
    code, out, err = jaxrl("simulate", *given, "--updates", "3", "--set", "sampler.slots=16")
    assert code == 0, err
    assert out.startswith(
        "1 x 16 slots, 0.1 s a decode step; learner: those of the fleet, 2 s an update; 3 updates"
    )
    assert "trained tokens/s" in out


@pytest.mark.parametrize(
    "arguments, parts",
    [
        ([], ["--lengths, --decode-seconds, --update-seconds: not given", "--from RUN"]),
        (["--from", "nowhere"], ["nowhere is not a run folder"]),
        (["--lengths", "normal:mean=3"], ["neither a distribution nor a file"]),
        (["--set", "sampler.slots=0"], ["sampler.slots", "greater than or equal to 2"]),
        (["--plot", "nowhere/x.svg"], ["--plot nowhere/x.svg: there is no folder nowhere"]),
        (["--plot", "x.png"], ["--plot x.png: give the name of a .svg file"]),
    ],
)
def test_bad_input_is_told(jaxrl, arguments, parts):
    code, out, err = jaxrl("simulate", *arguments)
    assert code == 2 and err.startswith("jaxrl: ") and not out
    for part in parts:
        assert part in err
