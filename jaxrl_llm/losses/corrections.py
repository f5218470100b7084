"""Importance weights between the policy that sampled and the policy that starts the train step.

q = log proximal - log behavior, 0 where masked. The three levels: the token's own ratio, the product over
its sequence, the geometric mean over its sequence. All are detached by construction: no parameters here.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import keep, quotient, safe_exp
from jaxrl_llm.ops.segments import sequence_max, sequence_mean, sequence_sum

__all__ = [
    "geometric_weight",
    "inside",
    "interpolated_proximal",
    "negative_offpolicy",
    "outlier_sequences",
    "over_mean",
    "second_moment_kept",
    "sequence_weight",
    "stale_weight",
    "token_weight",
    "truncated",
]

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


def over_mean(weight: Array, share: Array, mask: Array) -> Array:
    """w / (Σ share · w / Σ share) over the masked tokens: weights whose mean is 1."""
    chex.assert_equal_shape([weight, share, mask])
    share = keep(mask, share)
    return quotient(weight, quotient(jnp.sum(share * keep(mask, weight)), jnp.sum(share)))


def negative_offpolicy(
    log_ratio: Array, advantage: Array, sequence: Array, mask: Array, delta: float
) -> Array:
    """bool: A_t < 0 in a sequence with mean_t (log anchor - log π) > δ (DeepSeek-V3.2, arXiv 2512.02556)."""
    chex.assert_equal_shape([log_ratio, advantage, sequence, mask])
    drift = sequence_mean(-log_ratio, sequence, mask)
    return mask & (advantage < 0) & (drift > delta)


def outlier_sequences(weight: Array, sequence: Array, mask: Array, low: float | None, high: float | None):
    """bool: sequences in which the weight of some trained token is outside [low, high]."""
    chex.assert_equal_shape([weight, sequence, mask])
    outside = mask & ~inside(weight, low, high)
    return sequence_max(outside.astype(weight.dtype), sequence, mask) > 0


def stale_weight(age: Array, rate: float, grace: int) -> Array:
    """rate^max(age - grace, 0)."""
    return jnp.power(rate, jnp.maximum(age - grace, 0).astype(jnp.result_type(float)))


def second_moment_kept(moment: Array, valid: Array, limit: float) -> Array:
    """bool: the valid entries that stay when the largest are dropped until the mean of the rest is < limit.

    Equal entries stay or go together, so that no order of the tokens matters; the smallest always stay. An entry
    that is not finite goes.
    """
    chex.assert_equal_shape([moment, valid])
    valid = valid & jnp.isfinite(moment)
    moment = jnp.where(valid, moment, jnp.inf)
    ascending = jnp.sort(moment.reshape(-1))
    entries = jnp.arange(1, ascending.size + 1)
    means = jnp.cumsum(keep(jnp.isfinite(ascending), ascending)) / entries
    fits = jnp.isfinite(ascending) & (means < limit)
    kept = jnp.sum(fits)  # means of the smallest n ascend with n, so those that fit come first
    first_dropped = jnp.where(
        kept < ascending.size, ascending[jnp.minimum(kept, ascending.size - 1)], jnp.inf
    )
    return valid & ((moment < first_dropped) | (moment <= ascending[0]))


def interpolated_proximal(behavior: Array, current: Array, share: Array, probabilities: bool) -> Array:
    """The log-prob a share of the way from behavior to current, in logarithms or in probabilities."""
    chex.assert_equal_shape([behavior, current, share])
    if not probabilities:
        return behavior + share * (current - behavior)
    # log 0 = -inf is fine in logaddexp, whose value alone is used
    return jnp.logaddexp(jnp.log1p(-share) + behavior, jnp.log(share) + current)
