"""TPU VMs by `gcloud compute tpus queued-resources`: v4, v5e, v5p and v6e.

The files are two bash scripts: `launch.sh` runs on the machine of whoever launches, for as long as the run, and asks
for new machines after a preemption; `worker.sh` runs on every host.
"""

from __future__ import annotations

import pathlib
import shlex

from launch.plan import MOUNT, LaunchError, Plan, Rendered
from launch.text import array, assign

__all__ = ["render"]

_SCRIPTS = pathlib.Path(__file__).parent / "scripts"
_HEAD = "#!/usr/bin/env bash\nset -euo pipefail\n"


def render(plan: Plan) -> Rendered:
    """The files for a plan. Raises LaunchError when it lacks something."""
    if plan.zone is None:
        raise LaunchError("--backend queued-resources: say where, with --zone, such as --zone us-east5-b.")
    if plan.image is not None or plan.build:
        raise LaunchError("--image and --build are for Kubernetes; TPU VMs get the code and install it.")
    if plan.reservation is not None:
        raise LaunchError(
            "--reservation: queued resources use whatever the project has reserved; give --reserved instead."
        )
    nodes = [plan.name] if plan.slices == 1 else [f"{plan.name}-{i}" for i in range(plan.slices)]
    where = ["--zone", plan.zone, *(["--project", plan.project] if plan.project else [])]
    launch = (
        _HEAD
        + assign(
            name=plan.name,
            out=plan.out,
            hosts=plan.slice.hosts,
            grace=plan.grace,
            max_restarts=plan.max_restarts,
            keep=str(plan.keep).lower(),
        )
        + array("where", where)
        + array("nodes", nodes)
        + array("secrets", plan.secrets)
        + array("create", _create(plan))
        + (_SCRIPTS / "queued_resources.sh").read_text()
    )
    bucket = plan.bucket
    worker = (
        _HEAD
        + assign(
            grace=plan.grace,
            extras=plan.extras,
            mount=MOUNT,
            bucket=bucket.name if bucket else "",
            prefix=bucket.prefix if bucket else "",
        )
        + array("variables", [f"{name}={value}" for name, value in plan.variables])
        + array("command", plan.supervised("python"))
        + (_SCRIPTS / "worker.sh").read_text()
    )
    files = {f"{plan.out}/worker.sh": worker, f"{plan.out}/launch.sh": launch}
    return Rendered(files, ("bash", f"{plan.out}/launch.sh"), _notes(plan))


def _create(plan: Plan) -> list[str]:
    """The command that asks for the machines, without project and zone."""
    chosen = (
        ["--accelerator-type", plan.slice.accelerator]
        if plan.slice.usual
        else ["--type", plan.slice.generation, "--topology", plan.slice.shape]
    )
    nodes = (
        ["--node-id", plan.name]
        if plan.slices == 1
        else ["--node-count", str(plan.slices), "--node-prefix", plan.name]
    )
    out = ["gcloud", "compute", "tpus", "queued-resources", "create", plan.name, *nodes, *chosen]
    out += ["--runtime-version", plan.runtime or plan.slice.kind.runtime]
    if plan.capacity == "spot":
        out.append("--spot")
    if plan.capacity == "reserved":
        out.append("--reserved")
    if plan.service_account:
        out += ["--service-account", plan.service_account]
    if plan.network:
        out += ["--network", plan.network]
    return out


def _notes(plan: Plan) -> tuple[str, ...]:
    notes = [f"stop: Ctrl-C; delete machines that were left: bash {shlex.quote(plan.out)}/launch.sh delete"]
    if plan.capacity == "spot":
        notes.append(
            "a spot machine goes away about 30 s after the warning: let snapshots.every be a few minutes of train steps"
        )
    return tuple(notes)
