"""Stands in for `gcloud compute tpus`: hosts are folders below $FAKE_CLOUD, and commands run on this machine.

A queued resource is ACTIVE after two looks at it; when a file `preempt` appears, it is SUSPENDED and its hosts are gone;
while there is a file `hold`, the command that starts workers does not come back.
Every call is a line of $FAKE_CLOUD/calls.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

CLOUD = pathlib.Path(os.environ["FAKE_CLOUD"])
RESOURCE, LOOKS, GONE = CLOUD / "resource.json", CLOUD / "looks", CLOUD / "gone"


def main(words: list[str]) -> int:
    with (CLOUD / "calls").open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    assert words[:2] == ["compute", "tpus"]
    assert option(words, "--zone") == "us-east5-b"
    return {"queued-resources": resources, "tpu-vm": machines}[words[2]](words[3], words[4:])


def option(words: list[str], name: str) -> str | None:
    for index, word in enumerate(words):
        if word == "--":  # what follows is for ssh
            return None
        if word == name:
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def resources(verb: str, words: list[str]) -> int:
    if verb == "create":
        if RESOURCE.exists():
            print("ALREADY_EXISTS", file=sys.stderr)
            return 1
        count = int(option(words, "--node-count") or 1)
        prefix = option(words, "--node-prefix")
        nodes = [option(words, "--node-id")] if prefix is None else [f"{prefix}-{i}" for i in range(count)]
        RESOURCE.write_text(json.dumps(nodes))
        return 0
    if not RESOURCE.exists():
        print("ERROR: NOT_FOUND: the resource was not found", file=sys.stderr)
        return 1
    if verb == "describe":
        with LOOKS.open("a") as looks:
            looks.write("x")
        if (CLOUD / "never").exists():
            print("FAILED")
        elif GONE.exists():
            print("SUSPENDED")
        else:
            print("ACTIVE" if LOOKS.stat().st_size > 2 else "WAITING_FOR_RESOURCES")
        return 0
    assert verb == "delete" and "--force" in words
    end_processes()
    for path in (RESOURCE, LOOKS, GONE):
        path.unlink(missing_ok=True)
    for host in (CLOUD / "hosts").glob("*"):
        shutil.move(host, CLOUD / "past" / f"{len(list((CLOUD / 'past').iterdir()))}-{host.name}")
    return 0


def machines(verb: str, words: list[str]) -> int:
    if GONE.exists() or not RESOURCE.exists():
        print("ERROR: the machine does not exist", file=sys.stderr)
        return 255
    nodes, worker = json.loads(RESOURCE.read_text()), option(words, "--worker")
    each = range(int(os.environ["FAKE_HOSTS"])) if worker == "all" else [int(worker)]
    if verb == "scp":
        *sources, target = words[: next(i for i, word in enumerate(words) if word.startswith("--"))]
        node, _, folder = target.partition(":")
        assert node in nodes
        for index in each:
            for source in sources:
                shutil.copy(source, CLOUD / "hosts" / f"{node}-{index}" / folder)
        return 0
    assert verb == "ssh" and words[0] in nodes
    running = []
    for index in each:
        home = CLOUD / "hosts" / f"{words[0]}-{index}"
        home.mkdir(parents=True, exist_ok=True)
        environment = {
            "HOME": str(home),
            "PATH": os.environ["FAKE_PATH"],
            "CLOUD": str(CLOUD),
            "HOST": home.name,
        }
        running.append(
            subprocess.Popen(["bash", "-c", option(words, "--command")], env=environment, cwd=home)
        )
    while any(process.poll() is None for process in running):
        if (CLOUD / "preempt").exists():
            GONE.touch()
            (CLOUD / "preempt").unlink(missing_ok=True)
            end_processes()
        time.sleep(0.05)
    while "worker.sh start" in option(words, "--command") and (CLOUD / "hold").exists():
        time.sleep(0.05)
    return 255 if GONE.exists() else max(process.returncode for process in running)


def end_processes() -> None:
    """Ends, without a word, whatever runs with its home on one of the hosts, and what that starts meanwhile."""
    found = True
    while found:
        found = False
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if f"HOME={CLOUD}/hosts/".encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
                    found = True
            except OSError:
                pass  # it has ended, or is not ours


if __name__ == "__main__":
    (CLOUD / "hosts").mkdir(exist_ok=True)
    (CLOUD / "past").mkdir(exist_ok=True)
    raise SystemExit(main(sys.argv[1:]))
