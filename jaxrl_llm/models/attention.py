"""Attention within the sequences of a row, for the learner, and how a block of keys enters a softmax anywhere.

The sampler visits the keys of a token page after page. In bfloat16 another order of these sums rounds a few numbers of a
layer the other way, and some layers later nearly all of them. So the learner can take the keys in the blocks
and the order of the sampler (`KeyBlocks`): then all that is left to differ is how sums over them come about in
another shape, which on a CPU is the same for blocks of at least 16 tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.models.blockwise import (
    Sight,
    blockwise_attention,
    goes_in_blocks,
    seen,
    sight_of,
)
from jaxrl_llm.models.config import KeyBlocks
from jaxrl_llm.parallel.rules import Layout

__all__ = [
    "fold_keys",
    "is_fused",
    "own_key",
    "scaled_queries",
    "segment_attention",
    "sight_for",
    "split_attention",
    "sum_of_weights",
    "visible_tokens",
]

Array = jax.Array


def visible_tokens(segments: Array) -> Array:
    """bool[B, T, T]: whether the token at [b, t] attends to the token at [b, s], by `TokenBatch.segments`.

    A token sees itself and the earlier tokens of its own segment; one in a segment > 0 also sees the shared
    prefix (segment < 0) that opened its family: the nearest one before it, with no padding in between.
    """
    sight, columns = sight_of(segments), jnp.arange(segments.shape[1])
    return seen(sight, sight, columns, columns)


def is_fused(layout: Layout | None = None) -> bool:
    """Whether kernels compute the attention of these activations (`models.fused`): on TPUs.

    Args:
      layout: of the activations; its mesh may be of chips that are not there. None: on the default device.
    """
    return (jax.default_backend() if layout is None else layout.heads.mesh.devices.flat[0].platform) == "tpu"


def sight_for(
    segments: Array, blocks: KeyBlocks | None = None, layout: Layout | None = None
) -> Array | Sight:
    """Who sees whom in rows of these segments, in the form that `segment_attention` takes it from.

    That is `visible_tokens`, or, of rows whose T² scores are not to be made at once (`goes_in_blocks`; where `is_fused`,
    all), a `Sight`. An order of keys that was asked for (`blocks`) needs all scores.
    """
    if blocks is None and (goes_in_blocks(segments.shape[1], layout) or is_fused(layout)):
        return sight_of(segments)
    return visible_tokens(segments)


def segment_attention(
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    visible: Array | Sight,
    blocks: KeyBlocks | None = None,
    positions_BT: Array | None = None,
    layout: Layout | None = None,
) -> Array:
    """Grouped-query attention of each token to those that it sees; [B, T, H, K].

    Scores and the softmax are f32 (f64 stays f64), as in the sampler. Query head h reads key/value head
    h // (H / N). Padding (segment 0) attends to padding only, or to nothing, and its result is never used.

    Args:
      visible: of `sight_for`; a `Sight` is computed block by block, on TPUs by the kernels of `models.fused`, elsewhere
        and in f64 as in `models.blockwise`.
      blocks: the order in which keys are added up; None: that of one product over the row. Only last bits differ.
      positions_BT: i32[B, T], of the tokens in their sequences; read where `blocks.number` is set.
      layout: of the activations on a mesh.
    """
    if isinstance(visible, Sight):
        attend: Callable[..., Array] = blockwise_attention
        if is_fused(layout) and q_BTHK.dtype != jnp.float64:
            from jaxrl_llm.models.fused import fused_attention as attend  # what it needs takes long to import
        if layout is None:
            return attend(q_BTHK, k_BTNK, v_BTNK, visible)
        return split_attention(layout, q_BTHK, k_BTNK, v_BTNK, visible, attend)
    block = None
    if blocks is not None and blocks.number is not None:
        if positions_BT is None:
            raise ValueError("segment_attention: blocks by position need the positions.")
        block = jnp.minimum(positions_BT // blocks.size, blocks.number - 1)
    return _attention(blocks, q_BTHK, k_BTNK, v_BTNK, visible, block)


def split_attention(
    layout: Layout,
    q_BTHK: Array,
    k_BTNK: Array,
    v_BTNK: Array,
    sight: Sight,
    attend: Callable[..., Array] = blockwise_attention,
) -> Array:
    """`attend(q, k, v, sight, axis=…)` on a mesh: rows, tokens and heads where `layout` has them.

    Heads that do not divide over their mesh axis are computed by all of its devices.
    """
    mesh = layout.heads.mesh
    rows, tokens, heads = layout.heads.spec
    names = (heads,) if isinstance(heads, str) else tuple(heads or ())
    if k_BTNK.shape[2] % math.prod(mesh.shape[name] for name in names):
        heads = None
    of_heads = jax.sharding.PartitionSpec(rows, tokens, heads)
    axis = tokens if layout.context > 1 else None
    return jax.shard_map(
        functools.partial(attend, axis=axis),
        mesh=mesh,
        in_specs=(of_heads, of_heads, of_heads, jax.sharding.PartitionSpec(rows, tokens)),
        out_specs=of_heads,
        check_vma=False,
    )(q_BTHK, k_BTNK, v_BTNK, sight)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(plan: KeyBlocks | None, q, k, v, visible, block):
    return _forward(plan, q, k, v, visible, block)[0]


def _by_head(x: Array, heads: int) -> Array:
    """[B, T, H, K] -> [B, N, T G, K]: the queries of one key/value head together."""
    B, T, H, K = x.shape
    return x.reshape(B, T, heads, H // heads, K).swapaxes(1, 2).reshape(B, heads, T * H // heads, K)


def _by_token(x: Array, tokens: int) -> Array:
    """The inverse of `_by_head`."""
    B, N, _, K = x.shape
    return x.reshape(B, N, tokens, -1, K).swapaxes(1, 2).reshape(B, tokens, -1, K)


def _forward(plan, q, k, v, visible, block):
    T, N, K = q.shape[1], k.shape[2], k.shape[3]
    G = q.shape[2] // N
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v = _by_head(q, N), _by_head(k, N), _by_head(v, N)
    if plan is not None:
        out, weights = _in_blocks(plan, q, k, v, visible, block)
        return _by_token(out, T), (q, k, v, weights, out)
    scores = jnp.einsum("bnqk,bnsk->bnqs", q, k, preferred_element_type=wide) * K**-0.5
    scores = jnp.where(jnp.repeat(visible, G, axis=1)[:, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bnqs,bnsk->bnqk", weights, v)
    return _by_token(out, T), (q, k, v, weights, out)


# ------------------------------------------------------------------------ keys in blocks, as in the sampler

# A softmax under way: highest score [B, N, Q], sum of weights [B, N, Q], weighted values [B, N, Q, K].
Softmax = tuple[Array, Array, Array]


def scaled_queries(q: Array) -> Array:
    """q / sqrt(K), rounded to the dtype of q; [..., K]."""
    return _rounded(q.astype(jnp.promote_types(q.dtype, jnp.float32)) * q.shape[-1] ** -0.5, q.dtype)


def _rounded(x: Array, dtype: jnp.dtype) -> Array:
    """x in a dtype, rounded also where a compiler would go on with x itself, as it may between operations it fuses."""
    kept = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, kept.nexp, kept.nmant).astype(dtype)


def own_key(q_BNQK: Array, k_BNQK: Array, v_BNQK: Array) -> Softmax:
    """The softmax of scaled queries over one key each: a token always sees itself, and itself first."""
    wide = jnp.promote_types(q_BNQK.dtype, jnp.float32)
    own = _sum_in_halves(q_BNQK.astype(wide) * k_BNQK.astype(wide))
    return own, jnp.ones_like(own), jnp.broadcast_to(v_BNQK.astype(wide), q_BNQK.shape)


def _sum_in_halves(x: Array) -> Array:
    """The sum over the last axis in an order of additions that no compiler chooses."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, (1 << (x.shape[-1] - 1).bit_length()) - x.shape[-1])])
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sum_of_weights(weights_BNQS: Array) -> Array:
    """f32[B, N, Q]: the sum over keys, as a product, whose order of additions does not depend on the other axes."""
    wide = jnp.promote_types(weights_BNQS.dtype, jnp.float32)
    # With fewer columns it would be another kind of product.
    ones = jnp.ones((weights_BNQS.shape[-1], _COLUMNS), weights_BNQS.dtype)
    return jnp.einsum("bnqs,sx->bnqx", weights_BNQS, ones, preferred_element_type=wide)[..., 0]


