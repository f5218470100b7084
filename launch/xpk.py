"""XPK (Accelerated Processing Kit): `xpk workload create` writes and submits a JobSet on a cluster that XPK has made."""

from __future__ import annotations

import shlex

from launch.kubernetes import launch_script, literal, need_image
from launch.plan import LaunchError, Plan, Rendered

__all__ = ["render", "workload_command"]

_SPARE = (
    30  # seconds that a pod has after its grace, to be killed by its own supervisor and not by Kubernetes
)
EXIT_STOPPED = 75


def render(plan: Plan) -> Rendered:
    """The files for a plan. Raises LaunchError when it lacks something, or has what XPK cannot do."""
    need_image(plan, "xpk")
    if plan.cluster is None:
        raise LaunchError("--backend xpk: name the cluster, with --cluster.")
    if plan.zone is None:
        raise LaunchError("--backend xpk: say where, with --zone, such as --zone us-east5-b.")
    if plan.secrets:
        raise LaunchError(
            f"--secret {plan.secrets[0]}: XPK writes values into the JobSet as plain text, where everybody with access to the "
            "cluster reads them. Use --backend gke-jobset, which refers to a Kubernetes Secret."
        )
    if plan.bucket is not None:
        raise LaunchError(
            "--bucket: XPK mounts storages that it knows. Attach the bucket once (xpk storage attach NAME --type gcsfuse --bucket "
            f"{plan.bucket.name} --mount-point /mnt/NAME …), then give --storage NAME and --run /mnt/NAME/FOLDER."
        )
    if plan.capacity == "reserved" and plan.reservation is None:
        raise LaunchError("--reserved: name the reservation, with --reservation NAME.")
    for name, value in plan.env:
        if any(character in value for character in '"\\\n'):
            raise LaunchError(
                f"--env {name}: XPK 1.16 writes values between double quotes as they are, so that a quote, a backslash or a line "
                "end in one breaks its JobSet. Use --backend gke-jobset."
            )
    if any("\n" in argument for argument in plan.command):
        raise LaunchError(
            "the command holds a line end, which breaks the JobSet that XPK 1.16 writes; use --backend gke-jobset."
        )
    where = _where(plan)
    delete = shlex.join(["xpk", "workload", "delete", "--workload", plan.name, *where, "--force"])
    script = launch_script(plan, create=shlex.join(workload_command(plan)), delete=delete)
    return Rendered(
        {f"{plan.out}/launch.sh": script},
        ("bash", f"{plan.out}/launch.sh"),
        ("needs xpk (pipx install xpk==1.16.0) and kubectl with the cluster as its context",),
    )


def workload_command(plan: Plan) -> list[str]:
    """The command line that submits the plan."""
    # XPK runs it as `(COMMAND) &` in bash and sends SIGTERM to that shell, which exec makes the supervisor.
    command = "cd /app && exec " + literal(shlex.join(plan.supervised()))
    out = ["xpk", "workload", "create", "--workload", plan.name, *_where(plan)]
    out += [
        "--tpu-type",
        plan.slice.accelerator if plan.slice.usual else f"{plan.slice.generation}-{plan.slice.shape}",
    ]
    out += ["--num-slices", str(plan.slices), "--docker-image", plan.image or ""]
    out += ["--max-restarts", str(plan.max_restarts), "--restart-on-exit-codes", str(EXIT_STOPPED)]
    out += ["--termination-grace-period-seconds", str(plan.grace + _SPARE)]
    if plan.namespace != "default":
        out += ["--namespace", plan.namespace]
    if plan.capacity == "spot":
        out.append("--spot")
    if plan.reservation:
        out += ["--reservation", plan.reservation]
    for storage in plan.storage:
        out += ["--storage", storage]
    for name, value in plan.variables:
        out += ["--env", f"{name}={literal(value)}"]
    return [*out, "--command", command]


def _where(plan: Plan) -> list[str]:
    project = ["--project", plan.project] if plan.project else []
    return ["--cluster", plan.cluster or "", "--zone", plan.zone or "", *project]
