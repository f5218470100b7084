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


def segment_attention(q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, visible_BTT: Array) -> Array:
    """Grouped-query attention of each token to those that `visible_tokens` names; [B, T, H, K].

    Scores and the softmax are f32 (f64 stays f64), as in the sampler. Query head h reads key/value head
    h // (H / N). Padding (segment 0) attends to padding only and its result is never used.
    """
    B, T, H, K = q_BTHK.shape
    N = k_BTNK.shape[2]
    wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q = q_BTHK.reshape(B, T, N, H // N, K)
    scores = jnp.einsum("btngk,bsnk->bngts", q, k_BTNK, preferred_element_type=wide) * K**-0.5
    scores = jnp.where(visible_BTT[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTNK.dtype)
    out = jnp.einsum("bngts,bsnk->btngk", weights, v_BTNK)
    return out.reshape(B, T, H, K)