_COLUMNS = 16


def fold_keys(softmax: Softmax, scores_BNQS: Array, v_BNSK: Array) -> Softmax:
    """The softmax over one block of keys more; scores are -inf where a key is not seen."""
    high, mass, mixed = softmax
    new_high = jnp.maximum(high, jnp.max(scores_BNQS, axis=-1))
    rescale = jnp.exp(high - new_high)
    weights = _rounded(jnp.exp(scores_BNQS - new_high[..., None]), v_BNSK.dtype)
    mass = mass * rescale + sum_of_weights(weights)
    values = jnp.einsum("bnqs,bnsk->bnqk", weights, v_BNSK, preferred_element_type=high.dtype)
    return new_high, mass, mixed * rescale[..., None] + values


def _in_blocks(plan, q, k, v, visible, block):
    """(result, weights) of the queries [B, N, T G, K]."""
    T = k.shape[2]
    G = q.shape[2] // T
    scaled = scaled_queries(q)
    own = own_key(scaled, jnp.repeat(k, G, axis=2), jnp.repeat(v, G, axis=2))
    scores = jnp.einsum("bnqk,bnsk->bnqs", scaled, k, preferred_element_type=own[0].dtype)
    diagonal = jnp.eye(T, dtype=bool)
    seen = jnp.repeat(visible & ~diagonal, G, axis=1)[:, None]
    scores = jnp.where(seen, scores, -jnp.inf)
    if block is None:
        high, mass, mixed = _by_column(plan.size, own, scores, v, G)
    else:
        high, mass, mixed = _by_position(plan.number, own, scores, v, block)
    out = (mixed / mass[..., None]).astype(q.dtype)
    scores = jnp.where(jnp.repeat(diagonal, G, axis=0), own[0][..., None], scores)
    weights = jnp.exp(scores - (high + jnp.log(mass))[..., None])
    return out, weights.astype(v.dtype)


