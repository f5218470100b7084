"""Several processes that work as one JAX program."""

from __future__ import annotations

import os
from collections.abc import Mapping

import jax

from jaxrl_llm.errors import InputError

__all__ = ["initialize_processes"]

_VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_AUTOMATIC = "JAXRL_DISTRIBUTED"


def initialize_processes(environment: Mapping[str, str] | None = None) -> bool:
    """Joins this process with the others of the run, as `launch/tpu_run.py` has set it up; call it before any use of a device.

    With JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID (from 0), by these; with
    JAXRL_DISTRIBUTED=auto, by what the slice, Kubernetes or the cluster tells JAX. With none of them, or one process,
    nothing happens. A second call does nothing.

    On several CPU processes, wait for each step (`jax.block_until_ready`): steps that queue up have been seen to wait for
    each other for ever.

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
    jax.distributed.initialize(address, count, index)
    return True


def _whole(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise InputError(f"{name}={text}: must be a whole number.")
    return int(text)
