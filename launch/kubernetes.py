"""What `gke-jobset` and `xpk` share: the script that starts a job, follows it and cleans up."""

from __future__ import annotations

import pathlib

from launch.plan import LaunchError, Plan
from launch.text import array, assign

__all__ = ["launch_script", "literal", "need_image", "secret_name"]

_SCRIPTS = pathlib.Path(__file__).parent / "scripts"


def literal(text: str) -> str:
    """A word of a command, or the value of a variable, such that Kubernetes, which expands $(NAME) and $$, gives it back."""
    return text.replace("$", "$$") if "$$" in text or "$(" in text else text


def secret_name(plan: Plan) -> str:
    """Of the Kubernetes Secret that the launch makes and deletes."""
    return f"{plan.name}-secrets"


def need_image(plan: Plan, backend: str) -> str:
    """The image of a plan. Raises LaunchError where there is none."""
    if plan.image is None:
        raise LaunchError(
            f"--backend {backend}: pods run in a container; give --image REGISTRY/NAME:TAG, and --build to make it from this "
            "repository with launch/Dockerfile."
        )
    return plan.image


def launch_script(plan: Plan, *, create: str, delete: str) -> str:
    """The bash script; `create` and `delete` are the commands that start and delete the job."""
    head = "#!/usr/bin/env bash\nset -euo pipefail\n" + assign(
        name=plan.name,
        namespace=plan.namespace,
        out=plan.out,
        image=plan.image or "",
        build=str(plan.build).lower(),
        keep=str(plan.keep).lower(),
        secret=secret_name(plan),
    )
    functions = f"create_job() {{\n  {create}\n}}\ndelete_job() {{\n  {delete}\n}}\n"
    return head + array("secrets", plan.secrets) + functions + (_SCRIPTS / "kubernetes.sh").read_text()