def _by_column(size: int, own: Softmax, scores: Array, v: Array, group: int) -> Softmax:
    """Blocks of columns; queries before a block do not see it."""
    T = v.shape[2]
    done, rest = [], own
    for start in range(0, T, size):
        here = slice(start, start + size)
        rest = fold_keys(rest, scores[:, :, start * group :, here], v[:, :, here])
        done.append(jax.tree.map(lambda x: x[:, :, : size * group], rest))
        rest = jax.tree.map(lambda x: x[:, :, size * group :], rest)
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=2), *done)


def _by_position(count: int, own: Softmax, scores: Array, v: Array, block: Array) -> Softmax:
    """Blocks of positions, whose columns lie anywhere: what is not of a block adds zeros to its sums."""
    high, mass, mixed = own
    K, wide = v.shape[-1], high.dtype
    columns = [(block == j)[:, None, None] for j in range(count)]  # [B, 1, 1, T]
    highs = [high]
    for here in columns[:-1]:
        highs.append(jnp.maximum(highs[-1], jnp.max(jnp.where(here, scores, -jnp.inf), axis=-1)))
    highs.append(jnp.maximum(high, jnp.max(scores, axis=-1)))
    reference = highs[1][..., None]
    for here, top in zip(columns[1:], highs[2:], strict=True):
        reference = jnp.where(here, top[..., None], reference)
    weights = _rounded(jnp.exp(scores - reference), v.dtype)
    parts = jnp.concatenate([jnp.where(here.swapaxes(2, 3), v, 0) for here in columns], axis=-1)
    values = jnp.einsum("bnqs,bnsk->bnqk", weights, parts, preferred_element_type=wide)
    which = jax.nn.one_hot(block, max(count, _COLUMNS), dtype=v.dtype)
    sums = jnp.einsum("bnqs,bsx->bnqx", weights, which, preferred_element_type=wide)
    for j in range(count):
        rescale = jnp.exp(highs[j] - highs[j + 1])
        mass = mass * rescale + sums[..., j]
        mixed = mixed * rescale[..., None] + values[..., j * K : (j + 1) * K]
    return highs[-1], mass, mixed


# ---------------------------------------------------------------------------------------- gradient


def _backward(plan, residuals, d_out):
    del plan
    q, k, v, weights, out = residuals
    N, T, K = k.shape[1:]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # Three things make this several times faster than what autodiff emits on XLA:CPU. Products of the gradient
    # run in the compute dtype, not in that of the scores. Sums over queries contract two axes, which makes XLA
    # transpose the weights once instead of reading them across rows. Without the barriers the products are
    # fused with the elementwise work between them, which makes both slow.
    barrier = jax.lax.optimization_barrier
    d_out = _by_head(d_out, N)
    weights = barrier(weights)
    d_v = _sum_over_queries(weights, d_out, T)
    d_weights = barrier(jnp.einsum("bnqk,bnsk->bnqs", d_out, v, preferred_element_type=wide))
    mean = barrier(jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1, keepdims=True))
    d_scores = weights.astype(wide) * (d_weights - mean) * K**-0.5
    d_scores = barrier(d_scores.astype(q.dtype))
    d_q = jnp.einsum("bnqs,bnsk->bnqk", d_scores, k)
    d_k = _sum_over_queries(d_scores, q, T)
    return _by_token(d_q, T), _by_token(d_k, T), _by_token(d_v, T), None, None


def _sum_over_queries(weights_BNQS: Array, x_BNQK: Array, tokens: int) -> Array:
    """Σ over q of weights[..., q, s] x[q]: [B, N, S, K]."""
    first = x_BNQK.shape[2] // tokens  # query heads of a key/value head
    if first == 1 and tokens % 2 == 0:
        first = 2  # two axes to contract, see above

    def split(x):
        return x.reshape(*x.shape[:2], first, -1, x.shape[-1])

    return jnp.einsum("bngts,bngtk->bnsk", split(weights_BNQS), split(x_BNQK))


_attention.defvjp(_forward, _backward)
