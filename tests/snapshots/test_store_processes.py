"""Snapshots that several processes write and read together: real ones, started by the launcher."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import json, pathlib, sys, warnings
from jaxrl_llm.parallel.processes import initialize_processes, leave_together
initialize_processes()
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxrl_llm.errors import InputError
from jaxrl_llm.parallel.agree import is_first, on_first
from jaxrl_llm.parallel.host import place, read
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.snapshots.store import SnapshotStore

folder, out, steps = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
mesh = make_mesh(fsdp=4)
where = {
    "params": {"w": NamedSharding(mesh, P("fsdp")), "b": NamedSharding(mesh, P())},
    "key": NamedSharding(mesh, P()),
    "count": None,
}

def state(version):
    rng = np.random.default_rng(version)
    values = {"params": {"w": rng.normal(size=(256, 64)), "b": rng.normal(size=3)}, "key": jax.random.key(version)}
    return place(values, {k: where[k] for k in values}) | {"count": version}

def damage(version, flip):
    for path in (folder / str(version) / "params" / "ocdbt.process_1" / "d").iterdir():
        data = bytearray(path.read_bytes())
        if flip and len(data) > 4096:
            data[len(data) // 2] ^= 1
        path.write_bytes(data if flip else data[: len(data) // 2])

found = {}
with warnings.catch_warnings(record=True) as seen, SnapshotStore(folder, keep_last=3) as store:
    warnings.simplefilter("always")
    for step in steps:
        what, _, number = step.partition(":")
        version = int(number or 0)
        if what == "save":
            store.save(version, state(version), {"of": version})
            store.wait()
        elif what in ("cut", "flip"):
            on_first(lambda: damage(version, what == "flip"))
        else:
            try:
                restored, meta = store.restore(version or None, like=state(0))
                wanted = state(restored["count"])
                same = jax.tree.map(
                    lambda a, b: bool(np.array_equal(a, b)), read(restored["params"]), read(wanted["params"])
                )
                key = bool(np.array_equal(*map(jax.random.key_data, (restored["key"], wanted["key"]))))
                found[step] = {"version": meta["of"], "same": all(jax.tree.leaves(same)) and key}
            except InputError as error:
                found[step] = str(error)
    found["versions"] = store.versions()
found["warnings"] = [str(w.message) for w in seen if "Snapshot" in str(w.message)]
(out / f"{jax.process_index()}.json").write_text(json.dumps(found))
leave_together(0)
"""


@pytest.fixture
def run(tmp_path):
    """run(processes, *steps) -> what each process found."""
    script = tmp_path / "store.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(processes, *steps):
        launch = [sys.executable, ROOT / "launch" / "tpu_run.py", "--logs", tmp_path / "logs", "--grace", "5"]
        launch += ["--num-processes", str(processes), "--devices-per-process", str(4 // processes), "--"]
        launch += [sys.executable, script, tmp_path / "snapshots", tmp_path, *steps]
        result = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
        return [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(processes)]

    return start


def test_what_two_processes_save_any_number_of_them_restores(run):
    saved = run(2, "save:1", "save:2", "save:3", "save:4", "restore", "restore:3")
    for found in saved:
        assert found["restore"] == {"version": 4, "same": True}
        assert found["restore:3"] == {"version": 3, "same": True}
        assert found["versions"] == [2, 3, 4] and found["warnings"] == []
    (alone,) = run(1, "restore", "save:5")
    assert alone["restore"] == {"version": 4, "same": True}
    for found in run(4, "restore", "restore:4"):
        assert found["restore"] == {"version": 5, "same": True}
        assert found["restore:4"] == {"version": 4, "same": True}


def test_all_leave_out_what_one_of_them_cannot_read(run):
    steps = ("save:1", "save:2", "save:3", "cut:3", "flip:2", "restore", "restore:3", "restore:9")
    first, second = run(2, *steps)
    assert first["restore"] == second["restore"] == {"version": 1, "same": True}
    assert first["restore:3"] == second["restore:3"] and "an array cannot be read" in first["restore:3"]
    assert first["restore:9"] == second["restore:9"] and "There is no snapshot 9" in first["restore:9"]
    assert len(first["warnings"]) == 2 and "digest" in first["warnings"][1]  # said once
    assert second["warnings"] == []
