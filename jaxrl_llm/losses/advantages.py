"""Advantages: from one reward a trajectory, or from a stream of rewards, to a number a token."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import Groups, suffix_scan

__all__ = [
    "centered",
    "centered_by_mean",
    "centered_by_std",
    "discounted_returns",
    "leave_one_out",
    "whitened",
]

Array = jax.Array


def centered(stats: Groups) -> Array:
    """A_i = R_i - mean. [N]; exactly 0 for a group that is constant, has one member or no reward."""
    return stats.deviation


def centered_by_std(stats: Groups, ddof: int, eps: float) -> Array:
    """A_i = (R_i - mean) / (std + eps), std with n - ddof in the denominator (DeepSeekMath, eq. for A)."""
    std = jnp.sqrt(quotient(stats.square, jnp.maximum(stats.size - ddof, 1.0)))
    return jnp.where(stats.constant, 0.0, quotient(stats.deviation, std + eps))


def centered_by_mean(stats: Groups, eps: float) -> Array:
    """A_i = (R_i - mean) / (mean + eps); 0 where the mean is not positive (MaxRL, arXiv 2602.02710)."""
    positive = stats.mean > 0
    return jnp.where(positive, stats.deviation / jnp.where(positive, stats.mean + eps, 1.0), 0.0)


def leave_one_out(stats: Groups) -> Array:
    """A_i = R_i - mean of the others = n / (n - 1) · (R_i - mean) (RLOO, arXiv 2402.14740)."""
    return stats.deviation * quotient(stats.size, stats.size - 1.0)


def discounted_returns(reward: Array, gamma: float, trajectory: Array, mask: Array) -> Array:
    """G_t = r_t + γ G_{t+1} over the trained tokens of a trajectory.

    Spans outside the mask (tool output, later prompts) are crossed without discount, so a reward after
    them reaches the tokens before them.
    """
    chex.assert_equal_shape([reward, trajectory, mask])
    return suffix_scan(reward, jnp.full_like(reward, gamma), trajectory, mask)


def whitened(values: Array, mask: Array, ddof: int, eps: float) -> Array:
    """(x - mean) / sqrt(var + eps) over the masked tokens, each counted once; 0 elsewhere.

    A constant input gives exactly 0, as does a single token.
    """
    chex.assert_equal_shape([values, mask])
    values = keep(mask, values)
    count = jnp.sum(mask).astype(values.dtype)
    mean = quotient(jnp.sum(values), count)
    deviation = keep(mask, values - mean)
    variance = quotient(jnp.sum(deviation**2), jnp.maximum(count - ddof, 1.0))
    highest = jnp.max(jnp.where(mask, values, -jnp.inf))
    lowest = jnp.min(jnp.where(mask, values, jnp.inf))
    return jnp.where(highest <= lowest, 0.0, deviation * jax.lax.rsqrt(variance + eps))
