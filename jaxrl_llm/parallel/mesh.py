"""Device meshes with the five axes of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_llm.runtime import collectives_need_compiling

__all__ = ["AXES", "BATCH_AXES", "batch_shards", "data_devices", "make_mesh"]

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

    Args:
      data: copies of the parameters, each with rows of its own.
      fsdp: shards of the parameters that also have rows of their own.
      tensor: shards of the parameters that work on the same rows.
      devices: default: the first data × fsdp × expert × context × tensor of `jax.devices()`.
      expert: shards of the experts of a mixture, which have rows of their own; of all other parameters, copies.
      context: shards of the tokens of each row; of the parameters, shards as those of fsdp.

    Raises:
      ValueError: a size is not positive, or there are not that many devices.
    """
    sizes = (data, fsdp, expert, context, tensor)
    if min(sizes) < 1:
        raise ValueError(
            f"make_mesh: data, fsdp, expert, context and tensor must be at least 1, got {sizes}."
        )
    needed = math.prod(sizes)
    available = list(jax.devices() if devices is None else devices)
    if needed > len(available) or (devices is not None and needed != len(available)):
        raise ValueError(
            f"make_mesh: data={data} x fsdp={fsdp} x expert={expert} x context={context} x tensor={tensor} takes {needed} "
            f"devices, {len(available)} are given. Choose sizes whose product is {len(available)}."
        )
    collectives_need_compiling(available[:needed])
    # Auto: the compiler places intermediate values. (jax.make_mesh would default to Explicit axes.)
    types = (AxisType.Auto,) * len(AXES)
    if devices is None and needed == len(available):
        return jax.make_mesh(
            sizes, AXES, axis_types=types
        )  # neighbours in the mesh are neighbours in the network
    return Mesh(np.asarray(available[:needed], dtype=object).reshape(sizes), AXES, axis_types=types)


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
