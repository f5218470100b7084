"""One leaf on its way to disk and back: what is stored, what is asked for, what is handed out.

A *record* is the entry of a leaf in the manifest: dtype, shape, digest, and for a typed PRNG key its
implementation (`key`); the key is stored as its key data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_llm.parallel.host import place
from jaxrl_llm.snapshots.digest import dtype_of, is_key

__all__ = [
    "as_key",
    "castable",
    "finish",
    "nest",
    "restore_target",
    "storable",
    "stored_bytes",
    "stored_dtype",
]


def storable(leaf: Any) -> Any:
    """The array that stands for a leaf on disk."""
    if is_key(leaf):
        return jax.random.key_data(leaf)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def stored_bytes(leaf: Any) -> int:
    """Bytes that a leaf takes on disk."""
    leaf = storable(leaf)
    return int(leaf.size) * leaf.dtype.itemsize


def stored_dtype(record: Mapping[str, Any]) -> Any:
    """Stored dtype of a record; typed keys are stored as their key data."""
    return np.dtype(np.uint32) if "key" in record else jax.numpy.dtype(record["dtype"])


def castable(record: Mapping[str, Any], leaf: Any) -> bool:
    """True when the stored leaf may become the dtype of `leaf`: the same kind of number, or the same key."""
    if "key" in record or is_key(leaf):
        return "key" in record and is_key(leaf) and str(dtype_of(leaf)) == record["dtype"]
    saved, here = stored_dtype(record), np.dtype(dtype_of(leaf))
    if saved == here:
        return True
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        return np.can_cast(saved, here, "same_kind")  # Python and NumPy numbers have no fixed width
    return all(jax.numpy.issubdtype(dtype, jax.numpy.floating) for dtype in (saved, here))


def restore_target(record: Mapping[str, Any], leaf: Any) -> Any:
    """What Orbax is asked for: the stored shape and dtype, where `leaf` lives."""
    shape = tuple(record["shape"])
    if "key" in record:
        shape += jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=record["key"]))).shape
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding = leaf.sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return jax.ShapeDtypeStruct(shape, stored_dtype(record), sharding=sharding)
    return np.empty(shape, stored_dtype(record))


def as_key(record: Mapping[str, Any], value: Any) -> Any:
    """Key data back to a typed key, anything else as it is."""
    return jax.random.wrap_key_data(value, impl=record["key"]) if "key" in record else value


def finish(value: Any, leaf: Any) -> Any:
    """A verified leaf with the dtype and the host type of `leaf`."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        if is_key(leaf):
            return value
        if not isinstance(value, jax.Array):
            return place(value.astype(leaf.dtype), leaf.sharding)
        return value if value.dtype == leaf.dtype else value.astype(leaf.dtype)
    if isinstance(leaf, np.ndarray):
        return np.asarray(value, leaf.dtype)
    return type(leaf)(np.asarray(value)[()])


def nest(leaves: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Nested dicts from leaves by path; `prefix` is taken off the paths."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = (
            part.replace("%2F", "/").replace("%25", "%") for part in name.removeprefix(prefix).split("/")
        )
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree
