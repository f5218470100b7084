"""Laws of layout: splits, padding, packing, order and meshes change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops.numerics import quotient
from jaxrl_llm.runtime import collectives_need_compiling
from jaxrl_llm.testing.layouts import change_fields, pack, rows
from jaxrl_llm.testing.setting import (
    FAST_COMPILE,
    Measured,
    Setting,
    assert_same,
    measure_part,
    measure_prepared,
    merge_parts,
)
from jaxrl_llm.testing.tiny import float64, tiny_policy
from jaxrl_llm.transforms import LossTransform, evaluate, takes_pairs
from jaxrl_llm.transforms.dataflow import require
from jaxrl_llm.types import Mean, PolicyOutput, TokenBatch

__all__ = [
    "assert_mesh_invariant",
    "assert_order_invariant",
    "assert_packing_invariant",
    "assert_padding_inert",
    "assert_split_invariant",
    "check_mesh",
    "check_order",
    "check_packing",
    "check_padding",
    "check_split",
    "check_trees",
]

Array = jax.Array


def assert_split_invariant(
    objective: LossTransform, batch: TokenBatch | None = None, splits: Sequence[Sequence[int]] | None = None
) -> None:
    """Any split of the rows into micro-batches gives the same loss, gradient and metrics.

    Args:
      splits: rows of each part; they must add up to the rows B of the batch. Default: (1, B - 1) and parts of two;
        pairs stay together.
    """
    with float64():
        setting = Setting(objective, batch)
        check_split(setting, splits)


def check_split(at: Setting, splits: Sequence[Sequence[int]] | None = None) -> None:
    size = at.batch.shape[0]
    if splits is None:
        first = 2 if takes_pairs(at.objective) else 1
        splits = (
            ((first, size - first), (2,) * (size // 2) + (1,) * (size % 2)) if size > first else ((size,),)
        )

    def one(params: Array, part: TokenBatch, count: Array) -> tuple[Array, Array, dict[str, Mean]]:
        return measure_part(at.objective, params, part, count)

    run = jax.jit(one, compiler_options=FAST_COMPILE) if at.compiled else one
    for split in splits:
        edges = np.cumsum([0, *split])
        if edges[-1] != at.batch.shape[0]:
            raise ValueError(
                f"split {tuple(split)} does not add up to the {at.batch.shape[0]} rows of the batch."
            )
        parts = [rows(at.prepared, int(a), int(b)) for a, b in zip(edges, edges[1:], strict=False)]
        count = jnp.sum(require("split", at.prepared, "count"))
        assert_same(f"split {tuple(split)}", at, merge_parts([run(at.params, part, count) for part in parts]))


def assert_padding_inert(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """NaN outside the mask, in the batch and in the forward pass, changes nothing; gradients there are 0."""
    with float64():
        check_padding(Setting(objective, batch))


def check_padding(at: Setting) -> None:
    batch, objective = at.batch, at.objective

    def spoil(x: Array) -> Array:
        where = batch.mask.reshape(batch.shape + (1,) * (x.ndim - 2))
        return jnp.where(where, x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x

    # The temperature of a token is positive by contract, masked or not.
    dirty = change_fields(batch, spoil).replace(temperature=batch.temperature)
    dirty, state = objective.prepare(dirty, objective.init())

    def value(output: PolicyOutput) -> tuple[Array, dict[str, Any]]:
        result = evaluate(objective, output, dirty, state)
        return quotient(result.loss_sum, result.denominator), result.metrics

    output, pull = jax.vjp(lambda p: tiny_policy(p, batch), at.params)
    (loss, metrics), gradient = jax.value_and_grad(value, has_aux=True)(jax.tree.map(spoil, output))
    outside = np.asarray(jnp.where(batch.mask, 0.0, gradient.logprob))
    if not np.all(outside == 0):
        raise AssertionError(f"padding: masked log-probs of {objective!r} have the gradient {outside}.")
    assert_same(
        "padding", at, (loss, pull(gradient)[0], {name: mean.value for name, mean in metrics.items()})
    )


def assert_packing_invariant(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """Padded rows, packed rows, and rows that share the prompt of a group, give the same loss, gradient and metrics."""
    with float64():
        setting = Setting(objective, batch)
        check_packing(setting)
        check_trees(setting)


def check_packing(at: Setting) -> None:
    assert_same("packing", at, at.measure(pack(at.batch), prepare=True))


def check_trees(at: Setting) -> None:
    assert_same("packing with shared prompts", at, at.measure(pack(at.batch, trees=True), prepare=True))


def assert_order_invariant(objective: LossTransform, batch: TokenBatch | None = None) -> None:
    """The trajectories, or pairs, in reverse give the same loss, gradient and metrics."""
    with float64():
        check_order(Setting(objective, batch))


def check_order(at: Setting) -> None:
    if takes_pairs(at.objective):
        order = np.arange(at.batch.shape[0]).reshape(-1, 2)[::-1].reshape(-1)
    else:
        of = np.asarray(at.batch.trajectory)[:, 0]
        seen = list(dict.fromkeys(of.tolist()))
        order = np.argsort([-seen.index(one) for one in of.tolist()], kind="stable")
    prepared, _ = at.objective.prepare(change_fields(at.batch, lambda x: x[order]), at.objective.init())
    assert_same("order of the rows", at, measure_prepared(at.objective, at.params, prepared))


def assert_mesh_invariant(
    objective: LossTransform, batch: TokenBatch | None = None, meshes: Sequence[tuple[int, int]] | None = None
) -> None:
    """One device and any mesh give the same loss, gradient and metrics; rows are sharded over both axes.

    Args:
      meshes: shapes (data, fsdp); default: (devices, 1) and (2, devices / 2). Their sizes must divide the rows of
        the batch.

    Raises:
      ValueError: there is only one device (set jax_num_cpu_devices before JAX starts).
    """
    with float64():
        check_mesh(Setting(objective, batch), meshes)


def check_mesh(at: Setting, meshes: Sequence[tuple[int, int]] | None = None) -> None:
    devices = jax.devices()
    if len(devices) < 2:
        raise ValueError(
            "assert_mesh_invariant needs several devices: set jax_num_cpu_devices=8 before JAX starts."
        )

    def run(params: Array, batch: TokenBatch) -> Measured:
        prepared, _ = at.objective.prepare(batch, at.objective.init())
        return measure_prepared(at.objective, params, prepared)

    compiled = jax.jit(run, compiler_options=FAST_COMPILE)
    collectives_need_compiling(devices)
    for shape in meshes or ((len(devices), 1), (2, len(devices) // 2)):
        mesh = jax.sharding.Mesh(np.asarray(devices[: shape[0] * shape[1]]).reshape(shape), ("data", "fsdp"))
        by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        sharded = jax.tree.map(
            lambda x, s=(by_rows, whole): jax.device_put(x, s[0] if jnp.ndim(x) >= 2 else s[1]), at.batch
        )
        assert_same(f"mesh {shape}", at, compiled(jax.device_put(at.params, whole), sharded))
