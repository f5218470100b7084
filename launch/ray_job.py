"""Ray: a job on a running Ray cluster with TPU hosts (KubeRay on GKE, or a cluster of TPU VMs)."""

from __future__ import annotations

import shlex
from typing import Any

from launch.plan import LaunchError, Plan, Rendered
from launch.text import yaml_text

__all__ = ["render", "runtime_env"]

_NOT_COPIED = [".git", ".venv", ".venv-tests", "runs", "tests", "colab"]


def render(plan: Plan) -> Rendered:
    """The files for a plan. Raises LaunchError when it has what belongs to the cluster."""
    for given, option in (
        (plan.image, "--image"),
        (plan.bucket, "--bucket"),
        (plan.zone, "--zone"),
        (plan.capacity != "on-demand", "--spot and --reservation"),
    ):
        if given:
            raise LaunchError(
                f"{option}: this is decided where the Ray cluster is made, not for a job on it."
            )
    path = f"{plan.out}/runtime_env.yaml"
    workers = [
        *(
            "python",
            "launch/ray_workers.py",
            "--generation",
            plan.slice.kind.api,
            "--shape",
            plan.slice.shape,
        ),
        *("--chips-per-host", str(plan.slice.chips_per_host), "--slices", str(plan.slices)),
        *("--grace", str(plan.grace), "--max-restarts", str(plan.max_restarts)),
        *(["--resume-folder", plan.run] if plan.run is not None else []),
        *(word for name in plan.secrets for word in ("--secret", name)),
        "--",
        *plan.command,
    ]
    address = ["--address", plan.address] if plan.address else []
    submit = ["ray", "job", "submit", *address, "--submission-id", plan.name]
    submit += ["--working-dir", ".", "--runtime-env", path, "--", *workers]
    others = {verb: shlex.join(["ray", "job", verb, *address, plan.name]) for verb in ("stop", "delete")}
    script = (
        "#!/usr/bin/env bash\n"
        "# bash launch.sh         starts the job and shows what it prints; Ctrl-C leaves it running\n"
        "# bash launch.sh follow  shows what it prints\n"
        "# bash launch.sh stop    stops it, after a snapshot\n"
        "set -euo pipefail\n"
        "case ${1:-start} in\n"
        # Ray keeps an ended job under its name; one that runs is not deleted, and then the name is refused.
        f"  start)\n    {others['delete']} >/dev/null 2>&1 || true\n    {shlex.join(submit)}\n    ;;\n"
        f"  follow) {shlex.join(['ray', 'job', 'logs', '--follow', *address, plan.name])} ;;\n"
        f"  stop) {others['stop']} ;;\n"
        f"  *) echo {shlex.quote(f'usage: bash {plan.out}/launch.sh [start|follow|stop]')} >&2; exit 2 ;;\n"
        "esac\n"
    )
    notes = ["the hosts of the cluster need the package's dependencies; the code is copied"]
    if plan.secrets:
        notes.append(
            f"{', '.join(plan.secrets)}: must be set on the hosts of the cluster (Ray shows the environment of jobs to everybody)"
        )
    return Rendered(
        {path: yaml_text(runtime_env(plan)), f"{plan.out}/launch.sh": script},
        ("bash", f"{plan.out}/launch.sh"),
        tuple(notes),
    )


def runtime_env(plan: Plan) -> dict[str, Any]:
    """What Ray sets up for the job."""
    own = {
        "RAY_JOB_STOP_WAIT_TIME_S": str(plan.grace + 30),  # that a job which is told to stop may take
        "RAY_DEDUP_LOGS": "0",  # lines that several hosts print are shown from each
    }
    return {"env_vars": {**dict(plan.variables), **own}, "excludes": _NOT_COPIED}
