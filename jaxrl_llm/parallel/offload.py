"""Parts of the learner's state that rest in the memory of the host between the programs that read them.

Moments are read once an update and the reference once a batch, so on an accelerator both may lie in (pinned) memory of the
host, sharded as ever, and the memory of the chips is for activations meanwhile. An array knows in which memory it lies, also
while a program is traced. So programs need not be told: they fetch what lies elsewhere, and put back what they return.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, TypeVar, get_args

import jax

__all__ = ["HOST_MEMORY", "Offloadable", "check_offload", "fetched", "host_shardings", "on_host", "put_back"]

Offloadable = Literal["optimizer", "reference"]
Tree = TypeVar("Tree")

HOST_MEMORY = "pinned_host"


def check_offload(offload: Collection[str]) -> frozenset[str]:
    """What rests on the host.

    Raises:
      ValueError: a name that is not one of `Offloadable`.
    """
    allowed = get_args(Offloadable)
    if isinstance(offload, str) or (unknown := sorted(set(offload) - set(allowed))):
        found = offload if isinstance(offload, str) else unknown[0]
        raise ValueError(
            f"offload: {found!r} given; what can rest in host memory is a collection of {' and '.join(map(repr, allowed))}."
        )
    return frozenset(offload)


def host_shardings(arrays: Any, shardings: Any) -> Any:
    """The same shardings in the memory of the host. Scalars, such as the count of steps, stay on the devices.

    Args:
      arrays: arrays or `jax.ShapeDtypeStruct`s.
      shardings: a tree like `arrays`.
    """
    return jax.tree.map(lambda x, s: s.with_memory_kind(HOST_MEMORY) if x.ndim else s, arrays, shardings)


def on_host(x: Any) -> bool:
    """Whether an array, also one of a program that is traced, lies in the memory of the host."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def fetched(tree: Tree) -> Tree:
    """The tree in the memory of the devices; arrays that lie there are handed on. Within a program or outside."""
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x, tree)


def put_back(tree: Tree, like: Any) -> Tree:
    """The tree with each array in the memory in which that of `like` lies."""
    return jax.tree.map(
        lambda x, old: jax.device_put(x, jax.memory.Space.Host) if on_host(old) else x, tree, like
    )
