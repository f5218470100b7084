"""Parameters on their way to a worker: bytes with a digest of every leaf, so that damage is named and not served."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl_llm.fleet.messages import Package
from jaxrl_llm.snapshots.digest import fingerprint_of, leaf_records, named_leaves
from jaxrl_llm.snapshots.leaves import nest, stored_dtype

__all__ = ["DamagedWeightsError", "check", "pack", "unpack"]


class DamagedWeightsError(ValueError):
    """Weights are not what was sent: says which leaf, and in what respect."""


def pack(params: Any, version: int) -> Package:
    """The parameters as bytes of their own: the learner may change or donate its arrays afterwards.

    Digests are those of the learner's arrays, taken where they are, so that they cover the copy, too.

    Raises:
      ValueError: the tree is not nested dicts of arrays.
    """
    leaves = named_leaves(params)
    records = leaf_records(leaves)
    rebuilt: Any = jax.tree.structure(nest(leaves, ""))
    if rebuilt != jax.tree.structure(params):
        raise ValueError("fleet: parameters must be nested dicts of arrays.")
    copies = {name: np.array(leaf).reshape(-1).view(np.uint8) for name, leaf in leaves.items()}
    return Package(version, fingerprint_of(records), records, copies)


def check(package: Package) -> None:
    """Raises DamagedWeightsError unless every leaf is there, whole, and has the bits that were sent."""
    if fingerprint_of(package.records) != package.fingerprint:
        raise DamagedWeightsError(
            f"the list of leaves of version {package.version} is not the one that was sent"
        )
    missing = sorted(package.records.keys() - package.leaves.keys())
    if missing:
        raise DamagedWeightsError(
            f"{len(missing)} of {len(package.records)} leaves are missing: {missing[0]}"
        )
    arrays = {}
    for name, record in package.records.items():
        raw, dtype = package.leaves[name], stored_dtype(record)
        size = int(np.prod(record["shape"], dtype=np.int64)) * dtype.itemsize
        if raw.size != size:
            raise DamagedWeightsError(f"{name} is truncated: {raw.size} of {size} bytes")
        arrays[name] = raw.view(dtype).reshape(record["shape"])
    found = leaf_records(arrays)
    wrong = [name for name, record in package.records.items() if found[name]["digest"] != record["digest"]]
    if wrong:
        raise DamagedWeightsError(
            f"the digest of {len(wrong)} of {len(arrays)} leaves is not the one that was sent: {', '.join(wrong[:3])}"
        )


def unpack(package: Package) -> Any:
    """The parameters, on the default device. `check` the package first: this does not."""
    leaves = {
        name: jax.numpy.array(package.leaves[name].view(stored_dtype(record)).reshape(record["shape"]))
        for name, record in package.records.items()
    }
    return nest(leaves, "")
