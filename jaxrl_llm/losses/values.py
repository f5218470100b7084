"""Losses of a critic, unreduced."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

__all__ = ["clipped_square_error", "square_error", "value_clipped"]

Array = jax.Array


def square_error(value: Array, returns: Array) -> Array:
    """(v - R)² / 2."""
    chex.assert_equal_shape([value, returns])
    return 0.5 * (value - returns) ** 2


def _near(value: Array, old: Array, clip: float) -> Array:
    """v_old + clip(v - v_old, -c, c)."""
    return old + jnp.clip(value - old, -clip, clip)


def clipped_square_error(value: Array, returns: Array, old: Array, clip: float) -> Array:
    """max((v - R)², (v_c - R)²) / 2, v_c = v_old + clip(v - v_old, -c, c).

    The PPO critic loss of arXiv 2005.12729, §3.
    """
    chex.assert_equal_shape([value, returns, old])
    return jnp.maximum(square_error(value, returns), square_error(_near(value, old, clip), returns))


def value_clipped(value: Array, returns: Array, old: Array, clip: float) -> Array:
    """bool: values whose gradient the clip cuts."""
    return square_error(_near(value, old, clip), returns) > square_error(value, returns)
