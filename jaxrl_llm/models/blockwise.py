"""Attention of long rows: blocks of keys one after the other, so that no array has T² entries.

For each block of queries a softmax under way (highest score, sum, weighted values) meets the keys block by block; the
backward pass computes the scores of a block again from the log-sum-exp that was kept. Blocks that no token of the other
block sees (later ones, other sequences) are skipped. Which token sees which is told by three numbers a token (`Sight`).

**Context parallelism.** Where the tokens of a row are split over devices, queries stay where they are; keys and values
of the whole row are gathered in every layer, again in the backward pass, and their gradients go back as sums over the
devices, in the dtype of the keys. The devices have consecutive tokens, and the later a token, the more it sees: the
last of C devices does 2 - 1/C times the mean work, and the others wait for it. Attention is then up to twice as slow as
if all did the same; everything else in a layer is split evenly.

Local names: B rows, T tokens, N key/value heads, G query heads of each, Q = G times the queries of a block, S keys of a
block, K head dim.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.parallel.rules import Layout

__all__ = ["Sight", "blockwise_attention", "gathered", "goes_in_blocks", "seen", "sight_of"]

Array = jax.Array

BLOCK = 256  # tokens; f32 scores of a block and 32 heads are 8 MB
_LONGEST_WHOLE = 2048  # tokens of a row whose scores are made at once


def goes_in_blocks(tokens: int, layout: Layout | None = None) -> bool:
    """Whether rows of so many tokens take this path: long ones, and all whose tokens are split over devices.

    On TPUs kernels (`models.fused`) take the place of both paths.
    """
    return tokens > _LONGEST_WHOLE or (layout is not None and layout.context > 1)


class Sight(NamedTuple):
    """Which tokens of a row see each other, see `seen`."""

    segments: Array  # i32[B, T], of `TokenBatch`
    asks: Array  # i32[B, T], the family whose shared prefix the token sees; 0 = none
    opens: Array  # i32[B, T], the family whose shared prefix the token is part of; -1 = none


def sight_of(segments: Array) -> Sight:
    """From `TokenBatch.segments` i32[B, T]."""
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    columns = jnp.arange(1, segments.shape[1] + 1)
    # A family is named by the column, counted from 1, where it was opened; 0 = in no family.
    opens = (segments < 0) & (segments != before)
    opened = jax.lax.cummax(jnp.where(opens, columns, 0), axis=1)
    ended = jax.lax.cummax(jnp.where(segments == 0, columns, 0), axis=1)
    family = jnp.where(opened > ended, opened, 0).astype(jnp.int32)
    return Sight(segments, jnp.where(segments > 0, family, 0), jnp.where(segments < 0, family, -1))


def seen(queries: Sight, keys: Sight, query_columns: Array, key_columns: Array) -> Array:
    """bool[B, Tq, Tk]: whether each query sees each key.

    A token sees itself and the earlier tokens of its segment; one in a segment > 0 also the shared prefix of its family.

    Args:
      query_columns, key_columns: i32[Tq], i32[Tk], the places of the tokens in their rows.
    """
    same = queries.segments[:, :, None] == keys.segments[:, None, :]
    prefix = queries.asks[:, :, None] == keys.opens[:, None, :]
    return (same | prefix) & (key_columns[None, None, :] <= query_columns[None, :, None])


class _Plan(NamedTuple):
    """The static part."""

    block: int  # tokens
    axis: str | None  # mesh axis that the tokens of a row are split over


def blockwise_attention(
    q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, sight: Sight, *, block: int = BLOCK, axis: str | None = None
) -> Array:
    """Grouped-query attention of each token to those that it sees, [B, T, H, K]; scores and softmax f32 (f64 stays f64).

    Differentiable in q, k and v. Query head h reads key/value head h // (H / N).

    Args:
      block: tokens of a block of queries and of a block of keys.
      axis: inside of `jax.shard_map`, the mesh axis that the tokens are split over, in order; T are those of one device.
    """
    return _attention(_Plan(block, axis), q_BTHK, k_BTNK, v_BTNK, sight)


def _cut(x: Array, size: int, fill: int = 0) -> Array:
    """[B, T, ...] -> [blocks, B, size, ...]."""
    extra = -x.shape[1] % size
    if extra:
        x = jnp.pad(x, ((0, 0), (0, extra), *[(0, 0)] * (x.ndim - 2)), constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def _joined(x: Array, tokens: int) -> Array:
    """The inverse of `_cut`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :tokens]


