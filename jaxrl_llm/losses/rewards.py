"""Changes of the reward before it becomes an advantage."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import quotient

__all__ = ["affine", "overlong_penalty", "relative_length_cost"]

Array = jax.Array


def overlong_penalty(length: Array, limit: float, buffer: float, penalty: float) -> Array:
    """-penalty · clip((length - (limit - buffer)) / buffer, 0, 1) (DAPO, arXiv 2503.14476, eq. 13).

    Lengths in tokens. 0 up to limit - buffer, then linear, and -penalty from `limit` on. (verl, AReaL and
    tunix have no floor: theirs keeps falling beyond the limit.)
    """
    return -penalty * jnp.clip((length - (limit - buffer)) / buffer, 0.0, 1.0)


def affine(reward: Array, scale: float, bias: float, limit: float | None) -> Array:
    """clip((R + bias) · scale, ±limit); not clipped where the limit is None (AReaL's reward transform)."""
    scaled = (reward + bias) * scale
    return scaled if limit is None else jnp.clip(scaled, -limit, limit)


def relative_length_cost(mean_reward: Array, amount: Array, largest: Array) -> Array:
    """max(mean, 0) · amount / max(largest, 1): a share of the group's mean reward, all of it for its largest answer.

    The mean reward is that of the group, `largest` its largest amount. With the mean as it is (prime-rl), long answers
    of a group with negative rewards would be paid.
    """
    chex.assert_equal_shape([mean_reward, amount, largest])
    return jnp.maximum(mean_reward, 0.0) * quotient(amount, jnp.maximum(largest, 1.0))
