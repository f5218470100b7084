"""The scripts for TPU VMs, run whole: `gcloud` is a stand-in whose hosts are folders on this machine."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 90  # seconds after which a test is stuck
TOKEN = "hf_0123456789abc"

TRAIN = """
import os, pathlib, signal, sys, time
cloud, host = pathlib.Path(os.environ["CLOUD"]), os.environ["HOST"]
def stop(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
assert os.environ["JAXRL_DISTRIBUTED"] == "auto" and os.environ["NOTE"] == "it's \\"odd\\" $HOME"
print("token", os.environ["HF_TOKEN"], flush=True)
(cloud / f"ready-{host}").touch()
lives = cloud / f"lives-{host}"
with lives.open("a") as file:
    file.write("x")
life = lives.stat().st_size
"""


@pytest.fixture
def cloud(tmp_path):
    """A repository with the launcher, and a cloud; launch(script, *options) starts it."""
    repository, cloud, tools = tmp_path / "repo sitory", tmp_path / "cloud", tmp_path / "tools"
    for folder in (cloud, tools, repository / "jaxrl_llm" / "diagnostics"):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "launch", repository / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "jaxrl_llm/diagnostics/redact.py", repository / "jaxrl_llm/diagnostics/")
    (repository / ".gitignore").write_text("runs/\nignored\n")
    (repository / "ignored").touch()
    subprocess.run(["git", "init", "-q", repository], check=True)

    python, fake = sys.executable, pathlib.Path(__file__).with_name("fake_gcloud.py")
    programs = {
        "gcloud": f'exec "{python}" "{fake}" "$@"',
        # What the set-up of a host needs: pip does nothing, uv makes a folder with Python in it.
        "python3": f'case "$*" in *"uv venv"*) mkdir -p venv/bin; ln -s "{python}" venv/bin/python ;; esac',
        "mountpoint": "exit 1",
        "sudo": 'echo "sudo $*" >>"$HOME/mounted"',
        "gcsfuse": 'echo "gcsfuse $*" >>"$HOME/mounted"',
    }
    for name, text in programs.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    started = []

    def launch(script: str, *options: str) -> subprocess.Popen:
        (repository / "train.py").write_text(TRAIN + script)
        command = [
            sys.executable,
            repository / "launch/tpu_run.py",
            "--backend",
            "queued-resources",
            "--name",
            "job",
        ]
        command += [
            "--tpu",
            "v5p-16",
            "--zone",
            "us-east5-b",
            "--secret",
            "HF_TOKEN",
            "--env",
            'NOTE=it\'s "odd" $HOME',
        ]
        path = f"{tools}:{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            "FAKE_PATH": path,
            "FAKE_CLOUD": str(cloud),
            "FAKE_HOSTS": "2",
        }
        environment |= {"HF_TOKEN": TOKEN, "JAXRL_POLL_SECONDS": "0.2", "JAXRL_WATCH_SECONDS": "0.2"}
        launch.environment = environment
        process = subprocess.Popen(
            [*command, *options, "--", "python", "train.py"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    def follow() -> subprocess.Popen:
        script = ["bash", "runs/launch/job/launch.sh", "follow"]
        environment = launch.environment
        process = subprocess.Popen(
            script, cwd=repository, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        started.append(process)
        return process

    launch.cloud, launch.out, launch.follow = cloud, repository / "runs/launch/job", follow
    yield launch
    (cloud / "resource.json").unlink(missing_ok=True)  # so that nobody follows it any more
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()
    subprocess.run(
        [python, "-c", "import fake_gcloud; fake_gcloud.end_processes()"],
        env={**os.environ, "FAKE_CLOUD": str(cloud), "PYTHONPATH": str(fake.parent)},
        check=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


def calls(cloud: pathlib.Path, verb: str) -> list[list[str]]:
    every = [json.loads(line) for line in (cloud / "calls").read_text().splitlines()]
    return [words for words in every if words[3] == verb]


def logs(launch) -> dict[str, str]:
    return {path.name: path.read_text() for path in (launch.out / "logs").glob("job*.log")}


def test_a_run_that_ends_well(cloud):
    code, output = finish(cloud('print("done", os.getcwd())', "--bucket", "gs://my-runs/team"))
    assert code == 0, output
    assert len(calls(cloud.cloud, "create")) == 1 and len(calls(cloud.cloud, "delete")) == 1
    assert not (cloud.cloud / "resource.json").exists()
    found = logs(cloud)
    assert set(found) == {"job-0.log", "job-1.log"}
    for name, text in found.items():
        host = name.removesuffix(".log")
        assert f"done {cloud.cloud}/hosts/{host}/jaxrl/code" in text
        assert f"[{host}] " in output
    # The secret reached the hosts, and nothing else that stays.
    assert "token ***" in found["job-0.log"]
    said = output + (cloud.cloud / "calls").read_text() + "".join(found.values())
    assert TOKEN not in said
    for folder in (cloud.out, cloud.cloud):
        for path in folder.rglob("*"):
            if path.is_file():
                assert TOKEN.encode() not in path.read_bytes(), path
    host = cloud.cloud / "past" / "0-job-0"
    assert not (host / "jaxrl/code/ignored").exists() and (host / "jaxrl/code/launch/supervise.py").exists()
    assert "--only-dir team my-runs /mnt/jaxrl" in (host / "mounted").read_text()


@pytest.mark.slow
def test_several_slices(cloud):
    code, output = finish(cloud("", "--slices", "2"))
    assert code == 0, output
    (create,) = calls(cloud.cloud, "create")
    assert create[create.index("--node-count") + 1] == "2"
    assert set(logs(cloud)) == {"job-0-0.log", "job-0-1.log", "job-1-0.log", "job-1-1.log"}


def test_one_worker_fails_the_others_save_and_the_machines_are_deleted(cloud):
    code, output = finish(
        cloud("""
if host == "job-1":
    while not (cloud / "ready-job-0").exists():
        time.sleep(0.05)
    sys.exit(3)
time.sleep(600)
""")
    )
    assert code == 3, output
    assert "[job-0] [" in output and "saved" in logs(cloud)["job-0.log"]
    assert len(calls(cloud.cloud, "create")) == len(calls(cloud.cloud, "delete")) == 1
    assert "restart" not in output


def test_after_a_preemption_new_machines_go_on(cloud):
    code, output = finish(
        cloud("""
if life == 1:
    if host == "job-0":
        while (cloud / "calls").read_text().count("worker.sh follow") < 2:
            time.sleep(0.05)
        (cloud / "preempt").touch()
    time.sleep(600)
print("went on")
""")
    )
    assert code == 0, output
    assert "is lost: job is SUSPENDED" in output and "preempted; restart 1 of 10" in output
    assert len(calls(cloud.cloud, "create")) == len(calls(cloud.cloud, "delete")) == 2
    assert all("went on" in text for text in logs(cloud).values())


@pytest.mark.slow
def test_workers_that_saved_and_ended_start_again_on_the_same_machines(cloud):
    code, output = finish(cloud("sys.exit(75 if life < 3 else 0)"))
    assert code == 0, output
    assert (cloud.cloud / "lives-job-0").read_text() == (cloud.cloud / "lives-job-1").read_text() == "xxx"
    assert len(calls(cloud.cloud, "create")) == 1


@pytest.mark.slow
def test_restarts_end(cloud):
    code, output = finish(cloud("sys.exit(75)", "--max-restarts", "1"))
    assert code == 75, output
    assert "stopped after 1 restarts" in output
    assert len(calls(cloud.cloud, "delete")) == 1


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C"])
def test_a_stop_saves_and_deletes(cloud, how):
    process = cloud("time.sleep(600)")
    begin = time.monotonic()
    while not all((cloud.cloud / f"ready-job-{i}").exists() for i in (0, 1)):
        assert process.poll() is None and time.monotonic() - begin < LIMIT
        time.sleep(0.1)
    if how == "SIGTERM":
        process.send_signal(signal.SIGTERM)
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    code, output = finish(process)
    assert code == 75, output
    assert all("saved" in text for text in logs(cloud).values())
    assert not (cloud.cloud / "resource.json").exists()


def test_a_stop_while_the_workers_are_started(cloud):
    (cloud.cloud / "hold").touch()
    process = cloud("time.sleep(600)")
    begin = time.monotonic()
    while not all((cloud.cloud / f"ready-job-{i}").exists() for i in (0, 1)):
        assert process.poll() is None and time.monotonic() - begin < LIMIT
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    (cloud.cloud / "hold").unlink()
    code, output = finish(process)
    assert code == 75, output
    assert all("saved" in text for text in logs(cloud).values())
    assert not (cloud.cloud / "resource.json").exists()


def test_whoever_follows_from_elsewhere_can_leave(cloud):
    process = cloud("time.sleep(600)")
    begin = time.monotonic()
    while not all((cloud.cloud / f"ready-job-{i}").exists() for i in (0, 1)):
        assert process.poll() is None and time.monotonic() - begin < LIMIT
        time.sleep(0.1)
    other = cloud.follow()
    limit = threading.Timer(LIMIT, os.killpg, (other.pid, signal.SIGKILL))
    limit.start()
    assert any("token ***" in line for line in other.stdout)
    limit.cancel()
    other.send_signal(signal.SIGTERM)
    other.communicate(timeout=LIMIT)  # nobody is left who prints
    assert process.poll() is None


def test_machines_that_are_refused(cloud):
    (cloud.cloud / "never").touch()
    code, output = finish(cloud(""))
    assert code == 1, output
    assert "job is FAILED" in output
    assert not (cloud.cloud / "resource.json").exists()


def test_kept_machines(cloud):
    code, output = finish(cloud("", "--keep"))
    assert code == 0, output
    assert calls(cloud.cloud, "delete") == []
    assert "is kept; delete it with: bash runs/launch/job/launch.sh delete" in output
