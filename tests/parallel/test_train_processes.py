"""`jaxrl train` as several processes: the same figures as in one, stopped, killed and resumed on other numbers of them.

Two processes with gloo add up in another order than the devices of one process do, so figures of 2 x 4 and 1 x 8 devices
differ in the last bits. 2 x 4 and 4 x 2 devices, or a run that was killed and one that was not, differ in none.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from runs import same_run

from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_jsonl
from jaxrl_llm.errors import InputError
from jaxrl_llm.replay import replay
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.train import train

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")
LIMIT = 900  # seconds after which a run is stuck
# Exact figures stay exact; the others are sums of numbers around 1 in f32.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture
def launch(tmp_path):
    """launch(processes, config, run, *settings) -> the launcher; ended with the test.

    devices: in all; command: that is run instead of a training.
    """
    started = []
    program = tmp_path / "bin" / "jaxrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m jaxrl_llm.cli "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiles faster
    }

    def begin(processes, config="", run="", *settings, devices=8, grace=60, command=()):
        launcher = [sys.executable, str(ROOT / "launch" / "tpu_run.py"), "--grace", str(grace)]
        launcher += ["--num-processes", str(processes), "--devices-per-process", str(devices // processes)]
        if command:
            launcher += ["--logs", str(tmp_path / "logs"), "--", *command]
        else:
            launcher += ["--run", str(run), "--config", str(ROOT / "configs" / config)]
        for setting in settings:
            launcher += ["--set", setting]
        process = subprocess.Popen(
            launcher, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # which ends its workers
            try:
                process.communicate(timeout=90)
            except subprocess.TimeoutExpired:
                process.kill()
        process.stdout.close()


def finish(process):
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


def until_a_step(process, least=1):
    """Reads output up to the line of a train step, `least` or later, in which figures were written; returns the step."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        words = line.partition("step ")[2].partition("/")[0]
        if words.isdigit() and int(words) >= least:
            return int(words)
    raise AssertionError("".join(lines))


