"""Where a run happened: hardware, versions of packages, state of the source."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_llm.diagnostics.redact import redact, redact_text
from jaxrl_llm.errors import InputError

__all__ = ["describe_environment", "write_run_info"]

_PACKAGES = ("jaxrl-llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def describe_environment() -> dict[str, Any]:
    """JSON facts about this process: machine, devices, versions, git revision of the source if there is one."""
    devices = jax.devices()
    kinds: dict[str, int] = {}
    for device in devices:
        kinds[device.device_kind] = kinds.get(device.device_kind, 0) + 1
    return {
        "devices": ", ".join(f"{count} × {kind}" for kind, count in kinds.items()),
        "processes": jax.process_count(),
        "cpu": f"{_cpu_name()}, {_cpu_count()} cores",
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "git": _git_revision(pathlib.Path(__file__).resolve().parent),
    }


def write_run_info(run_dir: str | pathlib.Path, arguments: Sequence[str] | None = None) -> pathlib.Path:
    """Writes run.json: the environment and the command line, without secrets.

    Args:
      run_dir: the run folder.
      arguments: of the command; default `sys.argv`.
    """
    path = pathlib.Path(run_dir) / "run.json"
    command = " ".join(sys.argv if arguments is None else arguments)
    info = {**describe_environment(), "command": redact_text(command)}
    text = json.dumps(redact(info), indent=2, ensure_ascii=False) + "\n"
    try:
        path.write_text(text, encoding="utf-8", errors="replace")  # an argument may be no UTF-8
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror or error}. Give another folder with --run, or make this one "
            "writable."
        ) from None
    return path


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module knows something
    return platform.processor() or platform.machine()


def _git_revision(folder: pathlib.Path) -> str | None:
    """Commit of the checkout that `folder` belongs to, with "+ changes"; None for an installed package."""
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or not a checkout
    return revision[:12] + (" + changes" if changed else "")


def _git(folder: pathlib.Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
