"""SkyPilot: a managed job on Google Cloud, which is started again, in another zone if need be, after a preemption."""

from __future__ import annotations

import shlex
from typing import Any

from launch.plan import MOUNT, LaunchError, Plan, Rendered
from launch.text import yaml_text

__all__ = ["render", "task"]

_RECOVER = (75, 143)  # exit codes of a run that was told to end and has nothing wrong with it


def render(plan: Plan) -> Rendered:
    """The files for a plan. Raises LaunchError when it has what SkyPilot cannot do."""
    if plan.slices > 1:
        raise LaunchError(
            "--slices: SkyPilot starts one slice; use queued-resources, gke-jobset or xpk for several."
        )
    if plan.image is not None or plan.build:
        raise LaunchError("--image and --build are for Kubernetes; SkyPilot copies the code and installs it.")
    if plan.capacity == "reserved":
        raise LaunchError(
            "--reserved: reservations are named in SkyPilot's own config (gcp.specific_reservations)."
        )
    if not plan.slice.usual:
        raise LaunchError(
            f"--tpu {plan.slice}: SkyPilot knows accelerator types only; for {plan.slice.chips} chips the shape is "
            f"{plan.slice.kind.shapes.get(plan.slice.chips * plan.slice.kind.cores, 'none')}."
        )
    path = f"{plan.out}/task.yaml"
    launch = ["sky", "jobs", "launch", "--yes", "--name", plan.name]
    for name in plan.secrets:
        launch += ["--secret", name]  # the value is taken from the environment
    script = (
        "#!/usr/bin/env bash\n"
        "# bash launch.sh         starts the job and shows what it prints; Ctrl-C leaves it running\n"
        "# bash launch.sh follow  shows what it prints\n"
        "# bash launch.sh stop    stops it and deletes the machines\n"
        "set -euo pipefail\n"
        "case ${1:-start} in\n"
        f"  start) {shlex.join([*launch, path])} ;;\n"
        f"  follow) {shlex.join(['sky', 'jobs', 'logs', '--name', plan.name])} ;;\n"
        f"  stop) {shlex.join(['sky', 'jobs', 'cancel', '--yes', '--name', plan.name])} ;;\n"
        f"  *) echo {shlex.quote(f'usage: bash {plan.out}/launch.sh [start|follow|stop]')} >&2; exit 2 ;;\n"
        "esac\n"
    )
    return Rendered(
        {path: yaml_text(task(plan)), f"{plan.out}/launch.sh": script},
        ("bash", f"{plan.out}/launch.sh"),
        (
            "needs SkyPilot (pipx install 'skypilot[gcp]==0.14.1'); machines are deleted by SkyPilot when the job ends",
        ),
    )


def task(plan: Plan) -> dict[str, Any]:
    """The task as data."""
    resources: dict[str, Any] = {
        "infra": f"gcp/{plan.zone.rsplit('-', 1)[0]}/{plan.zone}" if plan.zone else "gcp",
        "accelerators": f"tpu-{plan.slice.accelerator}:1",
        "accelerator_args": {"runtime_version": plan.runtime or plan.slice.kind.runtime},
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": list(_RECOVER)},
    }
    if plan.capacity == "spot":
        resources["use_spot"] = True
    out: dict[str, Any] = {
        "name": plan.name,
        "resources": resources,
        "num_nodes": 1,  # one slice; the commands run on each of its hosts
        "workdir": ".",
        "envs": dict(plan.variables),
    }
    if plan.secrets:
        out["secrets"] = {name: None for name in plan.secrets}  # given with --secret
    if plan.bucket is not None:
        out["file_mounts"] = {MOUNT: {"source": str(plan.bucket), "mode": "MOUNT"}}
    out["setup"] = (
        "# The images of TPU VMs have an older Python than the package needs.\n"
        "python3 -m pip install --quiet uv\n"
        "[ -d ~/jaxrl-venv ] || python3 -m uv venv --quiet --python 3.12 ~/jaxrl-venv\n"
        f"python3 -m uv pip install --quiet --python ~/jaxrl-venv/bin/python -e '.[{plan.extras}]'\n"
    )
    out["run"] = f'export PATH="$HOME/jaxrl-venv/bin:$PATH"\nexec {shlex.join(plan.supervised("python"))}\n'
    return out
