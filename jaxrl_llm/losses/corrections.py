"""Importance weights between the policy that sampled and the policy that starts the train step.

q = log proximal - log behavior, 0 where masked. The three levels: the token's own ratio, the product over
its sequence, the geometric mean over its sequence. All are detached by construction: no parameters here.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import keep, safe_exp
from jaxrl_llm.ops.segments import sequence_mean, sequence_sum

__all__ = ["geometric_weight", "inside", "sequence_weight", "token_weight", "truncated"]

Array = jax.Array


def token_weight(log_ratio: Array, sequence: Array, mask: Array) -> Array:
    """w_t = e^{q_t}."""
    chex.assert_equal_shape([log_ratio, sequence, mask])
    return safe_exp(keep(mask, log_ratio))


def sequence_weight(log_ratio: Array, sequence: Array, mask: Array) -> Array:
    """w = e^{Σ_t q_t}, at each token of the sequence."""
    chex.assert_equal_shape([log_ratio, sequence, mask])
    return safe_exp(sequence_sum(keep(mask, log_ratio), sequence))


def geometric_weight(log_ratio: Array, sequence: Array, mask: Array) -> Array:
    """w = e^{mean_t q_t}, at each token of the sequence."""
    chex.assert_equal_shape([log_ratio, sequence, mask])
    return safe_exp(sequence_mean(log_ratio, sequence, mask))


def truncated(weight: Array, cap: float, floor: float | None) -> Array:
    """min(w, cap), and not below floor."""
    return jnp.clip(weight, floor, cap)


def inside(weight: Array, low: float | None, high: float | None) -> Array:
    """bool: low ≤ w ≤ high; a bound of None does not bind."""
    kept = jnp.ones(weight.shape, bool)
    kept = kept if low is None else kept & (weight >= low)
    return kept if high is None else kept & (weight <= high)
