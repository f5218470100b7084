"""Divergences: estimators of KL(π ‖ anchor) from tokens that π sampled, and sums over a distribution.

x = log π - log anchor at the sampled token. Schulman, "Approximating KL divergence" (2020); for the
gradients of these estimators used as losses, arXiv 2506.09477. All expect x = 0 where masked.

The sums run over the last axis: the vocabulary, or the top k of the teacher.
"""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import absolute, safe_exp

__all__ = [
    "KINDS",
    "Divergence",
    "forward_kl",
    "forward_kl_slope",
    "jensen_shannon",
    "jensen_shannon_slope",
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
    "reverse_kl_slope",
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


def forward_kl_slope(student: Array, teacher: Array) -> Array:
    """d KL(T ‖ S) / dz = p_S - p_T, z the logits of the student; f[..., V] from log-probs of the whole vocabulary."""
    chex.assert_equal_shape([student, teacher])
    return jnp.exp(student) - jnp.exp(teacher)


def reverse_kl_slope(student: Array, teacher: Array) -> Array:
    """d KL(S ‖ T) / dz = p_S (log p_S - log p_T - KL(S ‖ T)), as `forward_kl_slope`."""
    chex.assert_equal_shape([student, teacher])
    p, gap = jnp.exp(student), student - teacher
    return p * (gap - jnp.sum(p * gap, axis=-1, keepdims=True))


def jensen_shannon_slope(student: Array, teacher: Array, beta: float) -> Array:
    """d JSD / dz = (1 - β) p_S (log p_S - log p_M - KL(S ‖ M)), as `forward_kl_slope`.

    In dJSD / dp_S the derivatives through M add up to a constant, which a softmax does not feel.
    """
    middle = jnp.logaddexp(jnp.log1p(-beta) + student, jnp.log(beta) + teacher)
    return (1.0 - beta) * reverse_kl_slope(student, middle)


KINDS = ("forward", "reverse", "jsd")


class Divergence(NamedTuple):
    """Which divergence between teacher and student: one of `KINDS`, and the β of "jsd"."""

    kind: str
    beta: float = 0.5

    def value(self, student: Array, teacher: Array) -> Array:
        """f[...] from log-probs f[..., K]."""
        if self.kind == "jsd":
            return jensen_shannon(student, teacher, self.beta)
        return (forward_kl if self.kind == "forward" else reverse_kl)(student, teacher)

    def slope(self, student: Array, teacher: Array) -> Array:
        """f[..., V]: derivative with respect to the student's logits."""
        if self.kind == "jsd":
            return jensen_shannon_slope(student, teacher, self.beta)
        return (forward_kl_slope if self.kind == "forward" else reverse_kl_slope)(student, teacher)


def with_rest(logprob: Array) -> Array:
    """f[..., K + 1]: log-probs of K entries, and of all others together (at least 1e-12)."""
    rest = jnp.clip(1.0 - jnp.sum(jnp.exp(logprob), axis=-1, keepdims=True), 1e-12, 1.0)
    return jnp.concatenate([logprob, jnp.log(rest)], axis=-1)
