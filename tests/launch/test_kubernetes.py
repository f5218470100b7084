"""The script for Kubernetes, run whole with a stand-in for `kubectl`; and the JobSet against what the API allows."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from launch import gke_jobset, xpk
from launch.plan import Bucket, Plan
from launch.topology import GENERATIONS, parse_slice

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 90  # seconds after which a test is stuck
TOKEN = "open\nsesame 'now'"

TRAIN = """
import os, pathlib, signal, sys, time
cluster, pod = pathlib.Path(os.environ["CLUSTER"]), os.environ["POD"]
def stop(*_):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
(cluster / f"token-{pod}").write_text(os.environ["MY_TOKEN"])
print("begun", flush=True)
lives = cluster / f"lives-{pod}"
with lives.open("a") as file:
    file.write("x")
life = lives.stat().st_size
"""


@pytest.fixture
def cluster(tmp_path):
    """A repository with the launcher, and a cluster; launch(script, *options) starts it."""
    repository, cluster, tools = tmp_path / "repo sitory", tmp_path / "cluster", tmp_path / "tools"
    for folder in (cluster, tools, repository / "jaxrl_llm" / "diagnostics"):
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "launch", repository / "launch", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "jaxrl_llm/diagnostics/redact.py", repository / "jaxrl_llm/diagnostics/")
    fake = pathlib.Path(__file__).with_name("fake_kubectl.py")
    (tools / "kubectl").write_text(f'#!/bin/bash\nexec "{sys.executable}" "{fake}" "$@"\n')
    (tools / "kubectl").chmod(0o755)
    (tools / "python3").symlink_to(sys.executable)
    path = f"{tools}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "FAKE_CLUSTER": str(cluster), "JAXRL_POLL_SECONDS": "0.2"}
    started = []

    def launch(script: str, *options: str) -> subprocess.Popen:
        (repository / "train.py").write_text(TRAIN + script)
        command = [
            sys.executable,
            repository / "launch/tpu_run.py",
            "--backend",
            "gke-jobset",
            "--name",
            "job",
        ]
        command += ["--tpu", "v5p-16", "--image", "i", "--secret", "MY_TOKEN", *options]
        process = subprocess.Popen(
            [*command, "--", "python3", "train.py"],
            env={**environment, "MY_TOKEN": TOKEN},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    def again(verb: str) -> subprocess.CompletedProcess:
        script = ["bash", "runs/launch/job/launch.sh", verb]
        return subprocess.run(
            script, cwd=repository, env=environment, capture_output=True, text=True, timeout=LIMIT
        )

    launch.cluster, launch.out, launch.again = cluster, repository / "runs/launch/job", again
    yield launch
    (cluster / "stop").touch()
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=LIMIT)
    return process.returncode, output


def logs(launch) -> dict[str, str]:
    return {path.stem: path.read_text() for path in (launch.out / "logs").glob("job*.log")}


def test_a_job_that_ends_well(cluster):
    code, output = finish(cluster('print("done")', "--slices", "2"))
    assert code == 0, output
    found = logs(cluster)
    assert set(found) == {f"job-slice-{number}-{index}-0" for number in (0, 1) for index in (0, 1)}
    assert all("done" in text for text in found.values())
    assert "[job-slice-1-1-0] " in output and "[launch] job: Completed" in output
    # Nothing is left, and the secret went to the pods only.
    assert not (cluster.cluster / "jobset.json").exists() and not (cluster.cluster / "secret.json").exists()
    assert (cluster.cluster / "token-0-0").read_text() == TOKEN
    said = output + (cluster.cluster / "calls").read_text() + "".join(found.values())
    said += "".join(path.read_text() for path in cluster.out.rglob("*") if path.is_file())
    assert "sesame" not in said


def test_after_an_eviction_all_pods_go_on(cluster):
    code, output = finish(
        cluster("""
if life == 1:
    if pod == "0-0":
        while not (cluster / "lives-0-1").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
