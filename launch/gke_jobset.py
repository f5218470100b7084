"""Google Kubernetes Engine: a JobSet, one Job a slice, one pod a host.

GKE gives each pod what JAX needs to find the others (TPU_WORKER_ID, TPU_WORKER_HOSTNAMES, and MEGASCALE_… with several
slices). A pod that is evicted, or whose machine goes away, fails its Job, and the JobSet starts all pods again; the run goes
on from its newest snapshot. Exit code 2, bad input, ends the JobSet at once: it would only be repeated.
"""

from __future__ import annotations

import shlex
from typing import Any

from launch.kubernetes import launch_script, literal, need_image, secret_name
from launch.plan import MOUNT, LaunchError, Plan, Rendered
from launch.text import yaml_text

__all__ = ["jobset", "render"]

CONTAINER = "jaxrl"
_SPARE = (
    30  # seconds that a pod has after its grace, to be killed by its own supervisor and not by Kubernetes
)
_PORTS = (8471, 8482, 8080)  # libtpu, JAX's coordinator, Megascale
_KEPT = 86_400  # seconds that an ended JobSet stays when nobody follows it


def render(plan: Plan) -> Rendered:
    """The files for a plan. Raises LaunchError when it lacks something."""
    need_image(plan, "gke-jobset")
    if plan.capacity == "reserved" and plan.reservation is None:
        raise LaunchError("--reserved: name the reservation, with --reservation NAME.")
    manifest = f"{plan.out}/jobset.yaml"
    script = launch_script(
        plan,
        create=f"k create --filename {shlex.quote(manifest)}",
        delete='k delete jobset "$name" --ignore-not-found --wait',
    )
    files = {manifest: yaml_text(jobset(plan)), f"{plan.out}/launch.sh": script}
    notes = ["needs kubectl with the cluster as its context, and JobSet installed in the cluster"]
    if plan.bucket is not None:
        notes.append(f"the Kubernetes service account needs roles/storage.objectUser on {plan.bucket}")
    if plan.capacity == "spot":
        notes.append(
            "GKE gives pods on spot nodes at most 15 s to end: let snapshots.every be a few minutes of train steps"
        )
    return Rendered(files, ("bash", f"{plan.out}/launch.sh"), tuple(notes))


def jobset(plan: Plan) -> dict[str, Any]:
    """The JobSet as data (API jobset.x-k8s.io/v1alpha2)."""
    metadata: dict[str, Any] = {
        "name": plan.name,
        "namespace": plan.namespace,
        # Each slice gets a node pool of its own.
        "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
    }
    if plan.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": plan.queue}
    job = {
        "parallelism": plan.slice.hosts,
        "completions": plan.slice.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [2]},
                }
            ]
        },
        "template": _pod(plan),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "ttlSecondsAfterFinished": _KEPT,
            "failurePolicy": {
                "maxRestarts": plan.max_restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "slice", "replicas": plan.slices, "template": {"spec": job}}],
        },
    }


def _pod(plan: Plan) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": plan.image,
        "workingDir": "/app",
        "command": [literal(word) for word in plan.supervised()],
        "env": [{"name": name, "value": literal(value)} for name, value in plan.variables]
        + [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret_name(plan), "key": name}}}
            for name in plan.secrets
        ],
        "ports": [{"containerPort": port} for port in _PORTS],
        "resources": {
            "requests": {"google.com/tpu": plan.slice.chips_per_host},
            "limits": {"google.com/tpu": plan.slice.chips_per_host},
        },
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    selector = {
        "cloud.google.com/gke-tpu-accelerator": plan.slice.kind.gke,
        "cloud.google.com/gke-tpu-topology": plan.slice.shape,
    }
    if plan.capacity == "spot":
        selector["cloud.google.com/gke-spot"] = "true"
    if plan.reservation:
        selector["cloud.google.com/reservation-name"] = plan.reservation
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": plan.grace + _SPARE,
        "nodeSelector": selector,
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    if plan.capacity == "spot":
        pod["tolerations"].append(
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        )
    if plan.service_account:
        pod["serviceAccountName"] = plan.service_account
    template: dict[str, Any] = {"spec": pod}
    if plan.bucket is not None:
        # A snapshot is renamed when it is complete, which for folders of a bucket must be allowed.
        options = ["implicit-dirs", "rename-dir-limit=200000"]
        if plan.bucket.prefix:
            options.append(f"only-dir={plan.bucket.prefix}")
        pod["volumes"].append(
            {
                "name": "runs",
                "csi": {
                    "driver": "gcsfuse.csi.storage.gke.io",
                    "volumeAttributes": {"bucketName": plan.bucket.name, "mountOptions": ",".join(options)},
                },
            }
        )
        container["volumeMounts"].append({"name": "runs", "mountPath": MOUNT})
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    return template
