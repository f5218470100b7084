"""Several processes that work as one JAX program."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping

import jax
import orbax.checkpoint as ocp

from jaxrl_llm.errors import InputError
from jaxrl_llm.parallel.agree import several
from jaxrl_llm.stopping import EXIT_STOPPED

__all__ = ["are_announced", "check_covers", "initialize_processes", "leave_together"]

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_AUTOMATIC = "JAXRL_DISTRIBUTED"


def are_announced(environment: Mapping[str, str] | None = None) -> bool:
    """Whether the environment says that this process has others, which `initialize_processes` would wait for."""
    variables = os.environ if environment is None else environment
    return variables.get("JAX_NUM_PROCESSES", "") not in ("", "1") or bool(variables.get(_AUTOMATIC))


def initialize_processes(environment: Mapping[str, str] | None = None) -> bool:
    """Joins this process with the others of the run, as `launch/tpu_run.py` has set it up; call it before any use of a device.

    With JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0), by these; with
    JAXRL_DISTRIBUTED=auto, by what the slice, Kubernetes or the cluster tells JAX. With none of them, or one process,
    nothing happens. A second call does nothing.

    On CPU every program is then waited for when it is launched: programs that queue up have been seen to wait for each other
    for ever.

    Args:
      environment: default `os.environ`.

    Returns:
      Whether there are several processes.

    Raises:
      InputError: only some of the variables are set, or they contradict each other.
      RuntimeError: JAX has used a device already, or the others cannot be reached (after 5 minutes).
    """
    variables = os.environ if environment is None else environment
    if jax.distributed.is_initialized():
        return jax.process_count() > 1
    given = [name for name in _VARIABLES[1:] if variables.get(name)]
    if not given:
        automatic = variables.get(_AUTOMATIC, "")
        if automatic not in ("", "auto"):
            raise InputError(f"{_AUTOMATIC}={automatic}: must be auto, or not be set.")
        if not automatic:
            return False
        with _joining():
            jax.distributed.initialize()
        return jax.process_count() > 1
    missing = [name for name in _VARIABLES if not variables.get(name)]
    if missing:
        raise InputError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} set and {' and '.join(missing)} not: set all of "
            f"{', '.join(_VARIABLES)}, or none."
        )
    address = variables["JAX_COORDINATOR_ADDRESS"]
    count, index = (_whole(name, variables[name]) for name in _VARIABLES[1:])
    if not 0 <= index < count:
        raise InputError(
            f"JAX_PROCESS_ID={index}: with JAX_NUM_PROCESSES={count} it must be 0 to {count - 1}."
        )
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise InputError(f"JAX_COORDINATOR_ADDRESS={address}: must be host:port.")
    if count == 1:
        return False
    with _joining():
        jax.distributed.initialize(address, count, index)
    return True


@contextlib.contextmanager
def _joining() -> Iterator[None]:
    """What has to be set before and put back after the processes join."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    yield
    if threading.current_thread() is threading.main_thread():
        # JAX listens to SIGTERM itself from now on, and Python no longer does: say again who handles it.
        handler = signal.getsignal(signal.SIGTERM)
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def check_covers(needed: int) -> None:
    """Refuses a mesh that does not take every device of every process: a process without a part in it cannot compute.

    Args:
      needed: devices of the mesh.

    Raises:
      InputError: there are several processes, and their devices are not so many.
    """
    if not several() or needed == jax.device_count():
        return
    raise InputError(
        f"mesh: data x fsdp x expert x context x tensor takes {needed} devices, and the {jax.process_count()} processes of this run have "
        f"{jax.device_count()} together ({jax.local_device_count()} here). All must be in the mesh: choose sizes whose product is "
        f"{jax.device_count()}, such as --set mesh.data={jax.device_count()}, or another number of processes or devices."
    )


_GOODBYE = 10  # seconds that a process whose run failed waits for the others
_FAREWELL = 600  # seconds that one whose run ended well does: another may be writing the report


def leave_together(code: int) -> None:
    """Called last by a process of several, with the exit code that it is going to end with.

    When the others are leaving too it returns, and JAX parts with them in good order. When they are not (one of them has
    died, or this one alone failed), this process ends at once: JAX would wait for them for minutes.
    """
    if not several():
        return
    wait = _FAREWELL if code in (0, EXIT_STOPPED) else _GOODBYE
    try:
        ocp.multihost.get_barrier_sync_fn()(key="jaxrl/leave", timeout_ms=wait * 1000)
    except Exception:  # the runtime has many types for a peer that is not there
        print(
            "jaxrl: the other processes of this run did not end with this one. What went wrong first is in the output of one of "
            "them; the run goes on from its newest snapshot with --resume.",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name}={text}: must be a whole number.")
    return int(text)