print("went on")
""")
    )
    assert code == 0, output
    found = logs(cluster)
    assert "saved" in found["job-slice-0-0-0"] and "went on" in found["job-slice-0-0-1"]
    assert "went on" in found["job-slice-0-1-1"]


def test_bad_input_is_not_repeated(cluster):
    code, output = finish(cluster("sys.exit(2)"))
    assert code == 1, output
    assert "[launch] job: Failed" in output
    assert (cluster.cluster / "lives-0-0").read_text() == "x"
    assert not (cluster.cluster / "jobset.json").exists()


def test_a_failing_job_ends_after_its_restarts_and_can_be_kept(cluster):
    code, output = finish(cluster("sys.exit(1)", "--max-restarts", "1", "--keep"))
    assert code == 1, output
    assert "job is kept" in output and (cluster.cluster / "jobset.json").exists()
    # The next start of the same job replaces what has ended.
    code, output = finish(cluster(""))
    assert code == 0, output


def test_whoever_leaves_comes_back_and_stops_it(cluster):
    process = cluster("time.sleep(600)")
    begin = time.monotonic()
    while not all((cluster.cluster / f"lives-0-{i}").exists() for i in (0, 1)):
        assert process.poll() is None and time.monotonic() - begin < LIMIT
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    code, output = finish(process)
    assert code == 130 and "the job goes on" in output
    assert (cluster.cluster / "jobset.json").exists()
    code, output = finish(cluster(""))
    assert code == 1 and "job runs already" in output
    assert cluster.again("stop").returncode == 0
    assert not (cluster.cluster / "jobset.json").exists() and not (cluster.cluster / "secret.json").exists()
    assert "saved" in (cluster.cluster / "pods/job-slice-0-0-0.log").read_text()


# ---------------------------------------------------------------------------------- what the API allows


def plans() -> list[Plan]:
    """One for every way in which a JobSet can differ."""
    command = ("jaxrl", "train", 'configs/it\'s "odd".yaml', "--run", "/mnt/jaxrl/é")
    full = Plan(
        name="job",
        slice=parse_slice("v6e-16"),
        slices=2,
        command=command,
        run="/mnt/jaxrl/é",
        env=(("A", "1"), ("B", "x\ny: 'z'")),
        secrets=("HF_TOKEN",),
        bucket=Bucket("my-runs", "team"),
        image="registry/me/jaxrl:1",
        capacity="spot",
        queue="queue",
        service_account="runner",
    )
    reserved = Plan(
        name="job", slice=full.slice, command=command, image="i", capacity="reserved", reservation="ours"
    )
    kinds = [
        Plan(name="job", slice=parse_slice(f"{kind.api}-{number}"), command=command, image="i")
        for kind in GENERATIONS.values()
        for number in kind.shapes
    ]
    return [full, reserved, *kinds]


# Fields of jobset.x-k8s.io/v1alpha2 that are used, with their types; a field that is not here is a mistake.
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "annotations": dict, "labels": dict},
    "spec": {
        "ttlSecondsAfterFinished": int,
        "failurePolicy": {"maxRestarts": int, "rules": [{"action": str, "onJobFailureReasons": [str]}]},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": dict}}],
    },
}


def differs(value, shape, at="") -> list[str]:
    """Where a value is not as its shape says."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{at}: not a mapping"]
        unknown = [f"{at}.{key}: unknown" for key in value if key not in shape]
        return unknown + [
            text for key in value if key in shape for text in differs(value[key], shape[key], f"{at}.{key}")
        ]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{at}: not a list"]
        return [
            text for index, item in enumerate(value) for text in differs(item, shape[0], f"{at}[{index}]")
        ]
    return [] if type(value) is shape else [f"{at}: {value!r} is not {shape.__name__}"]


def test_every_jobset_has_known_fields_only():
    for plan in plans():
        rendered = gke_jobset.render(plan).files[f"{plan.out}/jobset.yaml"]
        jobset = yaml.safe_load(rendered)
        assert jobset == gke_jobset.jobset(plan)
        assert differs(jobset, JOBSET) == []
        assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        (rule,) = jobset["spec"]["failurePolicy"]["rules"]
        assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def test_the_check_finds_mistakes():
    jobset = gke_jobset.jobset(plans()[0])
    jobset["spec"]["replicas"] = "two"
    jobset["spec"]["failurePolicy"]["maxRestarts"] = "3"
    assert differs(jobset, JOBSET) == [
        ".spec.replicas: unknown",
        ".spec.failurePolicy.maxRestarts: '3' is not int",
    ]


