"""Executables for TPUs that are not there: compiled once, then read from the cache folder.

JAX's own compilation cache keeps nothing of what it compiles for a topology without devices, so a second plan would
take as long as the first. What is kept here is the compiled text and its memory, not something to run.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import importlib.metadata
import json
import os
import pathlib
import time
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm.models.formats.cache import cache_root

__all__ = ["Executable", "compiled"]


@dataclasses.dataclass(frozen=True)
class Executable:
    """What is known of a compiled program; bytes are those of one chip."""

    text: str  # HLO of one partition
    arguments: int
    temporaries: int
    results: int  # arguments that they take the place of included
    replaced: int  # of the results, in place of arguments
    seconds: float  # that compiling took


def compiled(lowered: Any, mesh: Mesh) -> Executable:
    """Compiles a lowered program, unless the same has been compiled for the same devices before."""
    file = _file(lowered, mesh)
    if file.exists():
        return Executable(**json.loads(gzip.decompress(file.read_bytes())))
    began = time.perf_counter()
    executable = lowered.compile()
    seconds = time.perf_counter() - began
    memory = executable.memory_analysis()
    found = Executable(
        executable.as_text(),
        memory.argument_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        seconds,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(found)).encode()))
    partial.replace(file)
    return found


def _file(lowered: Any, mesh: Mesh) -> pathlib.Path:
    devices = [
        (
            d.device_kind,
            getattr(d, "coords", d.id),
            getattr(d, "core_on_chip", 0),
            getattr(d, "slice_index", 0),
        )
        for d in mesh.devices.flat
    ]
    efforts = [getattr(jax.config, f"jax_{of}_level", "UNKNOWN") for of in ("optimization", "memory_fitting")]
    parts = (
        lowered.as_text(),
        repr(devices),
        repr(dict(mesh.shape)),
        jax.__version__,
        importlib.metadata.version("libtpu"),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
        os.environ.get("XLA_FLAGS", ""),
        *(effort for effort in efforts if effort != "UNKNOWN"),
    )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_root() / "plans" / f"{digest[:32]}.json.gz"
