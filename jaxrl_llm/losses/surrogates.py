"""Policy surrogates: the negated objective of each token, unreduced."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import safe_exp

__all__ = ["clipped", "clipped_high", "clipped_low", "dual_clipped", "dual_clipped_tokens", "reinforce"]

Array = jax.Array


def reinforce(logprob: Array, advantage: Array) -> Array:
    """l_t = -A_t log π_t (Williams, 1992)."""
    chex.assert_equal_shape([logprob, advantage])
    return -advantage * logprob


def clipped(log_ratio: Array, advantage: Array, low: float, high: float) -> Array:
    """l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7)."""
    chex.assert_equal_shape([log_ratio, advantage])
    ratio = safe_exp(log_ratio)
    return jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1.0 - low, 1.0 + high))


def dual_clipped(loss: Array, advantage: Array, dual: float) -> Array:
    """min(l_t, -c A_t) where A_t < 0 (dual-clip PPO, arXiv 1912.09729, eq. 5)."""
    return jnp.where(advantage < 0, jnp.minimum(loss, -dual * advantage), loss)


def clipped_high(log_ratio: Array, advantage: Array, high: float) -> Array:
    """bool: tokens whose gradient the upper bound cuts: A > 0 and r > 1 + high."""
    return (advantage > 0) & (safe_exp(log_ratio) > 1.0 + high)


def clipped_low(log_ratio: Array, advantage: Array, low: float) -> Array:
    """bool: tokens whose gradient the lower bound cuts: A < 0 and r < 1 - low."""
    return (advantage < 0) & (safe_exp(log_ratio) < 1.0 - low)


def dual_clipped_tokens(log_ratio: Array, advantage: Array, dual: float) -> Array:
    """bool: tokens whose gradient the dual bound cuts: A < 0 and r > c."""
    return (advantage < 0) & (safe_exp(log_ratio) > dual)
