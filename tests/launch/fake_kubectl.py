"""Stands in for `kubectl` and a cluster with JobSet: pods are processes on this machine.

A JobSet runs as its description says: all pods of a Job start; one that fails ends the others; exit code 2 ends it for good
(podFailurePolicy), any other starts all again, up to maxRestarts times. Every call is a line of $FAKE_CLUSTER/calls.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import yaml

CLUSTER = pathlib.Path(os.environ["FAKE_CLUSTER"])
JOBSET, STATE, SECRET, PODS = (
    CLUSTER / "jobset.json",
    CLUSTER / "state",
    CLUSTER / "secret.json",
    CLUSTER / "pods",
)


def main(words: list[str]) -> int:
    with (CLUSTER / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    assert words[:2] == ["--namespace", "default"]
    verb, *rest = words[2:]
    return {"apply": apply, "create": create, "get": get, "logs": logs, "delete": delete}[verb](rest)


def apply(words: list[str]) -> int:
    assert words[-2:] == ["--filename", "-"]
    SECRET.write_text(json.dumps(json.load(sys.stdin)))
    return 0


def create(words: list[str]) -> int:
    if JOBSET.exists():
        return 1
    JOBSET.write_text(json.dumps(yaml.safe_load(pathlib.Path(words[-1]).read_text())))
    PODS.mkdir(exist_ok=True)
    with (CLUSTER / "controller").open("w") as out:
        subprocess.Popen(
            [sys.executable, __file__, "controller"], start_new_session=True, stdout=out, stderr=out
        )
    return 0


def get(words: list[str]) -> int:
    output = words[words.index("--output") + 1]
    if words[0] == "pods":
        assert words[1:3] == ["--selector", "jobset.sigs.k8s.io/jobset-name=job"]
        print(*(path.stem for path in sorted(PODS.glob("*.log"))))
        return 0
    assert words[:2] == ["jobset", "job"]
    if not JOBSET.exists():
        return 0 if "--ignore-not-found" in words else 1
    terminal = STATE.read_text() if STATE.exists() else ""
    print(
        {"name": "jobset/job", "jsonpath={.status.terminalState}": terminal}.get(output, f"job/{terminal}"),
        end="",
    )
    return 0


def logs(words: list[str]) -> int:
    log = PODS / f"{words[-1]}.log"
    with log.open() as lines:
        while True:
            ended = log.with_suffix(".ended").exists()
            text = lines.read()
            print(text, end="", flush=True)
            if ended and not text:
                return 0
            time.sleep(0.05)


def delete(words: list[str]) -> int:
    if words[0] == "secret":
        SECRET.unlink(missing_ok=True)
        return 0
    if JOBSET.exists() and not STATE.exists():
        (CLUSTER / "stop").touch()
        while not STATE.exists():
            time.sleep(0.05)
    for path in (JOBSET, STATE):
        path.unlink(missing_ok=True)
    return 0


def controller() -> None:
    spec = json.loads(JOBSET.read_text())["spec"]
    for attempt in range(spec["failurePolicy"]["maxRestarts"] + 1):
        code = run_pods(spec, attempt)
        if code in (0, 2) or (CLUSTER / "stop").exists():
            break
    STATE.write_text("Completed" if code == 0 else "Failed")


def run_pods(spec: dict, attempt: int) -> int:
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    secret = json.loads(SECRET.read_text())["data"] if SECRET.exists() else {}
    pods = []
    for number in range(replicated["replicas"]):
        for index in range(job["completions"]):
            environment = {"PATH": os.environ["PATH"], "CLUSTER": str(CLUSTER), "POD": f"{number}-{index}"}
            for item in container["env"]:
                if "value" in item:
                    environment[item["name"]] = item["value"]
                else:
                    key = item["valueFrom"]["secretKeyRef"]["key"]
                    decoded = subprocess.run(
                        ["base64", "-d"], input=secret[key].encode(), capture_output=True
                    )
                    environment[item["name"]] = decoded.stdout.decode()
            log = PODS / f"job-slice-{number}-{index}-{attempt}.log"
            with log.open("w") as out:
                # The image has the code at workingDir; here that is where the launcher runs.
                process = subprocess.Popen(container["command"], env=environment, stdout=out, stderr=out)
            pods.append((process, log))
    told = False
    while any(process.poll() is None for process, _ in pods):
        if not told and ((CLUSTER / "stop").exists() or any(process.poll() for process, _ in pods)):
            told = True
            for process, _ in pods:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    for _, log in pods:
        log.with_suffix(".ended").touch()
    codes = [process.returncode for process, _ in pods]
    return 2 if 2 in codes else max(codes)


if __name__ == "__main__":
    if sys.argv[1:] == ["controller"]:
        controller()
    else:
        raise SystemExit(main(sys.argv[1:]))
