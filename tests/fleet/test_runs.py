"""Whole runs with a fleet: the same as one process, through faults, stops and replays; and with Ray's processes."""

import functools
import json
import os
import pathlib
import shutil

import jax
import pytest
from fleet.standins import PATIENCE, Chaos
from runs import TINY_YAML, figures, in_a_process, learned_something, params, run_to_the_end

from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.fleet.workers import EVENTS, Workers
from jaxrl_llm.replay import replay
from jaxrl_llm.train import Run, session, train

pytestmark = pytest.mark.slow

CONFIG = (
    "steps=6",
    "schedule.max_age=2",
    "schedule.swap=drain",
    "rollout.max_tokens=6",
    "evaluation.items=8",
    "evaluation.every=3",
    "snapshots.every=2",
    "snapshots.keep_last=9",
)
# What only one of the two kinds of stream has.
OWN = ("time/fleet/", "rollout/ticks", "rollout/barrier", "rollout/in_flight_groups", "rollout/ready_groups")


def config():
    return load_config(TINY_YAML, CONFIG)


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """The run in one process."""
    folder = run_to_the_end(config(), tmp_path_factory.mktemp("runs") / "local")
    assert learned_something(folder)
    return folder


def same(folder, other):
    """Samples, weights and all figures that both have are the same, bit for bit; every prompt was trained on once."""

    def shared(run):
        return [{k: v for k, v in row.items() if not k.startswith(OWN)} for row in figures(run)]

    assert shared(folder) == shared(other)
    assert (folder / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    for mine, theirs in zip(jax.tree.leaves(params(folder)), jax.tree.leaves(params(other)), strict=True):
        assert mine.tobytes() == theirs.tobytes()
    trained = sum(
        line["samples"] for line in read_jsonl(folder / "ledger.jsonl") if line["reason"] == "trained"
    )
    assert trained == 6 * 64
    assert all(row["staleness/age_max"] <= 2 for row in figures(folder)[1:])


def events(folder):
    return read_jsonl(folder / EVENTS)


class Harmful(Chaos):
    """Kills, hangs, damages, doubles and delays; its clock goes on by the turn."""

    def __init__(self):
        super().__init__(
            [
                ("turn", 4, "kill"),
                ("turn", 30, "hang"),
                ("turn", 60, "kill"),
                ("load", 2, "truncate"),
                ("load", 4, "flip"),
                ("work", 3, "double"),
                ("answer", 5, "double"),
                ("answer", 9, "lose"),
                ("answer", 20, "delay"),
            ]
        )


def test_a_disturbed_fleet_a_stop_and_another_size_change_nothing(local, tmp_path, monkeypatch):
    made = []

    def harmful():
        made.append(Harmful())
        monkeypatch.setattr("jaxrl_llm.fleet.dispatcher.time.monotonic", made[-1].now)
        return made[-1]

    folder = tmp_path / "fleet"
    make_run = functools.partial(Run, workers=Workers(3, transport=harmful, patience=PATIENCE))
    assert session(make_run, config(), folder, until=3) == 0
    stopped = len(events(folder))
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone)
    assert {"died", "refused_weights", "joined"} <= {event["kind"] for event in events(folder)}
    assert train(config(), folder, resume=True, workers=Workers.in_process()) == 0
    same(folder, local)
    assert [event["kind"] for event in events(folder)[stopped:]] == ["joined"]
    found = replay(folder, 2, 6)
    assert found.difference is None and found.weights
    # And without a fleet from the snapshot of one.
    assert train(config(), alone, resume=True) == 0
    same(alone, local)


def test_ray_workers_are_killed_and_stopped_and_nothing_changes(local, tmp_path):
    folder = tmp_path / "ray"
    program = pathlib.Path(__file__).with_name("ray_harm.py")
    process = in_a_process([str(program), str(folder), str(TINY_YAML), *CONFIG])
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    same(folder, local)
    told = json.loads(output.splitlines()[-1])
    assert set(told["harmed"]) == {"refused_weights", "died", "hung"}
    assert {(event["kind"], event["worker"]) for event in events(folder)} >= set(told["harmed"].items())
    rows = read_jsonl(folder / "metrics.jsonl")[1:]
    assert (
        sum(row["time/fleet/died"] for row in rows) >= 1
        and sum(row["time/fleet/reissued"] for row in rows) >= 2
    )
    # Nothing of it outlives the run.
    assert len(told["processes"]) >= 3
    for process_id in told["processes"]:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
