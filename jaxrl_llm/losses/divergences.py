"""Estimators of KL(π ‖ anchor) from tokens that π sampled, and of its gradient.

x = log π - log anchor at the sampled token. Schulman, "Approximating KL divergence" (2020); for the
gradients of these estimators used as losses, arXiv 2506.09477. All expect x = 0 where masked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.ops.numerics import safe_exp

__all__ = ["k1", "k2", "k3", "k3_straight_through", "k3_weighted"]

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
