"""Several processes as one JAX program: two real ones, started by the launcher, add up over all their devices."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest

from jaxrl_llm.cli import main
from jaxrl_llm.errors import InputError
from jaxrl_llm.parallel import processes
from jaxrl_llm.parallel.processes import check_covers, initialize_processes

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import json, pathlib, sys
from jaxrl_llm.parallel.processes import initialize_processes
several = initialize_processes()
again = initialize_processes()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("all",))
where = NamedSharding(mesh, P("all"))
mine = jax.make_array_from_callback((jax.device_count(),), where, lambda index: np.arange(jax.device_count())[index] + 1.0)
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P()))(mine)
jax.block_until_ready(total)
result = {
    "several": several, "again": again, "index": jax.process_index(), "processes": jax.process_count(),
    "local": jax.local_device_count(), "sum": float(total.addressable_data(0)[0]),
}
(pathlib.Path(sys.argv[1]) / f"{jax.process_index()}.json").write_text(json.dumps(result))
"""


@pytest.mark.parametrize("processes", [2, 1])
def test_all_devices_of_all_processes_add_up(tmp_path, processes):
    script = tmp_path / "sum.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, ROOT / "launch" / "tpu_run.py", "--logs", tmp_path / "logs", "--grace", "5"]
    launch += [
        "--num-processes",
        str(processes),
        "--devices-per-process",
        "2",
        "--",
        sys.executable,
        script,
        tmp_path,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    devices = 2 * processes
    for index in range(processes):
        assert json.loads((tmp_path / f"{index}.json").read_text()) == {
            "several": processes > 1,
            "again": processes > 1,
            "index": index,
            "processes": processes,
            "local": 2,
            "sum": devices * (devices + 1) / 2,
        }


@pytest.mark.parametrize("environment", [{}, {"JAX_COORDINATOR_ADDRESS": "a:1"}, {"JAX_NUM_PROCESSES": ""}])
def test_one_process_that_knows_of_no_others(environment):
    assert initialize_processes(environment) is False


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (
            {"JAX_NUM_PROCESSES": "2"},
            "JAX_NUM_PROCESSES is set and JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID not",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "must be 0 to 1",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "a whole number",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "must be host:port",
        ),
        ({"JAXRL_DISTRIBUTED": "yes"}, "must be auto"),
    ],
)
def test_variables_that_contradict_each_other(environment, message):
    with pytest.raises(InputError, match=message):
        initialize_processes(environment)


def test_automatic_asks_jax_to_find_the_others(monkeypatch):
    calls = []
    monkeypatch.setattr("jax.distributed.initialize", lambda *arguments: calls.append(arguments))
    assert initialize_processes({"JAXRL_DISTRIBUTED": "auto"}) is False  # there are none here
    assert calls == [()]


def test_every_device_of_every_process_is_in_the_mesh(monkeypatch):
    check_covers(3)  # one process may leave devices alone
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda *_: 2)
    devices = jax.device_count()
    check_covers(devices)
    for needed in (1, devices + 1):
        with pytest.raises(
            InputError, match=rf"takes {needed} devices, and the 2 processes .* have {devices} together"
        ):
            check_covers(needed)


def test_sigterm_is_handled_by_python_after_joining(monkeypatch):
    def join(*_):  # JAX's own listener replaces the handler behind Python's back
        replaced.append(signal.getsignal(signal.SIGTERM))

    def handler(*_):
        return None

    replaced, set_again = [], []
    before = signal.signal(signal.SIGTERM, handler)
    try:
        monkeypatch.setattr(jax.distributed, "initialize", join)
        monkeypatch.setattr(signal, "signal", lambda *arguments: set_again.append(arguments))
        address = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
        assert initialize_processes(address)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGTERM, before)
        jax.config.update("jax_cpu_enable_async_dispatch", True)
    assert replaced == [handler] and set_again == [(signal.SIGTERM, handler)]


@pytest.mark.parametrize("command", [["eval", "tiny"], ["report", "runs/x"], ["objectives"]])
def test_other_commands_refuse_to_be_one_of_several_and_wait_for_nobody(monkeypatch, capsys, command):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setattr(processes, "initialize_processes", lambda: pytest.fail("it waits for the others"))
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert "only train, sft and replay work as several" in capsys.readouterr().err
