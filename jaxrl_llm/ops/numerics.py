"""Arithmetic that stays finite: exponentials of log-ratios, quotients, values under a mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp

__all__ = ["LOG_RATIO_LIMIT", "absolute", "at_least_f32", "keep", "quotient", "safe_exp"]

Array = jax.Array

LOG_RATIO_LIMIT = 20.0  # nats; e^20 = 4.9e8 is far outside every trust region and far inside f32


def safe_exp(log_ratio: Array) -> Array:
    """exp(clip(x, -20, 20)).

    The one place where a log-ratio is exponentiated. Beyond the limit the value is constant, hence the
    gradient through it is zero.
    """
    return jnp.exp(jnp.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def absolute(x: Array) -> Array:
    """|x| with derivative 0 at 0.

    `jnp.abs` has derivative 1 there, and on-policy data hits log-ratio 0 exactly.
    """
    return jnp.where(x == 0, 0.0, jnp.abs(x))


def keep(mask: Array, x: Array) -> Array:
    """x where `mask`, else 0. Neither value nor gradient of a masked entry survives, NaN included.

    Must be applied *before* an exp or log: a `where` after it does not stop a NaN gradient.
    """
    return jnp.where(mask, x, jnp.zeros((), x.dtype))


def quotient(numerator: Array, denominator: Array) -> Array:
    """numerator / denominator, and 0 where the denominator is 0; gradients stay finite."""
    empty = denominator == 0
    return jnp.where(empty, 0.0, numerator / jnp.where(empty, 1.0, denominator))


def at_least_f32(x: Array) -> Array:
    """x in f32, or in its own type where that is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