def _by_head(x: Array, heads: int) -> Array:
    """[blocks, B, t, H, K] -> [blocks, B, N, t G, K]: the queries of one key/value head together."""
    n, B, t, H, K = x.shape
    return x.reshape(n, B, t, heads, H // heads, K).swapaxes(2, 3).reshape(n, B, heads, t * H // heads, K)


def _by_token(x: Array, size: int) -> Array:
    """The inverse of `_by_head`."""
    n, B, N, _, K = x.shape
    return x.reshape(n, B, N, size, -1, K).swapaxes(2, 3).reshape(n, B, size, -1, K)


def _sight_blocks(sight: Sight, size: int, first: Array, nothing: int) -> tuple[Sight, Array]:
    """(blocks of the sight, columns i32[blocks, size]); `nothing` is the segment of what fills the last block."""
    segments = _cut(sight.segments, size, nothing)
    columns = first + jnp.arange(segments.shape[0] * size, dtype=jnp.int32).reshape(-1, size)
    return Sight(segments, _cut(sight.asks, size, 0), _cut(sight.opens, size, -1)), columns


# Segments that no token has: what fills a block of queries sees nothing, what fills one of keys is never seen.
_NO_QUERY, _NO_KEY = -(2**31), -(2**31) + 1


class _Blocks(NamedTuple):
    """What both passes go over."""

    queries: Array  # [blocks, B, N, Q, K]
    query_sight: tuple[Sight, Array]
    keys: tuple[Array, Array, tuple[Sight, Array]]  # keys and values [blocks, B, N, S, K]


def _blocks(plan: _Plan, q: Array, k: Array, v: Array, sight: Sight) -> _Blocks:
    # Bound to q, since JAX computes what depends on the batch alone once before the scan over layers: T² booleans.
    q, sight, start = jax.lax.optimization_barrier((q, sight, jnp.int32(0)))
    T, N = q.shape[1], k.shape[2]
    first, row = start, sight
    if plan.axis is not None:
        first = start + jax.lax.axis_index(plan.axis) * T
        k, v, row = (gathered(x, plan.axis) for x in (k, v, sight))
    size, wide = min(plan.block, T), min(plan.block, k.shape[1])
    k, v = (_cut(x, wide).swapaxes(2, 3) for x in (k, v))
    return _Blocks(
        _by_head(_cut(q, size), N),
        _sight_blocks(sight, size, first, _NO_QUERY),
        (k, v, _sight_blocks(row, wide, start, _NO_KEY)),
    )


def gathered(tree: Any, axis: str) -> Any:
    """The arrays [B, T, ...] of whole rows, inside of `jax.shard_map`, from those of the devices of a mesh axis."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True), tree)


def _mask(queries: tuple[Sight, Array], keys: tuple[Sight, Array], group: int) -> Array:
    """bool[B, 1, Q, S]."""
    (query_sight, query_columns), (key_sight, key_columns) = queries, keys
    return jnp.repeat(seen(query_sight, key_sight, query_columns, key_columns), group, axis=1)[:, None]


def _scores(q_BNQK: Array, k_BNSK: Array, wide: Any) -> Array:
    return (
        jnp.einsum("bnqk,bnsk->bnqs", q_BNQK, k_BNSK, preferred_element_type=wide) * q_BNQK.shape[-1] ** -0.5
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: _Plan, q: Array, k: Array, v: Array, sight: Sight) -> Array:
    return _forward(plan, q, k, v, sight)[0]


def _forward(plan, q, k, v, sight):
    T, group = q.shape[1], q.shape[2] // k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, query_sight, keys = _blocks(plan, q, k, v, sight)

    def of_queries(block):
        q_BNQK, where = block

        def meet(softmax, key_block):
            k_BNSK, v_BNSK, there = key_block
            mask = _mask(where, there, group)

            def fold(softmax):
                high, mass, mixed = softmax
                scores = jnp.where(mask, _scores(q_BNQK, k_BNSK, wide), -jnp.inf)
                higher = jnp.maximum(high, jnp.max(scores, axis=-1))
                rescale, weights = jnp.exp(high - higher), jnp.exp(scores - higher[..., None])
                values = jnp.einsum(
                    "bnqs,bnsk->bnqk", weights.astype(v_BNSK.dtype), v_BNSK, preferred_element_type=wide
                )
                mass = mass * rescale + jnp.sum(weights, axis=-1)
                return higher, mass, mixed * rescale[..., None] + values

            return jax.lax.cond(jnp.any(mask), fold, lambda softmax: softmax, softmax), None

        # The lowest number and not -inf: the difference of two of them is 0 and not NaN.
        lowest = jnp.full(q_BNQK.shape[:-1], jnp.finfo(wide).min, wide)
        nothing = (lowest, jnp.zeros_like(lowest), jnp.zeros(q_BNQK.shape, wide))
        (high, mass, mixed), _ = jax.lax.scan(meet, nothing, keys)
        mass = jnp.where(mass > 0, mass, 1.0)  # what fills the last block sees nothing
        return (mixed / mass[..., None]).astype(q.dtype), high + jnp.log(mass)

    out, lse = jax.lax.map(of_queries, (queries, query_sight))
    out = _joined(_by_token(out, query_sight[1].shape[1]), T)
    return out, (q, k, v, sight, out, lse)


def _backward(plan, residuals, d_out):
    q, k, v, sight, out, lse = residuals
    T, N, group = q.shape[1], k.shape[2], q.shape[2] // k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    queries, query_sight, keys = _blocks(plan, q, k, v, sight)
    size = query_sight[1].shape[1]
    d_out, out = (_by_head(_cut(x, size), N) for x in (d_out, out))
    mean = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1)
    given = (jnp.arange(queries.shape[0]), queries, query_sight, d_out, lse, mean)

    def of_keys(d_queries, key_block):
        k_BNSK, v_BNSK, there = key_block

        def meet(carry, block):
            d_queries, d_k, d_v = carry
            index, q_BNQK, where, d_BNQK, lse_BNQ, mean_BNQ = block
            mask = _mask(where, there, group)

            def gradients(_):
                scores = jnp.where(mask, _scores(q_BNQK, k_BNSK, wide), -jnp.inf)
                weights = jnp.exp(scores - lse_BNQ[..., None])
                d_weights = jnp.einsum("bnqk,bnsk->bnqs", d_BNQK, v_BNSK, preferred_element_type=wide)
                d_scores = weights * (d_weights - mean_BNQ[..., None]) * q.shape[-1] ** -0.5
                weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
                return (
                    jnp.einsum("bnqs,bnsk->bnqk", d_scores, k_BNSK, preferred_element_type=wide),
                    jnp.einsum("bnqs,bnqk->bnsk", d_scores, q_BNQK, preferred_element_type=wide),
                    jnp.einsum("bnqs,bnqk->bnsk", weights, d_BNQK, preferred_element_type=wide),
                )

            def none(_):
                return jnp.zeros(q_BNQK.shape, wide), jnp.zeros_like(d_k), jnp.zeros_like(d_v)

            more_q, more_k, more_v = jax.lax.cond(jnp.any(mask), gradients, none, None)
            here = jax.lax.dynamic_index_in_dim(d_queries, index, keepdims=False)
            d_queries = jax.lax.dynamic_update_index_in_dim(d_queries, here + more_q, index, 0)
            return (d_queries, d_k + more_k, d_v + more_v), None

        zeros = jnp.zeros(k_BNSK.shape, wide)
        (d_queries, d_k, d_v), _ = jax.lax.scan(meet, (d_queries, zeros, zeros), given)
        return d_queries, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    d_queries, d_keys = jax.lax.scan(of_keys, jnp.zeros(queries.shape, wide), keys)
    row = T if plan.axis is None else T * jax.lax.psum(1, plan.axis)
    d_k, d_v = (_joined(x.swapaxes(2, 3), row) for x in d_keys)
    if plan.axis is not None:
        d_k, d_v = (jax.lax.psum_scatter(x, plan.axis, scatter_dimension=1, tiled=True) for x in (d_k, d_v))
    d_q = _joined(_by_token(d_queries, size), T).astype(q.dtype)
    return d_q, d_k, d_v, None


_attention.defvjp(_forward, _backward)
