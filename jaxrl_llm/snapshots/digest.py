"""Digests of parameter trees that do not depend on how the tree is sharded.

A digest is computed where the array lives, by one fused pass over it: nothing is gathered and nothing
is copied to the host, so it can be taken of every snapshot, and of the weights that a sampler serves,
at the price of reading them once. Word i (32 bits) of an array is mixed with its index by a bijection
of the word; the mixed words are added modulo 2^32 in two lanes. Modular addition is associative, so
every sharding, mesh and device gives the same digest, and because the mixing is a bijection a change
of a single word (one flipped bit, for example) always changes lane one. It guards against damage, not
against an adversary.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.parallel.offload import fetched

__all__ = ["fingerprint", "fingerprint_of", "leaf_records", "named_leaves"]

_MASK = 0xFFFFFFFF


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, for example `opt_state/0/mu/layers/wq`.

    "/" and "%" inside a key are written as %2F and %25, so that a path can be split again.

    Raises:
      ValueError: two leaves have the same path (a dict with the keys 1 and "1").
    """
    leaves: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = "/".join(_escape(_key(part)) for part in path)
        if name in leaves:
            raise ValueError(
                f"Two leaves of the tree have the path {name!r}, so they could not be told apart. "
                "Keys of one dict must stay different when written as text; rename one."
            )
        leaves[name] = leaf
    return leaves


def leaf_records(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`{path: {"dtype", "shape", "digest"}}` of named leaves: arrays, NumPy arrays, scalars, PRNG keys.

    The digest is 16 hexadecimal digits, equal for equal bits whatever the sharding.
    """
    pending: dict[str, tuple[Any, Any]] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, leaf in leaves.items():
        records[name] = {"dtype": str(dtype_of(leaf)), "shape": list(np.shape(leaf))}
        if is_key(leaf):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array):
            pending[name] = _device_lanes(leaf, spread=len(leaf.sharding.device_set) > 1)
        else:
            pending[name] = _host_lanes(np.asarray(leaf))
    for name, (one, two) in jax.device_get(pending).items():
        records[name]["digest"] = f"{int(one):08x}{int(two):08x}"
    return records


def fingerprint(params: Any) -> str:
    """Digest of a whole tree: 32 hexadecimal digits over paths, dtypes, shapes and values.

    Two trees have the same fingerprint when they hold the same bits under the same names, on whatever
    mesh. This is what a sampler reports about the weights that it really serves.
    """
    return fingerprint_of(leaf_records(named_leaves(params)))


def fingerprint_of(records: Mapping[str, Mapping[str, Any]]) -> str:
    """The fingerprint of a tree whose leaves have these records."""
    total = hashlib.sha256()
    for name, record in sorted(records.items()):
        total.update(f"{name} {record['dtype']} {record['shape']} {record['digest']}\n".encode())
    return total.hexdigest()[:32]


def is_key(leaf: Any) -> bool:
    """True for a typed PRNG key array, concrete or abstract."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


def dtype_of(leaf: Any) -> Any:
    """dtype of an array, an abstract array or a Python scalar."""
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _key(part: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(part, attribute):
            return str(getattr(part, attribute))
    return str(part)


def _escape(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")


def _mix(words, index):
    """One pass over u32 words and their u32 positions: two u32 arrays; the first a bijection of the word."""
    x = words ^ (index * np.uint32(0x9E3779B1) + np.uint32(0x85EBCA77))
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    x = x ^ (x >> np.uint32(16))
    y = (x + index * np.uint32(0xC2B2AE35)) * np.uint32(0x27D4EB2F)
    return x, y ^ (y >> np.uint32(15))


_PACKED_INTEGERS = ("int2", "uint2", "int4", "uint4")  # widened first: their bits are not addressable
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}  # 8 bytes are two words


@functools.partial(jax.jit, static_argnames="spread")
def _device_lanes(array, *, spread: bool):
    array = fetched(array)
    if array.dtype == jnp.bool_:
        words = array.astype(jnp.uint32)
    elif array.dtype.name in _PACKED_INTEGERS:
        words = jax.lax.bitcast_convert_type(array.astype(jnp.int32), jnp.uint32)
    elif jnp.issubdtype(array.dtype, jnp.complexfloating):
        parts = (_device_bits(array.real), _device_bits(array.imag))
        words = jnp.stack(parts, axis=-1) if parts[0].ndim == array.ndim else jnp.stack(parts, axis=-2)
    else:
        words = _device_bits(array)
    # The row-major position of each word, built without a reshape so that a sharded array stays sharded.
    index = jnp.zeros(words.shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(words.ndim)):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * np.uint32(stride & _MASK)
        stride *= words.shape[axis]
    one, two = _mix(words, index)
    if spread:
        return jnp.sum(one, dtype=jnp.uint32), jnp.sum(two, dtype=jnp.uint32)
    # One reduction of a pair of operands: XLA:CPU vectorises it and runs it 8 times as fast as two sums,
    # but the partitioner would gather its operands, so it serves arrays on one device only.
    zero = jnp.uint32(0)
    return jax.lax.reduce((one, two), (zero, zero), _add_lanes, tuple(range(words.ndim)))


def _add_lanes(a, b):
    return a[0] + b[0], a[1] + b[1]


def _device_bits(array):
    return jax.lax.bitcast_convert_type(array, _UNSIGNED[array.dtype.itemsize]).astype(jnp.uint32)


def _host_lanes(array: np.ndarray) -> tuple[np.uint32, np.uint32]:
    """The same two lanes in NumPy, for leaves that live on the host (little-endian)."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.name in _PACKED_INTEGERS:
        flat = flat.astype(np.int32)
    size = flat.dtype.itemsize
    words = flat.view(_UNSIGNED[4 if size > 8 else size]).astype(np.uint32)
    one, two = _mix(words, np.arange(words.size, dtype=np.uint32))
    return np.sum(one, dtype=np.uint32), np.sum(two, dtype=np.uint32)
