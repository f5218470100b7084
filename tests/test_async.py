"""Asynchronous runs: they learn, they repeat bit for bit, are killed and go on, and a replay finds what changed."""

import json
import os
import random
import shutil
import signal
import warnings

import pytest
from runs import TINY_YAML, figures, in_a_process, killed, run_to_the_end, same_run

import jaxrl_llm.train as loop
from jaxrl_llm.cli import main
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.planning.recorded import read_run, simulated
from jaxrl_llm.replay import replay
from jaxrl_llm.rollout.stream import Schedule
from jaxrl_llm.train import train

ASYNC_YAML = TINY_YAML.with_name("tiny_async.yaml")
SHORT = ("steps=6", "evaluation.items=8", "evaluation.every=3", "snapshots.every=2", "snapshots.keep_last=9")


def config(*overrides, file=ASYNC_YAML):
    return load_config(file, [*SHORT, *overrides])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted short run."""
    return run_to_the_end(config(), tmp_path_factory.mktemp("runs") / "whole")


def test_it_spans_versions_and_accounts_for_every_sample(whole):
    rows = figures(whole)[1:]
    assert max(row["staleness/age_max"] for row in rows) >= 1
    assert max(row["staleness/spans"] for row in rows) > 0
    assert all(row["staleness/age_max"] <= 4 for row in rows)
    assert [row["rollout/barrier"] for row in rows] == [0, 0, 1, 0, 1, 0]
    assert sum(row["ledger/over_generated_samples"] for row in rows) > 0
    lines = read_jsonl(whole / "ledger.jsonl")
    trained = sum(line["samples"] for line in lines if line["reason"] == "trained")
    assert trained == 6 * 64 == sum(row["rollout/trajectories"] for row in rows)
    told = sum(line["samples"] for line in lines if line["reason"] == "over_generated")
    assert told == sum(row["ledger/over_generated_samples"] for row in rows)


def test_the_simulator_counts_as_the_run_did(whole):
    """From a part of its lengths, so not to the last dispatch."""
    record = read_run(whole)
    found = simulated(record)
    rows = figures(whole)[1:]
    assert record.ticks.sum() == sum(row["rollout/ticks"] for row in rows)
    assert sum(found.ticks) == pytest.approx(record.ticks.sum(), rel=0.15)
    assert found.trained_tokens == pytest.approx(sum(row["rollout/tokens"] for row in rows), rel=0.05)
    told = sum(row["ledger/over_generated_samples"] for row in rows)
    assert found.dropped["over_generated"][0] == pytest.approx(told, rel=0.15)
    assert max(found.ages) == max(row["staleness/age_max"] for row in rows)


def test_a_replay_is_the_record_from_any_snapshot(whole):
    for start in (0, 4):
        found = replay(whole, start, 6)
        assert found.difference is None and found.weights and found.steps == 6 - start


def test_a_replay_names_the_first_difference(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[5])
    row["reward/mean"] += 1e-12
    lines[5] = json.dumps(row)
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(SystemExit) as ended:
        main(["replay", str(folder), "--from", "2", "--json"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["version"] == 5
    assert found["difference"]["key"] == "reward/mean"


@pytest.mark.parametrize(
    ("processes", "message"),
    [
        ((2, 2), "made by 2 processes.*tpu_run.py --num-processes 2 --devices-per-process 1 -- jaxrl replay"),
        ((1, 2), "by one process and by several .step 5 by one"),
    ],
)
def test_a_replay_as_other_processes_is_refused(whole, tmp_path, processes, message):
    """Their sums would differ in the last bits, and that is no difference to report."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(whole / "metrics.jsonl", folder)
    # a mesh for which this process has devices
    (folder / "config.yaml").write_text(
        (whole / "config.yaml").read_text().replace("  data: 1\n", "  data: 2\n")
    )
    rows = read_jsonl(folder / "metrics.jsonl")
    for row, number in zip(rows[-2:], processes, strict=True):
        row["time/processes"] = float(number)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(InputError, match=message):
        replay(folder, 4, 6)


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (4, 4, "0 <= from < to <= 6"),
        (0, 7, "0 <= from < to <= 6"),
        (3, 6, "no snapshot of version 3; it has 2, 4, 6"),
    ],
)
def test_spans_that_cannot_be_replayed(whole, start, end, message):
    with pytest.raises(InputError, match=message):
        replay(whole, start, end)


