"""Device meshes with the five axes of the package.

The same functions lay out the devices of a run and those of a topology that `jaxrl plan` compiles for.
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from jaxrl_llm.runtime import collectives_need_compiling

__all__ = ["AXES", "BATCH_AXES", "batch_shards", "data_devices", "learner_and_sampler", "make_mesh"]

AXES = ("data", "fsdp", "expert", "context", "tensor")
# Rows are split over these, and the tokens of a row over context; parameters over fsdp, context and tensor, those of
# experts over expert too.
BATCH_AXES = ("data", "expert", "fsdp")


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
    *,
    expert: int = 1,
    context: int = 1,
) -> Mesh:
    """A mesh of `data` × `fsdp` × `expert` × `context` × `tensor` devices.

    Neighbours in the mesh are neighbours in the network. Of several TPU slices each holds the same part of the data axis, so
    that no other axis crosses the slower network between them. Several processes that are not slices (hosts of one slice, or
    of CPUs) follow each other along data first.

    Args:
      data: copies of the parameters, each with rows of its own.
      fsdp: shards of the parameters that also have rows of their own.
      tensor: shards of the parameters that work on the same rows.
      devices: default: the first data × fsdp × expert × context × tensor of `jax.devices()`, slice by slice.
      expert: shards of the experts of a mixture, which have rows of their own; of all other parameters, copies.
      context: shards of the tokens of each row; of the parameters, shards as those of fsdp.

    Raises:
      ValueError: a size is not positive, there are not that many devices, or an axis other than data would cross slices.
    """
    sizes = dict(zip(AXES, (data, fsdp, expert, context, tensor), strict=True))
    shown = " x ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    if min(sizes.values()) < 1:
        raise ValueError(f"mesh: all sizes must be at least 1, got {shown}.")
    needed = math.prod(sizes.values())
    available = [device for one in _slices(jax.devices() if devices is None else devices) for device in one]
    if needed > len(available) or (devices is not None and needed != len(available)):
        raise ValueError(
            f"mesh: {shown} takes {needed} devices, {len(available)} are given. Choose sizes whose product is "
            f"{len(available)}, for example mesh.fsdp={len(available)} and 1 for the others."
        )
    taken = _slices(available[:needed])
    collectives_need_compiling(available[:needed])
    if len({len(one) for one in taken}) > 1:
        raise ValueError(
            f"mesh: {shown} takes {' and '.join(str(len(one)) for one in taken)} devices of {len(taken)} slices. Choose sizes "
            f"that take as many of each, for example {len(taken[0])} devices of one."
        )
    if data % len(taken):
        raise ValueError(
            f"mesh: {shown}: {len(taken)} slices must divide mesh.data, the axis that may cross between slices; the others move "
            f"too much for the network between them. For example mesh.data={len(taken)}, and the others so that their product "
            f"is {needed // len(taken)}."
        )
    inner = sizes | {"data": data // len(taken)}
    grid = np.concatenate([_grid(one, inner) for one in taken], axis=0)
    # Auto: the compiler places intermediate values.
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def learner_and_sampler(
    devices: Sequence[jax.Device], learner: int, sampler: int
) -> tuple[list[jax.Device], list[jax.Device]]:
    """(devices that learn, devices that only sample): those of a sampler on slices of their own where these suffice.

    Args:
      devices: at least `learner` + `sampler`.
    """
    slices = _slices(devices)
    ordered = [device for one in slices for device in one]
    ends = np.cumsum([len(one) for one in slices])
    after = next((int(end) for end in ends if end >= learner), learner)  # where the learner's last slice ends
    begin = after if len(ordered) - after >= sampler else learner
    return ordered[:learner], ordered[begin : begin + sampler]


def _slices(devices: Sequence[jax.Device]) -> list[list[jax.Device]]:
    """The devices of each slice; devices that have none are one slice."""
    found: dict[int, list[jax.Device]] = {}
    for device in devices:
        found.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return [found[index] for index in sorted(found)]


def _grid(devices: Sequence[jax.Device], sizes: Mapping[str, int]) -> np.ndarray:
    """Devices of one slice as an array of the axes."""
    shape = tuple(sizes.values())
    if len(devices) > 1 and _is_cuboid(devices):
        with _quiet():
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return grid.reshape(shape)


def _is_cuboid(devices: Sequence[jax.Device]) -> bool:
    """Whether these are all devices between two corners of a torus of TPUs, which the layout by neighbours needs."""
    if devices[0].platform != "tpu":
        return False
    places = np.array([(*device.coords, device.core_on_chip) for device in devices])
    return len(devices) == np.prod(places.max(axis=0) - places.min(axis=0) + 1)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings of `mesh_utils` on how it has split physical axes."""
    logger = logging.getLogger(mesh_utils.__name__)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def data_devices(mesh: Mesh) -> list[jax.Device]:
    """The first device of each copy of the parameters, in the order of the data axis: where sampler replicas live.

    Raises:
      ValueError: a copy is spread over several devices.
    """
    copies = np.moveaxis(mesh.devices, list(mesh.axis_names).index("data"), 0).reshape(mesh.shape["data"], -1)
    if copies.shape[1] > 1:
        raise ValueError(
            f"data_devices: a copy of the parameters takes {copies.shape[1]} devices of this mesh {dict(mesh.shape)}; "
            "replicas hold theirs on one device each, so use a mesh with a data axis only."
        )
    return [devices[0] for devices in copies]


def batch_shards(mesh: Mesh | None) -> int:
    """Into how many shards the rows of a batch are split."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in BATCH_AXES)
