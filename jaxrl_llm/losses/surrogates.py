"""Policy surrogates: the negated objective of each token, unreduced."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import LOG_RATIO_LIMIT, keep, safe_exp
from jaxrl_llm.ops.segments import sequence_mean, sequence_sum

__all__ = [
    "capped_score",
    "clipped",
    "clipped_high",
    "clipped_low",
    "clipped_ratio",
    "dual_clipped",
    "dual_clipped_tokens",
    "geometric_ratio",
    "quadratic",
    "reinforce",
    "sequence_gamma_weight",
    "shrunk_bound",
    "soft_gate",
]

Array = jax.Array


def reinforce(logprob: Array, advantage: Array) -> Array:
    """l_t = -A_t log π_t (Williams, 1992)."""
    chex.assert_equal_shape([logprob, advantage])
    return -advantage * logprob


def clipped(log_ratio: Array, advantage: Array, low: float | Array, high: float | Array) -> Array:
    """l_t = max(-A_t r_t, -A_t clip(r_t, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7)."""
    chex.assert_equal_shape([log_ratio, advantage])
    return clipped_ratio(safe_exp(log_ratio), advantage, low, high)


def clipped_ratio(ratio: Array, advantage: Array, low: float | Array, high: float | Array) -> Array:
    """`clipped`, of a ratio r_t that is already there."""
    chex.assert_equal_shape([ratio, advantage])
    return jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1.0 - low, 1.0 + high))


def dual_clipped(loss: Array, advantage: Array, dual: float) -> Array:
    """min(l_t, -c A_t) where A_t < 0 (dual-clip PPO, arXiv 1912.09729, eq. 5)."""
    return jnp.where(advantage < 0, jnp.minimum(loss, -dual * advantage), loss)


def clipped_high(log_ratio: Array, advantage: Array, high: float | Array) -> Array:
    """bool: tokens whose gradient the upper bound cuts: A > 0 and r > 1 + high."""
    return (advantage > 0) & (safe_exp(log_ratio) > 1.0 + high)


def clipped_low(log_ratio: Array, advantage: Array, low: float | Array) -> Array:
    """bool: tokens whose gradient the lower bound cuts: A < 0 and r < 1 - low."""
    return (advantage < 0) & (safe_exp(log_ratio) < 1.0 - low)


def dual_clipped_tokens(log_ratio: Array, advantage: Array, dual: float) -> Array:
    """bool: tokens whose gradient the dual bound cuts: A < 0 and r > c."""
    return (advantage < 0) & (safe_exp(log_ratio) > dual)


def shrunk_bound(bound: float, age: Array, decay: float, floor: float) -> Array:
    """max(bound · decay^age, floor), and not above `bound` where decay ≤ 1; age in train steps."""
    return jnp.maximum(bound * jnp.power(decay, age), jnp.minimum(floor, bound))


def capped_score(logprob: Array, log_ratio: Array, advantage: Array, low: float | None, high: float) -> Array:
    """l_t = -sg(clip(r_t, low, high)) A_t log π_t; bounds are ratios (CISPO, arXiv 2506.13585).

    A token outside the bounds keeps the gradient of a token at the bound.
    """
    chex.assert_equal_shape([logprob, log_ratio, advantage])
    weight = jnp.clip(safe_exp(jax.lax.stop_gradient(log_ratio)), low, high)
    return -weight * advantage * logprob


def soft_gate(log_ratio: Array, advantage: Array, tau_positive: float, tau_negative: float) -> Array:
    """f(r) = 4/τ σ(τ (r - 1)), τ = tau_positive where A > 0, else tau_negative (SAPO, arXiv 2511.20347).

    f has slope 1 at r = 1 and flattens on both sides of it.
    """
    chex.assert_equal_shape([log_ratio, advantage])
    tau = jnp.where(advantage > 0, tau_positive, tau_negative)
    return 4.0 / tau * jax.nn.sigmoid(tau * (safe_exp(log_ratio) - 1.0))


def quadratic(logprob: Array, log_ratio: Array, advantage: Array, beta: float) -> Array:
    """l_t = -(A_t log π_t - β/2 d_t²), d_t the log-ratio (DRO, arXiv 2405.19107)."""
    chex.assert_equal_shape([logprob, log_ratio, advantage])
    return -advantage * logprob + 0.5 * beta * log_ratio**2


def geometric_ratio(
    log_ratio: Array, advantage: Array, sequence: Array, mask: Array, low: float, high: float
) -> Array:
    """s = exp(mean_t d'_t) at each token of the sequence (GMPO, arXiv 2507.20673).

    d'_t = min(d_t, high) where A_t > 0, max(d_t, -low) where A_t < 0, 0 where A_t = 0.
    """
    chex.assert_equal_shape([log_ratio, advantage, sequence, mask])
    good = jnp.where(log_ratio > high, high, log_ratio)
    bad = jnp.where(log_ratio < -low, -low, log_ratio)
    cut = jnp.where(advantage > 0, good, jnp.where(advantage < 0, bad, 0.0))
    return safe_exp(sequence_mean(cut, sequence, mask))


LOG_WEIGHT_FLOOR = -18.420680743952367  # log 1e-8, the smallest sequence weight that VESPO tells apart


def sequence_gamma_weight(
    log_ratio: Array, advantage: Array, sequence: Array, mask: Array, positive: tuple, negative: tuple
) -> Array:
    """φ = exp(λ + k S - λ e^S) = W^k e^{λ (1 - W)}, detached (VESPO, arXiv 2602.10693).

    S = log W = Σ_t d_t over the trained tokens of the sequence, kept in [log 1e-8, 20]; (k, λ) is `positive`
    where A ≥ 0, else `negative`. φ = 1 at W = 1, and it vanishes on both sides of a maximum at W = k / λ.
    """
    chex.assert_equal_shape([log_ratio, advantage, sequence, mask])
    d = jnp.clip(jax.lax.stop_gradient(keep(mask, log_ratio)), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    S = jnp.clip(sequence_sum(d, sequence), LOG_WEIGHT_FLOOR, LOG_RATIO_LIMIT)
    k, lam = (jnp.where(advantage >= 0, p, n) for p, n in zip(positive, negative, strict=True))
    return jnp.exp(lam + k * S - lam * safe_exp(S))
