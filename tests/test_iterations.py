"""Weights that reach the sampler every few train steps only: minibatches of an iteration, trained on as they complete."""

import shutil
import signal
import warnings

import pytest
from runs import TINY_YAML, figures, in_a_process, killed, learned_something, run_to_the_end, same_run

from jaxrl_llm.cli import main
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.fleet.workers import Workers
from jaxrl_llm.replay import replay
from jaxrl_llm.train import train

ASYNC_YAML = TINY_YAML.with_name("tiny_async.yaml")
SHORT = (
    "steps=8",
    "schedule.sync_every=4",
    "schedule.max_age=3",
    "evaluation.items=8",
    "evaluation.every=2",
    "snapshots.every=4",
    "snapshots.keep_last=9",
)


def config(*overrides, file=ASYNC_YAML):
    return load_config(file, [*SHORT, *overrides])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two iterations of four minibatches."""
    return run_to_the_end(config(), tmp_path_factory.mktemp("runs") / "whole")


def test_an_iteration_is_of_the_weights_that_it_began_with(whole):
    rows = figures(whole)[1:]
    assert learned_something(whole)
    for row in rows:
        behind = (row["version"] - 1) % 4
        ages = [row[f"staleness/{name}"] for name in ("age_mean", "age_max", "kv_age_mean", "kv_age_max")]
        assert ages == [behind] * 4
        assert row["staleness/spans"] == 0
        # Log-probs of sampler and learner are compared where they have the same weights.
        for name in ("policy/logprob_gap_mean", "policy/logprob_gap_max"):
            assert (row.get(name, 1.0) < 1e-5) == (behind == 0) == (name in row)
        assert row["rollout/in_flight_groups"] + row["rollout/ready_groups"] == 8 * (3 - behind)
    assert [row["rollout/barrier"] for row in rows] == [0, 0, 0, 0, 1, 0, 0, 0]
    trained = {(sample["uid"], sample["version"]) for sample in read_jsonl(whole / "samples.jsonl")}
    assert len({uid for uid, _ in trained}) == len(trained) == 8 * 8
    evaluated = {row["version"]: row.get("eval/vowel/greedy_accuracy") for row in rows}
    assert evaluated[4] != evaluated[6]  # of the weights of now, also in the midst of an iteration


def test_a_replay_is_the_record(whole):
    found = replay(whole, 4, 8)
    assert found.difference is None and found.weights


def test_samples_that_would_be_too_old_are_refused_before_anything_begins(tmp_path, capsys):
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        main(["train", str(TINY_YAML), "--run", str(run), "--set", "schedule.sync_every=4"])
    assert ended.value.code == 2 and not run.exists()
    assert "Set schedule.max_age to 3, or sync_every to 1." in capsys.readouterr().err


@pytest.mark.slow
def test_where_it_samples_changes_no_figure(whole, tmp_path):
    """On a device of its own it goes on with the iteration while the learner trains, and nothing else differs."""
    there = run_to_the_end(config("mesh.sampler=1"), tmp_path / "there")
    same_run(there, whole)
    assert max(row.get("time/learner", 0.0) for row in read_jsonl(there / "metrics.jsonl")) > 0
    assert replay(there, 4, 8).difference is None


@pytest.mark.slow
def test_killed_it_goes_on_as_if_it_had_not_been(whole, tmp_path):
    folder = tmp_path / "run"
    killed(folder, "anywhere", 5, resume=False, seed=1, config=SHORT, file=ASYNC_YAML)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Snapshot .* was not finished", RuntimeWarning)
        assert train(config(), folder, resume=True) == 0
    same_run(folder, whole)
    assert (folder / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("mesh.sampler=1", "schedule.max_age=5")], ids=str)
def test_a_snapshot_in_the_midst_of_an_iteration_begins_another(tmp_path, more):
    """The sampler's own weights are in no snapshot: those of the learner take their place, in both runs."""
    settings = ("snapshots.every=3", *more)
    folder = run_to_the_end(config(*settings), tmp_path / "run")
    rows = figures(folder)[1:]
    assert [row["rollout/barrier"] for row in rows] == [0, 0, 0, 1, 0, 0, 1, 0]
    youngest = [min(a for a in range(7) if row.get(f"staleness/age_{a}")) for row in rows]
    if not more:  # then the groups that were left are older
        assert [row["staleness/age_max"] for row in rows[:3]] == youngest[:3] == [0, 1, 2]
    assert max(row["staleness/age_max"] for row in rows) <= (5 if more else 3)
    assert replay(folder, 3, 8).difference is None
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for version in ("6", "8"):
        shutil.rmtree(copy / "snapshots" / version)
    assert train(config(*settings), copy, resume=True) == 0
    same_run(copy, folder)


@pytest.mark.slow
def test_a_stop_in_the_midst_of_an_iteration_is_recorded(tmp_path):
    folder = tmp_path / "run"
    settings = (*SHORT, "snapshots.every=0")
    sets = [part for item in settings for part in ("--set", item)]
    process = in_a_process(
        ["-u", "-m", "jaxrl_llm.cli", "train", str(ASYNC_YAML), "--run", str(folder), *sets]
    )
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGTERM)
    process.wait(timeout=300)
    assert process.returncode == 75, output
    stopped = max(int(path.name) for path in (folder / "snapshots").iterdir() if path.name.isdigit())
    assert stopped >= 2
    assert train(config("snapshots.every=0"), folder, resume=True) == 0
    barriers = [row["version"] for row in figures(folder) if row.get("rollout/barrier")]
    assert barriers == [stopped + 1]
    assert replay(folder, 0, 8).difference is None


@pytest.mark.slow
def test_a_fleet_samples_the_same(tmp_path):
    settings = ("schedule.swap=drain", "schedule.over_generation=0", "snapshots.every=3")
    here = run_to_the_end(config(*settings), tmp_path / "here")
    fleet = tmp_path / "fleet"
    assert train(config(*settings), fleet, workers=Workers.in_process()) == 0
    own = ("time/fleet/", "rollout/ticks", "rollout/in_flight_groups", "rollout/ready_groups")
    shared = [
        [{k: v for k, v in row.items() if not k.startswith(own)} for row in figures(f)] for f in (here, fleet)
    ]
    assert shared[0] == shared[1]
    assert (fleet / "samples.jsonl").read_bytes() == (here / "samples.jsonl").read_bytes()
    assert replay(fleet, 3, 8).difference is None
