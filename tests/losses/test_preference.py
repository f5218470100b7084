"""Preference kernels: numbers by hand, derivatives against central differences, finite at any log-ratio."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import testing
from jaxrl_llm.losses import preference

FAR = jnp.array([-800.0, -3.0, 0.0, 3.0, 800.0])


def both(function, x):
    """(values, derivatives) of an elementwise function, in float64."""
    with testing.float64():
        x = jnp.asarray(x, jnp.float64)
        value, slope = function(x), jax.grad(lambda x: jnp.sum(function(x)))(x)
        step = 1e-6
        np.testing.assert_allclose(
            slope, (function(x + step) - function(x - step)) / (2 * step), rtol=1e-6, atol=1e-8
        )
        return np.asarray(value), np.asarray(slope)


def test_logistic():
    value, slope = both(lambda x: preference.logistic(x, 0.0), [0.0, np.log(3.0), -np.log(3.0)])
    np.testing.assert_allclose(value, np.log([2.0, 4.0 / 3.0, 4.0]))
    np.testing.assert_allclose(slope, [-0.5, -0.25, -0.75])


def test_smoothed_labels():
    x = [np.log(3.0)]  # log σ(x) = log ¾, log σ(-x) = log ¼
    value, slope = both(lambda x: preference.logistic(x, 0.1), x)
    np.testing.assert_allclose(value, [-0.9 * np.log(0.75) - 0.1 * np.log(0.25)])
    np.testing.assert_allclose(slope, [-0.9 * 0.25 + 0.1 * 0.75])


def test_robust():
    value, slope = both(lambda x: preference.robust_logistic(x, 0.1), [np.log(3.0)])
    np.testing.assert_allclose(value, [(-0.9 * np.log(0.75) + 0.1 * np.log(0.25)) / 0.8])
    np.testing.assert_allclose(slope, [(-0.9 * 0.25 - 0.1 * 0.75) / 0.8])


def test_robust_is_unbiased_under_flipped_labels():
    x, flipped = jnp.linspace(-3.0, 3.0, 7), 0.2
    expected = (1 - flipped) * preference.robust_logistic(x, flipped) + flipped * preference.robust_logistic(
        -x, flipped
    )
    np.testing.assert_allclose(expected, preference.logistic(x, 0.0), rtol=1e-5)


def test_square():
    value, slope = both(lambda h: preference.square(h, 0.1), [0.0, 5.0, 6.0])
    np.testing.assert_allclose(value, [25.0, 0.0, 1.0])
    np.testing.assert_allclose(slope, [-10.0, 0.0, 2.0])


def test_hinge():
    value, slope = both(preference.hinge, [-1.0, 0.5, 2.0])
    np.testing.assert_allclose(value, [2.0, 0.5, 0.0])
    np.testing.assert_allclose(slope, [-1.0, -1.0, 0.0])
    assert jax.grad(preference.hinge)(1.0) == 0.0


def test_log_odds_ratio():
    # probabilities ¾ and ½: odds 3 and 1
    value, slope = both(
        lambda a: preference.log_odds_ratio(a, jnp.log(jnp.full(a.shape, 0.5))), np.log([0.75, 0.5, 0.1])
    )
    np.testing.assert_allclose(value, np.log([3.0, 1.0, 1.0 / 9.0]), atol=1e-12)
    np.testing.assert_allclose(slope, [4.0, 2.0, 1.0 / 0.9])  # 1 / (1 - p)


@pytest.mark.parametrize("a", [0.0, -1e-12, -1e-7, -1e-5, -800.0])
def test_log_odds_are_finite_at_both_ends(a):
    value, slope = jax.value_and_grad(lambda a: preference.log_odds_ratio(a, jnp.float32(-1.0)))(
        jnp.float32(a)
    )
    assert np.isfinite(value) and np.isfinite(slope)


def test_kto():
    # β (h - z) = ± log 3: 1 - σ = ¼ or ¾
    with testing.float64():
        h = jnp.array([1.0, 1.0, 0.0]) * np.log(3.0)
        point = jnp.zeros(3)
        good = jnp.array([True, False, True])
        value = preference.kto(h, point, good, 1.0)
        np.testing.assert_allclose(value, [0.25, 0.75, 0.5])
        slope = jax.grad(lambda h: jnp.sum(preference.kto(h, point, good, 2.0)))(jnp.zeros(3))
        np.testing.assert_allclose(slope, [-0.5, 0.5, -0.5])


def test_bradley_terry():
    with testing.float64():
        chosen, rejected = jnp.array([np.log(3.0), 2.0]), jnp.array([0.0, 1.0])
        zero = jnp.zeros(2)
        value = preference.bradley_terry(chosen, rejected, zero, 0.0)
        np.testing.assert_allclose(value, [np.log(4.0 / 3.0), np.log1p(np.exp(-1.0))])
        value = preference.bradley_terry(chosen, rejected, zero + 1.0, 0.5)
        np.testing.assert_allclose(value[1], np.log(2.0) + 0.5 * 9.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: preference.logistic(x, 0.1),
        lambda x: preference.robust_logistic(x, 0.1),
        lambda x: preference.square(x, 0.1),
        preference.hinge,
        lambda x: preference.kto(x, jnp.zeros_like(x), x > 1.0, 0.1),
        lambda x: preference.bradley_terry(x, -x, jnp.zeros_like(x), 0.01),
    ],
)
def test_finite_in_f32_at_log_ratios_of_800(function):
    value, slope = function(FAR), jax.grad(lambda x: jnp.sum(function(x)))(FAR)
    assert np.all(np.isfinite(value)) and np.all(np.isfinite(slope))
