"""Advantages: from one reward a trajectory, or from a stream of rewards, to a number a token."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import keep, quotient
from jaxrl_llm.ops.segments import Groups, Members, following, suffix_scan

__all__ = [
    "best_margin",
    "centered",
    "centered_by_mean",
    "centered_by_std",
    "discounted_returns",
    "explained_variance",
    "generalized_advantages",
    "leave_one_out",
    "leave_one_out_by_std",
    "length_weighted",
    "moving_average",
    "pass_at_k",
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


def leave_one_out_by_std(values: Array, stats: Groups, of: Members, eps: float) -> Array:
    """A_i = (R_i - mean of the others) / (std of the others + eps), Bessel-corrected among the n - 1 others.

    Not divided where the others are equal, or fewer than two. With S = Σ_j (R_j - mean)² of the whole group, the
    others have the sum of squares S - n / (n - 1) · (R_i - mean)².
    """
    highest, lowest = of.max(values), of.min(values)
    second_highest = of.max(jnp.where(values < highest, values, -jnp.inf))
    second_lowest = of.min(jnp.where(values > lowest, values, jnp.inf))

    def only_one(extreme: Array) -> Array:
        return (values == extreme) & (of.sum((values == extreme).astype(values.dtype)) == 1)

    # By max and min, as a group is: a variance that rounding leaves over must not be divided by.
    top = jnp.where(only_one(highest), second_highest, highest)
    bottom = jnp.where(only_one(lowest), second_lowest, lowest)
    square = stats.square - stats.deviation**2 * quotient(stats.size, stats.size - 1.0)
    std = jnp.sqrt(jnp.maximum(quotient(square, jnp.maximum(stats.size - 2.0, 1.0)), 0.0))
    divided = (stats.size > 2) & (top > bottom) & (std > 0)
    deviation = leave_one_out(stats)
    return jnp.where(divided, deviation / jnp.where(divided, std + eps, 1.0), deviation)


def length_weighted(length: Array, stats: Groups, of: Members) -> Array:
    """A_i = R_i - Σ_j n_j R_j / Σ_j n_j, n the length (OPO, arXiv 2505.23585); exactly 0 in a constant group."""
    shift = quotient(of.sum(length * stats.deviation), of.sum(length))
    return keep(of.valid, stats.deviation - shift)


def best_margin(values: Array, of: Members) -> Array:
    """A of the best trajectory of a group = its reward - the second best; 0 for the others, and where two are best."""
    highest = of.max(values)
    best = of.valid & (values == highest)
    second = of.max(jnp.where(values < highest, values, -jnp.inf))
    alone = best & (of.sum(best.astype(values.dtype)) == 1) & (second > -jnp.inf)
    return jnp.where(alone, values - jnp.where(alone, second, 0.0), 0.0)


def _all_among(some: Array, size: Array, draws: Array, most: int) -> Array:
    """C(some, draws) / C(size, draws), the chance that `draws` ≤ `most` of `size` are all among `some`."""
    chance = jnp.ones_like(size)
    for j in range(most):
        factor = jnp.maximum(some - j, 0.0) / jnp.maximum(size - j, 1.0)
        chance = chance * jnp.where(j < draws, factor, 1.0)
    return chance


def pass_at_k(success: Array, size: Array, failures: Array, k: int) -> Array:
    """Advantages of the mean over all k-subsets of a group of the best of the subset (arXiv 2508.10751).

    R̄ = 1 - C(F, k) / C(n, k), σ = sqrt(R̄ (1 - R̄)), F failures among n answers:
    A = (1 - R̄) / σ for a success, (1 - R̄ - C(F - 1, k - 1) / C(n - 1, k - 1)) / σ for a failure; 0 where σ = 0.
    A group smaller than k is taken whole: k = n.
    """
    chex.assert_equal_shape([success, size, failures])
    draws = jnp.minimum(size, float(k))
    missed = _all_among(failures, size, draws, k)  # 1 - R̄
    others_missed = _all_among(failures - 1.0, size - 1.0, draws - 1.0, k - 1)
    deviation = jnp.sqrt(missed * (1.0 - missed))
    return quotient(missed - jnp.where(success, 0.0, others_missed), deviation)


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


def generalized_advantages(
    reward: Array,
    value: Array,
    end: Array,
    gamma: float,
    lam: float | Array,
    trajectory: Array,
    mask: Array,
) -> Array:
    """A_t = δ_t + γ λ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t (GAE, arXiv 1506.02438, eq. 16).

    t + 1 is the next trained token of the trajectory: spans outside the mask carry values and advantages across.
    `end` is V after the last one. λ may be an array f32[B, T].
    """
    chex.assert_equal_shape([reward, value, end, trajectory, mask])
    delta = reward + gamma * following(value, trajectory, mask, end) - value
    return suffix_scan(delta, jnp.broadcast_to(gamma * lam, reward.shape), trajectory, mask)


def explained_variance(value: Array, returns: Array, mask: Array) -> Array:
    """1 - var(returns - value) / var(returns) over the masked tokens, a scalar; 0 where returns are constant."""
    chex.assert_equal_shape([value, returns, mask])
    count = jnp.sum(mask).astype(returns.dtype)

    def variance(x: Array) -> Array:
        x = keep(mask, x)
        return quotient(jnp.sum(keep(mask, x - quotient(jnp.sum(x), count)) ** 2), count)

    total = variance(returns)
    return jnp.where(total > 0, 1.0 - quotient(variance(returns - value), total), 0.0)


def moving_average(old: Array, total: Array, count: Array, decay: float) -> Array:
    """d^n b + (1 - d^n) mean of n new values: n steps b ← d b + (1 - d) x, whatever their order, to the mean."""
    kept = jnp.asarray(decay, old.dtype) ** count
    return kept * old + (1.0 - kept) * quotient(total, count)