def until_it_says(process, text):
    """Reads output up to a line with this in it."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return
    raise AssertionError("".join(lines))


def worker(process, index):
    """Process id of one worker of a launcher."""
    for child in pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if f"JAX_PROCESS_ID={index}" in pathlib.Path(f"/proc/{child}/environ").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"worker {index} does not run")


def rows(run):
    """Figures by version, without those of the clock."""
    return {
        row["version"]: {k: v for k, v in row.items() if not k.startswith(("time/", "memory/"))}
        for row in read_jsonl(run / "metrics.jsonl")
    }


def samples(run, versions):
    return [s for s in read_jsonl(run / "samples.jsonl") if s["version"] in versions]


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for version, row in theirs.items():
        assert ours[version].keys() == row.keys()
        for key, value in row.items():
            np.testing.assert_allclose(
                ours[version][key], value, **TOLERANCE, err_msg=f"{key}, step {version}"
            )


def test_two_processes_train_as_one_does(launch, tmp_path):
    settings = ("steps=4", "evaluation.items=8", "snapshots.every=2", *MESH)
    code, output = finish(launch(2, "tiny.yaml", tmp_path / "two", *settings))
    assert code == 0, output
    assert train(load_config(ROOT / "configs" / "tiny.yaml", settings), tmp_path / "one") == 0
    two, one = rows(tmp_path / "two"), rows(tmp_path / "one")
    assert sorted(two) == [0, 1, 2, 3, 4] and two[4]["policy/entropy"] < two[1]["policy/entropy"]
    assert_close(two, one)
    texts = [[s["completion"] for s in samples(tmp_path / name, range(5))] for name in ("two", "one")]
    assert texts[0] == texts[1]
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    # What one process writes is written once, and what all write can be read by one.
    assert (tmp_path / "two" / "report.html").exists()
    with SnapshotStore(tmp_path / "two" / "snapshots", read_only=True) as store:
        assert store.versions() == [2, 4]
        params, meta = store.restore_params()
    assert meta["version"] == 4 and params["embed"].shape == (128, 64)


def test_killed_stopped_and_resumed_on_another_number_of_processes(launch, tmp_path):
    settings = ("steps=8", "evaluation.items=0", "snapshots.every=1", *MESH)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    code, output = finish(launch(2, "tiny_async.yaml", whole, *settings))
    assert code == 0, output
    expected = rows(whole)
    assert sorted(expected) == list(range(1, 9))
    assert any(row["rollout/in_flight_groups"] for row in expected.values())

    process = launch(2, "tiny_async.yaml", broken, *settings)
    until_a_step(process, 2)
    os.kill(worker(process, 1), signal.SIGKILL)
    code, output = finish(process)
    assert code == 128 + signal.SIGKILL, output
    assert "worker-1 ended with exit code 137; the others are told to end" in output

    process = launch(4, "tiny_async.yaml", broken, *settings)
    until_a_step(process)
    os.kill(worker(process, 1), signal.SIGTERM)  # one is preempted: all of them save and end
    code, output = finish(process)
    assert code == 75, output
    done = rows(broken)
    assert 0 < len(done) < 8, output
    assert done == {version: expected[version] for version in done}  # bit for bit
    assert samples(broken, done) == samples(whole, done)
    with SnapshotStore(broken / "snapshots", read_only=True) as store:
        meta = store.meta()
    assert meta["version"] == max(done)
    assert meta["stream"]["rows"] and meta["stream"]["open"]  # sequences under way are in it

    config = load_config(ROOT / "configs" / "tiny_async.yaml", settings)
    assert train(config, broken, resume=True) == 0  # one process with 8 devices
    assert_close(rows(broken), expected)


def test_ten_kills_of_one_of_two_processes(launch, tmp_path):
    """Either process, while it starts or within some train steps: the run is the undisturbed one bit for bit."""
    settings = (
        "steps=32",
        "rollout.prompts=4",
        "sampler.pages=96",  # one number of pages: fewer programs to compile
        "evaluation.items=0",
        "snapshots={every: 2, keep_last: 99}",
        "mesh.data=2",
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def start(run):
        return launch(2, "tiny_async.yaml", run, *settings, devices=2, grace=1)

    process = start(whole)
    code, output = finish(process)
    assert code == 0, output
    recorded = read_jsonl(whole / "metrics.jsonl")
    step = float(np.median([row["time/total"] for row in recorded]))
    assert {row["time/processes"] for row in recorded} == {2}
    assert sum(row["optimizer/grad_norm"] > 0 for row in recorded) > 12
    assert any(row["staleness/spans"] for row in recorded)
    assert any(row["ledger/over_generated_samples"] for row in recorded)

    chance, done = random.Random(0), 0
    for _ in range(10):
        process = start(broken)
        if chance.random() < 0.5:
            until_it_says(process, chance.choice(("loading", "Run folder", "rollout 0/")))
        else:
            done = until_a_step(process, done + 1)
        until = time.monotonic() + chance.uniform(0, 3 * step)
        # However fast the machine has become meanwhile, most of the run is left for the other kills.
        while time.monotonic() < until and len(read_jsonl(broken / "metrics.jsonl")) < done + 3:
            time.sleep(0.01)
        os.kill(worker(process, chance.randrange(2)), signal.SIGKILL)
        code, output = finish(process)
        assert code == 128 + signal.SIGKILL, output
    assert 0 < len(rows(broken)) < 32
    code, output = finish(start(broken))
    assert code == 0, output
    same_run(broken, whole)
    assert (broken / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()

    span = ("--from", "20", "--to", "24")
    code, output = finish(launch(2, devices=2, command=("jaxrl", "replay", str(broken), *span)))
    assert code == 0, output
    assert "Train steps 21 to 24: every figure and sample is the same; the weights are the same." in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "broken", "logs", "whole"]
    with pytest.raises(InputError, match="made by 2 processes.*--num-processes 2 --devices-per-process 1"):
        replay(broken, 20, 24)


def test_a_mesh_that_leaves_out_devices_is_refused_at_the_start(launch, tmp_path):
    code, output = finish(launch(2, "tiny.yaml", tmp_path / "run", "mesh.data=4"))
    assert code == 2, output
    assert "takes 4 devices, and the 2 processes of this run have 8 together (4 here)" in output
    assert not (tmp_path / "run" / "config.yaml").exists()
    assert "Traceback" not in output
