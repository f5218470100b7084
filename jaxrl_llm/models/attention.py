"""Attention within the sequences of a row, for the learner."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["segment_attention", "visible_tokens"]

Array = jax.Array


def visible_tokens(segments: Array) -> Array:
    """bool[B, T, T]: whether the token at [b, t] attends to the token at [b, s], by `TokenBatch.segments`.

    A token sees itself and the earlier tokens of its own segment; one in a segment > 0 also sees the shared
    prefix (segment < 0) that opened its family: the nearest one before it, with no padding in between.
    """
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)))
    columns = jnp.arange(1, segments.shape[1] + 1)
    # A family is named by the column, counted from 1, where it was opened; 0 = in no family.
    opens = (segments < 0) & (segments != before)
    opened = jax.lax.cummax(jnp.where(opens, columns, 0), axis=1)
    ended = jax.lax.cummax(jnp.where(segments == 0, columns, 0), axis=1)
    family = jnp.where(opened > ended, opened, 0)
    same = segments[:, :, None] == segments[:, None, :]
    prefix = (
        (segments[:, :, None] > 0) & (segments[:, None, :] < 0) & (family[:, :, None] == family[:, None, :])
    )
    causal = jnp.tril(jnp.ones((segments.shape[1],) * 2, bool))
    return (same | prefix) & causal


@jax.custom_vjp
def segment_attention(q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, visible_BTT: Array) -> Array:
    """Grouped-query attention of each token to those that `visible_tokens` names; [B, T, H, K].

    Scores and the softmax are f32 (f64 stays f64), as in the sampler. Query head h reads key/value head
    h // (H / N). Padding (segment 0) attends to padding only and its result is never used.
    """
    return _forward(q_BTHK, k_BTNK, v_BTNK, visible_BTT)[0]


def _by_head(x: Array, heads: int) -> Array:
    """[B, T, H, K] -> [B, N, G T, K]: the queries of one key/value head together."""
    B, T, H, K = x.shape
    return x.reshape(B, T, heads, H // heads, K).transpose(0, 2, 3, 1, 4).reshape(B, heads, H // heads * T, K)


def _by_token(x: Array, tokens: int) -> Array:
    """The inverse of `_by_head`."""
    B, N, _, K = x.shape
    return x.reshape(B, N, -1, tokens, K).transpose(0, 3, 1, 2, 4).reshape(B, tokens, -1, K)


def _forward(q, k, v, visible):
    T, N, K = q.shape[1], k.shape[2], k.shape[3]
    G = q.shape[2] // N
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v = _by_head(q, N), _by_head(k, N), _by_head(v, N)
    scores = jnp.einsum("bnqk,bnsk->bnqs", q, k, preferred_element_type=wide) * K**-0.5
    scores = jnp.where(jnp.tile(visible, (1, G, 1))[:, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bnqs,bnsk->bnqk", weights, v)
    return _by_token(out, T), (q, k, v, weights, out)


def _backward(residuals, d_out):
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
    return _by_token(d_q, T), _by_token(d_k, T), _by_token(d_v, T), None


def _sum_over_queries(weights_BNQS: Array, x_BNQK: Array, tokens: int) -> Array:
    """Σ over q of weights[..., q, s] x[q]: [B, N, S, K]."""
    first = x_BNQK.shape[2] // tokens  # query heads of a key/value head
    if first == 1 and tokens % 2 == 0:
        first = 2  # two axes to contract, see above

    def split(x):
        return x.reshape(*x.shape[:2], first, -1, x.shape[-1])

    return jnp.einsum("bngts,bngtk->bnsk", split(weights_BNQS), split(x_BNQK))


segment_attention.defvjp(_forward, _backward)