def test_pods_ask_for_all_chips_of_a_host_and_have_time_to_save():
    plan = plans()[0]
    job = gke_jobset.jobset(plan)["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert (job["parallelism"], job["completions"]) == (4, 4)
    assert pod["terminationGracePeriodSeconds"] == plan.grace + 30
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "4x4",
        "cloud.google.com/gke-spot": "true",
    }
    (secret,) = [item for item in pod["containers"][0]["env"] if "valueFrom" in item]
    assert secret == {
        "name": "HF_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "job-secrets", "key": "HF_TOKEN"}},
    }


def expanded(text: str, variables: dict[str, str]) -> str:
    """What Kubernetes makes of a word: $(NAME) is replaced where it is known, $$ is $."""

    def replace(found: re.Match) -> str:
        return "$" if found[0] == "$$" else variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", replace, text)


@pytest.mark.parametrize("word", ["$(A)", "$$(A)", "$$", "a$", "$A", "$($(A))", "$(B) $$$", "it's"])
def test_kubernetes_gives_words_back_as_they_were(word):
    assert expanded("x $(A) $$", {"A": "1"}) == "x 1 $"
    plan = Plan(
        name="job", slice=parse_slice("v6e-4"), command=("x", word), image="i", env=(("A", "1"), ("C", word))
    )
    (replicated,) = gke_jobset.jobset(plan)["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    assert expanded(container["command"][-1], {"A": "1"}) == word
    values = {item["name"]: item["value"] for item in container["env"]}
    assert expanded(values["C"], {"A": "1"}) == word


# Options of `xpk workload create` 1.16.0 that are used.
XPK_OPTIONS = """--workload --cluster --zone --project --tpu-type --num-slices --docker-image --max-restarts --restart-on-exit-codes
--termination-grace-period-seconds --namespace --spot --reservation --storage --env --command""".split()


def test_xpk_gets_options_that_it_has():
    for plan in (
        Plan(name="j", slice=parse_slice("v5p:4x4x12"), command=("x",), image="i", cluster="c", zone="us-east5-b", capacity="spot"),
        Plan(name="j", slice=parse_slice("v6e-16"), slices=2, command=("x",), image="i", cluster="c", zone="us-east5-b", project="p",
             namespace="n", capacity="reserved", reservation="r", storage=("s", "t"), env=(("A", "1"),)),
    ):  # fmt: skip
        words = xpk.workload_command(plan)
        assert words[:3] == ["xpk", "workload", "create"]
        assert {word for word in words if word.startswith("--")} <= set(XPK_OPTIONS)
        assert words[-1].startswith("cd /app && exec python3 launch/supervise.py --grace 120 ")
    assert "v5p-4x4x12" in xpk.workload_command(
        Plan(
            name="j",
            slice=parse_slice("v5p:4x4x12"),
            command=("x",),
            image="i",
            cluster="c",
            zone="us-east5-b",
        )
    )


@pytest.mark.slow
def test_every_job_passes_the_strict_schema_of_kubernetes(tmp_path):
    """With kubernetes-validate, in a new environment: 100 MB of schemas, too much for the others."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv/bin/python"
    subprocess.run([python, "-m", "pip", "install", "-q", "kubernetes-validate>=1.34"], check=True)
    jobs = []
    for plan in plans():
        (replicated,) = yaml.safe_load(gke_jobset.render(plan).files[f"{plan.out}/jobset.yaml"])["spec"][
            "replicatedJobs"
        ]
        metadata = {"name": "job"}
        jobs.append(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": metadata,
                "spec": replicated["template"]["spec"],
            }
        )
    broken = json.loads(json.dumps(jobs[0]))
    broken["spec"]["template"]["spec"]["containers"][0]["comand"] = []
    (tmp_path / "jobs.json").write_text(json.dumps([*jobs, broken]))
    check = """
import json, sys, kubernetes_validate as kv
for job in json.load(open(sys.argv[1])):
    try:
        kv.validate(job, kv.latest_version(), strict=True)
        print("ok")
    except kv.ValidationError as error:
        print("refused:", error.message)
"""
    out = subprocess.run(
        [python, "-c", check, tmp_path / "jobs.json"], capture_output=True, text=True, check=True
    ).stdout
    *good, bad = out.splitlines()
    assert good == ["ok"] * len(jobs), out
    assert bad == "refused: Additional properties are not allowed ('comand' was unexpected)"
