"""TPUs as numbers, and topologies of them that libtpu compiles for without having one."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.errors import InputError, did_you_mean

__all__ = ["CHIPS", "Chip", "Topology", "peak_time", "topology_of"]

_GIB, _G = 2**30, 1e9


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What a device of JAX has, by the vendor's published figures (of TPU7x a device is one of two cores of a chip)."""

    hbm_bytes: int
    flops: float  # a second, dense bfloat16
    hbm_speed: float  # bytes a second
    ici_speed: float  # bytes a second along one axis of the torus, both directions together
    dcn_speed: float  # bytes a second out of a slice, the chip's share of its host


CHIPS: Mapping[str, Chip] = {
    "v4": Chip(hbm_bytes=32 * _GIB, flops=275e12, hbm_speed=1228 * _G, ici_speed=90 * _G, dcn_speed=3.1 * _G),
    "v5e": Chip(hbm_bytes=16 * _GIB, flops=197e12, hbm_speed=819 * _G, ici_speed=90 * _G, dcn_speed=3.1 * _G),
    "v5p": Chip(
        hbm_bytes=95 * _GIB, flops=459e12, hbm_speed=2765 * _G, ici_speed=180 * _G, dcn_speed=6.2 * _G
    ),
    "v6e": Chip(
        hbm_bytes=32 * _GIB, flops=918e12, hbm_speed=1640 * _G, ici_speed=180 * _G, dcn_speed=12.5 * _G
    ),
    "tpu7x": Chip(
        hbm_bytes=96 * _GIB, flops=1153e12, hbm_speed=3690 * _G, ici_speed=180 * _G, dcn_speed=6.2 * _G
    ),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices that can be compiled for."""

    name: str  # "v5p:4x4x4"
    chip: Chip
    slices: int
    devices: tuple[Any, ...]


_FORM = (
    "--topology is KIND:SHAPE, for example v5p:4x4x4, v6e:8x8 or v5e:2x4, or an accelerator type, for example v5p-128, "
    "v6e-64 or v5litepod-8"
)
_NAMES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
}  # what the Cloud TPU API calls kinds that have another name here
# Chips of the largest slice of an accelerator type, and TensorCores of a chip where the number of the type counts those.
_TYPES = {"v4": (2048, 2), "v5p": (6144, 2), "v5e": (256, 1), "v6e": (256, 1)}


def shape_of_type(kind: str, number: int) -> str | None:
    """Chips along each axis of the slice that the accelerator type KIND-NUMBER names; None: there is none.

    The number counts TensorCores of v4 and v5p, two a chip, and chips of v5e and v6e.
    """
    largest, cores = _TYPES[kind]
    chips, rest = divmod(number, cores)
    if rest or not 0 < chips <= largest:
        return None
    if kind == "v5p" and chips == 6144:
        return "16x16x24"
    if chips & (chips - 1):
        return None  # all others are powers of two, whose axes are as equal as can be
    power = chips.bit_length() - 1
    if cores == 1:
        return None if power == 1 else f"{1 << power // 2}x{1 << (power + 1) // 2}"
    if power < 2:
        return None  # a host has four chips
    return "2x2x1" if power == 2 else "x".join(str(1 << (power + axis) // 3) for axis in range(3))


def _shaped(name: str) -> str:
    """KIND:SHAPE of what may be an accelerator type; anything else as it is."""
    found = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,9})", name)
    if found is None:
        kind, colon, shape = name.partition(":")
        return f"{_NAMES.get(kind, kind)}{colon}{shape}"
    kind, number = _NAMES.get(found[1], found[1]), int(found[2])
    if kind not in CHIPS:
        return name
    if kind not in _TYPES:
        raise InputError(
            f"--topology {name}: accelerator types of {kind} are not known here; write its shape, for example {kind}:2x2x1."
        )
    named = shape_of_type(kind, number)
    if named is not None:
        return f"{kind}:{named}"
    largest, cores = _TYPES[kind]
    there = [n for n in (cores << power for power in range(14)) if shape_of_type(kind, n) is not None]
    there += [cores * largest] if cores * largest not in there else []
    near = sorted(sorted(there, key=lambda n: abs(n - number))[:2])
    counted = "TensorCores, two a chip" if cores == 2 else "chips"
    raise InputError(
        f"--topology {name}: there is no such accelerator type; the number counts {counted}. Nearest: "
        + ", ".join(f"{found[1]}-{n} ({kind}:{shape_of_type(kind, n)})" for n in near)
        + f". Or write a shape: {_FORM}."
    )


def topology_of(name: str, slices: int = 1) -> Topology:
    """The devices of a topology; with several slices, of all of them.

    Args:
      name: KIND:SHAPE, or an accelerator type as the Cloud TPU API names it (v5p-128, v5litepod-16, v6e-8).

    Raises:
      InputError: libtpu is missing, or no such topology; the message names the nearest.
    """
    name = _shaped(name.strip().lower())
    kind, _, shape = name.partition(":")
    if kind not in CHIPS:
        likely = did_you_mean(re.split("[:-]", name)[0], CHIPS)
        raise InputError(
            f"--topology {name}: no such kind of TPU.{likely} Known: {', '.join(CHIPS)}. {_FORM}."
        )
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", shape):
        raise InputError(f"--topology {name}: the shape {shape!r} is not two or three sizes. {_FORM}.")
    if not 1 <= slices <= 1024:
        raise InputError(f"--slices must be between 1 and 1024, got {slices}.")
    # Without these libtpu looks for the metadata server of a TPU machine. The machine named here is not used.
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_ACCELERATOR_TYPE", "v5e-16"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),  # no device is taken, so several plans may be made at a time
    ):
        os.environ.setdefault(variable, value)
    try:
        import libtpu  # noqa: F401  # looked for first, since JAX's own error names no package
    except ImportError:
        raise InputError(
            "plan: compiling for a TPU needs libtpu, which is not installed. Install it with: pip install "
            "'jaxrl-llm[tpu]' (Linux on x86-64, Python 3.12 or later; no TPU is needed)."
        ) from None
    from jax.experimental import topologies

    options: dict[str, Any] = {} if slices == 1 else {"num_slices": slices}
    if kind == "v4":
        options["chip_config_name"] = "megacore"  # JAX sees the two cores of a chip as one device
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=name, **options)
    except Exception as error:  # whatever libtpu raises, it says which shapes there are
        raise InputError(
            f"--topology {name}: libtpu does not know it: {str(error).splitlines()[0][:300]}"
        ) from None
    return Topology(name, CHIPS[kind], slices, tuple(found.devices))


def peak_time(chip: Chip, flops: float, hbm: float, ici: float, dcn: float) -> dict[str, float]:
    """Seconds that each resource of a chip is busy at its best, by name."""
    return {
        "compute": flops / chip.flops,
        "hbm": hbm / chip.hbm_speed,
        "ici": ici / chip.ici_speed,
        "dcn": dcn / chip.dcn_speed,
    }
