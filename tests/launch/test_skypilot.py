"""The task for SkyPilot against what its schema allows (0.14.1; `sky.Task.from_yaml_config` takes 100 packages)."""

import yaml

from launch import skypilot
from launch.plan import Bucket, Plan
from launch.topology import GENERATIONS, parse_slice

# Fields that are used, with their types; a field that is not here is a mistake.
TASK = {
    "name": str,
    "resources": {
        "infra": str,
        "accelerators": str,
        "accelerator_args": {"runtime_version": str},
        "job_recovery": {"max_restarts_on_errors": int, "recover_on_exit_codes": list},
        "use_spot": bool,
    },
    "num_nodes": int,
    "workdir": str,
    "envs": dict,
    "secrets": dict,
    "file_mounts": {"/mnt/jaxrl": {"source": str, "mode": str}},
    "setup": str,
    "run": str,
}


def check(value: dict, fields: dict) -> None:
    for key, item in value.items():
        assert key in fields, key
        if isinstance(fields[key], dict):
            check(item, fields[key])
        else:
            assert type(item) is fields[key], key


def plan(**changes) -> Plan:
    fields = {"name": "job", "slice": parse_slice("v6e-16"), "command": ("jaxrl", "train", "c.yaml")}
    return Plan(**{**fields, **changes})


def written(of: Plan) -> dict:
    task = yaml.safe_load(skypilot.render(of).files[f"{of.out}/task.yaml"])
    assert task == skypilot.task(of)
    return task


def test_every_kind_of_slice():
    for kind in GENERATIONS.values():
        for number in kind.shapes:
            task = written(plan(slice=parse_slice(f"{kind.api}-{number}")))
            check(task, TASK)
            assert task["resources"]["accelerators"] == f"tpu-{kind.api}-{number}:1"
            assert task["num_nodes"] == 1  # SkyPilot runs the command on every host of the slice


def test_all_that_can_be_chosen():
    task = written(
        plan(
            bucket=Bucket("my-runs", "team"),
            run="/mnt/jaxrl/x",
            env=(("NOTE", "1"), ("EMPTY", "")),
            secrets=("HF_TOKEN",),
            capacity="spot",
            zone="us-east5-b",
            runtime="other",
        )
    )
    check(task, TASK)
    assert task["resources"]["infra"] == "gcp/us-east5/us-east5-b"
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["accelerator_args"] == {"runtime_version": "other"}
    assert task["secrets"] == {"HF_TOKEN": None}  # the value is asked for with --secret
    assert task["file_mounts"] == {"/mnt/jaxrl": {"source": "gs://my-runs/team", "mode": "MOUNT"}}
    assert all(isinstance(value, str) for value in task["envs"].values())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75, 143]
