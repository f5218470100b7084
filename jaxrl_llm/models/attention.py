"""Attention within the segments of a row, for the learner."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["segment_attention"]

Array = jax.Array


def segment_attention(q_BTHK: Array, k_BTNK: Array, v_BTNK: Array, segments_BT: Array) -> Array:
    """Causal grouped-query attention that never crosses a segment; [B, T, H, K].

    Scores and the softmax are f32 (f64 stays f64), as in the sampler. Query head h reads key/value head
    h // (H / N). Padding (segment 0) attends to padding only and its result is never used.
    """
    B, T, H, K = q_BTHK.shape
    N = k_BTNK.shape[2]
    wide = jnp.promote_types(q_BTHK.dtype, jnp.float32)
    q = q_BTHK.reshape(B, T, N, H // N, K)
    scores = jnp.einsum("btngk,bsnk->bngts", q, k_BTNK, preferred_element_type=wide) * K**-0.5
    visible = (segments_BT[:, :, None] == segments_BT[:, None, :]) & jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BTNK.dtype)
    out = jnp.einsum("bngts,bsnk->btngk", weights, v_BTNK)
    return out.reshape(B, T, H, K)
