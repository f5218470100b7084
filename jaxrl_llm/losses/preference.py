"""Losses of pairs of answers, one value a pair, from sums or means over the tokens of each answer.

a_w and a_l are log-probs of the chosen (w) and the rejected (l) answer, h = (a_w - r_w) - (a_l - r_l) the
difference of their log-ratios to a reference r. All arrays are f32[N], N pairs; every value is finite for every
finite input, since log σ is never an exp of a large number.
"""

from __future__ import annotations

import math

import chex
import jax
import jax.numpy as jnp

__all__ = [
    "bradley_terry",
    "hinge",
    "kto",
    "log_odds_ratio",
    "logistic",
    "robust_logistic",
    "square",
]

Array = jax.Array

LOG_PROB_LIMIT = -1e-7  # nats; a log-prob of 0 has infinite odds


def logistic(x: Array, smoothing: float) -> Array:
    """-(1 - ε) log σ(x) - ε log σ(-x), ε the probability that the label is flipped."""
    return (1.0 - smoothing) * jax.nn.softplus(-x) + smoothing * jax.nn.softplus(x)


def robust_logistic(x: Array, smoothing: float) -> Array:
    """[-(1 - ε) log σ(x) + ε log σ(-x)] / (1 - 2ε): unbiased when labels are flipped with probability ε < ½."""
    return ((1.0 - smoothing) * jax.nn.softplus(-x) - smoothing * jax.nn.softplus(x)) / (
        1.0 - 2.0 * smoothing
    )


def square(h: Array, beta: float) -> Array:
    """(h - 1 / (2β))²."""
    return (h - 0.5 / beta) ** 2


def hinge(x: Array) -> Array:
    """max(0, 1 - x), with derivative 0 at x = 1."""
    return jnp.where(x < 1.0, 1.0 - x, 0.0)


def _log_odds(a: Array) -> Array:
    """log(e^a / (1 - e^a)) for a < 0, exact at both ends; a is at most -1e-7."""
    a = jnp.minimum(a, LOG_PROB_LIMIT)
    near = a > -math.log(2.0)
    # Each branch sees only arguments that it is exact for, so that the other one's gradient stays finite.
    close = jnp.log(-jnp.expm1(jnp.where(near, a, -1.0)))
    far = jnp.log1p(-jnp.exp(jnp.where(near, -1.0, a)))
    return a - jnp.where(near, close, far)


def log_odds_ratio(chosen: Array, rejected: Array) -> Array:
    """log odds(e^{a_w}) - log odds(e^{a_l}), odds(p) = p / (1 - p)."""
    chex.assert_equal_shape([chosen, rejected])
    return _log_odds(chosen) - _log_odds(rejected)


def kto(log_ratio: Array, point: Array, desirable: Array, beta: float) -> Array:
    """1 - σ(β (h_i - z)) where the answer is desirable, 1 - σ(β (z - h_i)) where it is not.

    Here each entry is one answer: log_ratio f32[N] is its h_i = a_i - r_i, desirable bool[N]; point f32[N] is z.
    """
    chex.assert_equal_shape([log_ratio, point, desirable])
    return jax.nn.sigmoid(jnp.where(desirable, 1.0, -1.0) * beta * (point - log_ratio))


def bradley_terry(chosen: Array, rejected: Array, margin: Array, center: float) -> Array:
    """-log σ(s_w - s_l - m) + c (s_w + s_l)², s the scores of a reward model."""
    chex.assert_equal_shape([chosen, rejected, margin])
    return jax.nn.softplus(rejected + margin - chosen) + center * (chosen + rejected) ** 2
