"""Rows of a batch: padding with inert ones, splitting into micro-batches and minibatches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.parallel.host import place, read
from jaxrl_llm.parallel.mesh import batch_shards
from jaxrl_llm.parallel.rules import batch_shardings, rows_spec
from jaxrl_llm.types import TokenBatch

__all__ = [
    "HEAD_CHUNK",
    "check_micro_batch_rows",
    "head_chunk",
    "micro_batches",
    "minibatches",
    "pad_rows",
    "place_batch",
]

Array = jax.Array

HEAD_CHUNK = 1024  # positions of a device whose logits are in memory at once


def head_chunk(mesh: Mesh | None) -> int:
    """Positions of a batch whose logits are in memory at once: HEAD_CHUNK of each device that has tokens of its own."""
    return HEAD_CHUNK if mesh is None else HEAD_CHUNK * batch_shards(mesh) * mesh.shape["context"]


def _is_rows(x: Array) -> bool:
    """Per-token arrays of a batch are at least [B, T]; everything else is a scalar."""
    return x.ndim >= 2


def pad_rows(batch: TokenBatch, multiple: int) -> TokenBatch:
    """Adds rows until B is a multiple of `multiple`.

    An added row is all padding: segment 0, mask, norm and count 0. It changes no sum, no metric and no gradient.
    """
    extra = -batch.shape[0] % multiple
    if not extra:
        return batch

    def pad(x):
        return jnp.pad(x, [(0, extra), *[(0, 0)] * (x.ndim - 1)]) if _is_rows(x) else x

    padded = jax.tree.map(pad, batch)
    temperature = jnp.pad(batch.temperature, [(0, extra), (0, 0)], constant_values=1.0)
    padded = dataclasses.replace(padded, temperature=temperature)  # logits are divided by it
    for name in ("support_ids", "routing_ids"):  # -1, and not token or expert 0
        ids = getattr(batch, name)
        if ids is not None:
            widths = [(0, extra), *[(0, 0)] * (ids.ndim - 1)]
            padded = dataclasses.replace(padded, **{name: jnp.pad(ids, widths, constant_values=-1)})
    return padded


def micro_batches(
    batch: TokenBatch, rows: int, mesh: Mesh | None = None
) -> tuple[list[Array], Callable[[list[Array]], TokenBatch]]:
    """(per-token arrays, each [K, rows, T, …], a function that makes a batch of one slice of them).

    B must be a multiple of `rows`. Micro-batch k holds the consecutive rows k·rows … (k+1)·rows - 1, so pairs
    of rows stay together when `rows` is even. On a mesh the rows of each micro-batch are split over it.
    """
    leaves, tree = jax.tree.flatten(batch)
    split = [x.reshape(-1, rows, *x.shape[1:]) for x in leaves if _is_rows(x)]
    if mesh is not None:
        shardings = [NamedSharding(mesh, PartitionSpec(None, *rows_spec(x.ndim - 1))) for x in split]
        split = jax.lax.with_sharding_constraint(split, shardings)

    def rebuild(slices: list[Array]) -> TokenBatch:
        remaining = iter(slices)
        return jax.tree.unflatten(tree, [next(remaining) if _is_rows(x) else x for x in leaves])

    return split, rebuild


def check_micro_batch_rows(rows: int | None, shards: int) -> None:
    """Raises ValueError unless the rows of a micro-batch divide evenly over the mesh."""
    if rows is not None and (rows < 1 or rows % shards):
        raise ValueError(
            f"micro_batch_rows={rows} must be a positive multiple of {shards}, the number of shards that the mesh "
            f"splits rows into (data x fsdp x expert)."
        )


def place_batch(batch: TokenBatch, mesh: Mesh | None) -> TokenBatch:
    """The batch on the mesh, rows split over its batch axes (inert rows are added where they do not divide)."""
    if mesh is None:
        return batch
    batch = pad_rows(batch, batch_shards(mesh))
    return place(batch, batch_shardings(batch, mesh))


def minibatches(batch: TokenBatch, number: int, key: Array | None = None) -> list[TokenBatch]:
    """Splits a prepared batch into `number` batches for as many optimiser updates.

    Args:
      batch: prepared; norm and count of the minibatches stay those that `prepare` wrote for the whole batch.
      number: at most B. The rows that train something are dealt out evenly (numbers differ by one at most),
        each of them once; inert rows fill the minibatches up to one size, so that one program is compiled.
      key: shuffles the rows first; consumed. None keeps their order.

    Returns:
      The minibatches that train something: fewer than `number` when there are fewer such rows, and the whole
      batch when there is none.

    Raises:
      ValueError: more minibatches than rows.
    """
    B = batch.shape[0]
    if not 1 <= number <= B:
        raise ValueError(
            f"minibatches: {number} minibatches of a batch of {B} rows; choose between 1 and {B}."
        )
    if number == 1:
        return [batch]
    trains = np.flatnonzero(read(jnp.any(batch.mask, axis=1)))
    if not trains.size:
        return [batch]
    if key is not None:
        trains = read(jax.random.permutation(key, jnp.asarray(trains)))
    size = -(-B // number)
    batch = pad_rows(batch, B + 1)  # at least one inert row to fill up with
    inert = batch.shape[0] - 1
    parts = [part for part in np.array_split(trains, number) if part.size]
    chosen = [jnp.asarray(np.pad(part, (0, size - part.size), constant_values=inert)) for part in parts]
    return [jax.tree.map(lambda x, at=at: x[at] if _is_rows(x) else x, batch) for at in chosen]
