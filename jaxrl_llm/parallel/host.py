"""Arrays between the host program and the devices, also where a device belongs to another process.

Every process of a run is the same host program with the same values. What it gives to the devices is laid out from those
values without any communication; what it reads from them, it reads whole.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["everywhere", "place", "read"]


def place(tree: Any, where: Any) -> Any:
    """The tree on the devices.

    Args:
      tree: arrays of the host or of this process, the same values in every process; or arrays that lie on all the devices
        of `where` already.
      where: a device, a sharding, a tree of shardings like `tree`, or None: where JAX puts it, in this process.
    """
    shardings = jax.tree.leaves(where)
    if all(not isinstance(s, jax.sharding.Sharding) or s.is_fully_addressable for s in shardings):
        return jax.device_put(tree, where)
    if len(shardings) == 1 and isinstance(where, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _spread(x, where), tree)
    return jax.tree.map(_spread, tree, where)


def _spread(x: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """One array over devices of several processes; `jax.device_put` would compare it between them first."""
    if isinstance(x, jax.Array):
        if not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = _spread(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    values = np.asarray(x)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def read(tree: Any) -> Any:
    """The tree as NumPy arrays, whole, in every process. Every process must call it with the same arrays, in the same order."""

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


def everywhere(tree: Any) -> NamedSharding | None:
    """A copy on each device of the mesh that a tree of arrays is spread over; None when it is not spread."""
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.num_devices > 1:
            return NamedSharding(x.sharding.mesh, PartitionSpec())
    return None
