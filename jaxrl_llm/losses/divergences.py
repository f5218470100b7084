"""Divergences: estimators of KL(π ‖ anchor) from tokens that π sampled, and sums over a distribution.

x = log π - log anchor at the sampled token. Schulman, "Approximating KL divergence" (2020); for the
gradients of these estimators used as losses, arXiv 2506.09477. All expect x = 0 where masked.

The sums run over the last axis: the vocabulary, or the top k of the teacher.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import absolute, safe_exp

__all__ = [
    "forward_kl",
    "jensen_shannon",
    "k1",
    "k1_policy_gradient",
    "k1_straight_through",
    "k1_weighted",
    "k2",
    "k2_weighted",
    "k3",
    "k3_straight_through",
    "k3_weighted",
    "magnitude",
    "reverse_kl",
    "with_rest",
]

Array = jax.Array


def k1(x: Array) -> Array:
    """x. Unbiased value; as a loss its expected gradient is 0: for monitoring or in the reward."""
    return x


def k2(x: Array) -> Array:
    """x² / 2. Biased value; gradient x ∇log π, the gradient of the reverse KL."""
    return 0.5 * x**2


def k3(x: Array) -> Array:
    """e^{-x} - 1 + x. Unbiased and non-negative; gradient (1 - e^{-x}) ∇log π, that of the *forward* KL.

    expm1 and not exp: near x = 0 the value is x²/2, which e^{-x} - 1 + x would lose to cancellation.
    """
    limited = jnp.clip(-x, -20.0, 20.0)
    return jnp.expm1(limited) + x


def k3_straight_through(x: Array) -> Array:
    """Value of k3, gradient of k2: the reverse KL's. Equals exp(log π - sg(log π)) · k3."""
    return k2(x) - jax.lax.stop_gradient(k2(x)) + jax.lax.stop_gradient(k3(x))


def k3_weighted(x: Array, log_ratio: Array) -> Array:
    """r · k3 with the differentiable ratio r = π / behavior: gradient r x ∇log π (DeepSeek-V3.2).

    Unbiased for the reverse KL also when another policy sampled the tokens.
    """
    return safe_exp(log_ratio) * k3(x)


def magnitude(x: Array) -> Array:
    """|x|. Biased; gradient sign(x) ∇log π, and 0 at x = 0."""
    return absolute(x)


def k1_straight_through(x: Array) -> Array:
    """Value of k1, gradient of k2: the reverse KL's."""
    return k2(x) - jax.lax.stop_gradient(k2(x)) + jax.lax.stop_gradient(x)


def k1_weighted(x: Array, log_ratio: Array) -> Array:
    """r · x with the differentiable r = π / behavior: gradient r (x + 1) ∇log π, unbiased for the reverse KL."""
    return safe_exp(log_ratio) * x


def k1_policy_gradient(x: Array, log_ratio: Array) -> Array:
    """r · sg(x): gradient r x ∇log π, REINFORCE with the advantage log anchor - log π at every token."""
    return safe_exp(log_ratio) * jax.lax.stop_gradient(x)


def k2_weighted(x: Array, log_ratio: Array) -> Array:
    """r · x²/2: gradient r (x²/2 + x) ∇log π."""
    return safe_exp(log_ratio) * k2(x)


# --------------------------------------------------------------------- sums over a distribution


def forward_kl(student: Array, teacher: Array) -> Array:
    """KL(teacher ‖ student) = Σ p_T (log p_T - log p_S), from log-probs f[..., K]."""
    chex.assert_equal_shape([student, teacher])
    return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def reverse_kl(student: Array, teacher: Array) -> Array:
    """KL(student ‖ teacher) = Σ p_S (log p_S - log p_T), from log-probs f[..., K]."""
    return forward_kl(teacher, student)


def jensen_shannon(student: Array, teacher: Array, beta: float) -> Array:
    """β KL(T ‖ M) + (1 - β) KL(S ‖ M), M = (1 - β) S + β T, 0 < β < 1 (GKD, arXiv 2306.13649, eq. 1)."""
    middle = jnp.logaddexp(jnp.log1p(-beta) + student, jnp.log(beta) + teacher)
    return beta * forward_kl(middle, teacher) + (1.0 - beta) * forward_kl(middle, student)


def with_rest(logprob: Array) -> Array:
    """f[..., K + 1]: log-probs of K entries, and of all others together (at least 1e-12)."""
    rest = jnp.clip(1.0 - jnp.sum(jnp.exp(logprob), axis=-1, keepdims=True), 1e-12, 1.0)
    return jnp.concatenate([logprob, jnp.log(rest)], axis=-1)