def test_a_synchronous_schedule_gives_the_same_run_as_none(tmp_path, monkeypatch):
    synchronous = ("steps=3", "evaluation.items=0", "snapshots.every=0")
    plain = run_to_the_end(config(*synchronous, file=TINY_YAML), tmp_path / "plain")
    schedule = Schedule(groups=8, samples=8)
    monkeypatch.setattr(loop, "schedule_of", lambda _: schedule)
    streamed = run_to_the_end(config(*synchronous, file=TINY_YAML), tmp_path / "streamed")
    for mine, theirs in zip(figures(plain), figures(streamed), strict=True):
        new = {key for key in theirs if key not in mine}
        assert all(key.startswith(("rollout/", "ledger/", "staleness/")) for key in new)
        assert mine == {key: value for key, value in theirs.items() if key in mine}
        assert theirs["staleness/age_max"] == theirs["rollout/in_flight_groups"] == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["schedule.max_age=0", "schedule.swap=drain"], "with max_age=0 none are"),
        (["schedule.swap=never"], "schedule.swap"),
    ],
)
def test_schedules_that_are_refused(tmp_path, overrides, message):
    with pytest.raises(InputError, match=message):
        train(config(*overrides), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["schedule={max_age: 0}"], "groups under way .* a synchronous run would lose"),
        (["schedule.max_age=1"], "Resume with max_age of at least [23]"),
        (["rollout.prompts=1"], "at 1 a train step .rollout.prompts. .* Resume with max_age of at least"),
    ],
)
def test_groups_that_were_sampled_ahead_are_not_lost(whole, tmp_path, overrides, message):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "snapshots" / "6")
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(InputError, match=message):
        train(config(), folder, resume=True, overrides=overrides)
    assert (folder / "config.yaml").read_bytes() == before


@pytest.mark.slow
def test_sigterm_is_a_barrier_that_a_replay_knows(tmp_path):
    """Stopped within a step, it goes on from the step before; the record says so, and its replay is equal."""
    folder = tmp_path / "run"
    sets = [part for item in (*SHORT, "snapshots.every=0") for part in ("--set", item)]
    process = in_a_process(
        ["-u", "-m", "jaxrl_llm.cli", "train", str(ASYNC_YAML), "--run", str(folder), *sets]
    )
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith("step 3/"):
            process.send_signal(signal.SIGTERM)
    process.wait(timeout=300)
    assert process.returncode == 75, output
    stopped = max(int(path.name) for path in (folder / "snapshots").iterdir() if path.name.isdigit())
    assert stopped >= 3
    assert train(config("snapshots.every=0"), folder, resume=True) == 0
    barriers = [row["version"] for row in figures(folder) if row.get("rollout/barrier")]
    assert barriers == [stopped + 1]
    assert replay(folder, 0, 6).difference is None


@pytest.mark.slow
def test_fifty_updates_are_replayed(tmp_path):
    """Few prompts a step and as many slots as before: several batches end together, and the last waits four steps."""
    settings = ("steps=50", "evaluation.every=25", "snapshots.every=10", "snapshots.keep_last=9")
    rollout = "rollout={prompts: 2, group_size: 8, max_tokens: 12}"
    folder = run_to_the_end(load_config(ASYNC_YAML, [*settings, rollout]), tmp_path / "run")
    rows = figures(folder)[1:]
    # samples under way when the weights changed, carried over snapshots, too many begun, and none too old
    assert sum(row["staleness/spans"] > 0 for row in rows) > 25
    assert [row["version"] for row in rows if row["rollout/barrier"]] == [11, 21, 31, 41]
    assert sum(row["ledger/over_generated_samples"] > 0 for row in rows) > 25
    assert max(row["staleness/age_max"] for row in rows) == 4
    assert sum(row["optimizer/grad_norm"] > 0 for row in rows) > 25
    for start in (0, 30):
        found = replay(folder, start, 50)
        assert found.difference is None and found.weights and found.steps == 50 - start


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    settings = (*SHORT, "steps=16", "snapshots.every=3")
    folder = tmp_path_factory.mktemp("runs") / "longer"
    return settings, run_to_the_end(load_config(ASYNC_YAML, settings), folder)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_kill_9_at_random_moments(longer, tmp_path, seed):
    settings, complete = longer
    chance, folder = random.Random(seed), tmp_path / "run"
    for version in sorted(chance.sample(range(2, 12), 1 + seed % 2)):
        killed(
            folder,
            "anywhere",
            version,
            resume=folder.exists(),
            seed=seed,
            steps=3,
            config=settings,
            file=ASYNC_YAML,
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Snapshot .* was not finished", RuntimeWarning)
        assert train(load_config(ASYNC_YAML, settings), folder, resume=True) == 0
    same_run(folder, complete)
    assert (folder / "ledger.jsonl").read_bytes() == (complete / "ledger.jsonl").read_bytes()
    assert not os.path.exists(folder / "config.yaml.tmp")
