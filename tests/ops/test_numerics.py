"""Arithmetic that stays finite."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.ops import numerics


def test_safe_exp_is_flat_beyond_the_limit():
    x = jnp.array([-1e3, -20.5, 0.5, 20.5, jnp.inf])
    np.testing.assert_allclose(numerics.safe_exp(x), np.exp(np.array([-20, -20, 0.5, 20, 20])), rtol=1e-6)
    slope = jax.vmap(jax.grad(numerics.safe_exp))(x)
    np.testing.assert_allclose(slope, [0, 0, np.exp(0.5), 0, 0], rtol=1e-6)


def test_absolute_has_no_slope_at_zero():
    """jnp.abs has slope 1 there, and on-policy data has log-ratio 0 exactly."""
    x = jnp.array([-2.0, 0.0, 3.0])
    np.testing.assert_array_equal(numerics.absolute(x), [2, 0, 3])
    np.testing.assert_array_equal(jax.vmap(jax.grad(numerics.absolute))(x), [-1, 0, 1])


def test_keep_stops_nan_in_value_and_gradient():
    mask = jnp.array([True, False])

    def f(x):
        return jnp.sum(jnp.exp(numerics.keep(mask, x)))

    value, slope = jax.value_and_grad(f)(jnp.array([1.0, jnp.nan]))
    np.testing.assert_allclose(value, np.e + 1, rtol=1e-6)
    np.testing.assert_allclose(slope, [np.e, 0], rtol=1e-6)


def test_quotient_of_nothing_is_zero_with_a_finite_gradient():
    slope = jax.grad(lambda x: numerics.quotient(x, 0.0 * x))(2.0)
    assert float(numerics.quotient(jnp.float32(3), jnp.float32(0))) == 0 and np.isfinite(slope)
    assert float(numerics.quotient(jnp.float32(3), jnp.float32(2))) == 1.5
