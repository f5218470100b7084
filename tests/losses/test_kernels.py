"""Kernels: numbers computed by hand, and derivatives against central differences in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import testing
from jaxrl_llm.losses import advantages, corrections, divergences, ratios, rewards, surrogates
from jaxrl_llm.ops.segments import Groups

LOG = np.log


def slope(function, x, h=1e-6):
    """Central difference of an elementwise function."""
    return (np.asarray(function(x + h)) - np.asarray(function(x - h))) / (2 * h)


def check_slope(function, x):
    with testing.float64():
        x = jnp.asarray(x, jnp.float64)
        exact = jax.grad(lambda x: jnp.sum(function(x)))(x)
        np.testing.assert_allclose(exact, slope(function, x), rtol=1e-7, atol=1e-8)


class TestSurrogates:
    RATIO = jnp.log(jnp.array([0.5, 0.9, 1.0, 1.1, 1.5]))

    def test_clipped_for_a_good_token(self):
        loss = surrogates.clipped(self.RATIO, jnp.full(5, 2.0), 0.2, 0.3)
        np.testing.assert_allclose(loss, [-1.0, -1.8, -2.0, -2.2, -2.6], rtol=1e-6)

    def test_clipped_for_a_bad_token(self):
        loss = surrogates.clipped(self.RATIO, jnp.full(5, -2.0), 0.2, 0.3)
        np.testing.assert_allclose(loss, [1.6, 1.8, 2.0, 2.2, 3.0], rtol=1e-6)

    def test_dual_clip_binds_for_bad_tokens_only(self):
        log_ratio = jnp.log(jnp.array([5.0, 5.0]))
        advantage = jnp.array([1.0, -1.0])
        loss = surrogates.dual_clipped(surrogates.clipped(log_ratio, advantage, 0.2, 0.2), advantage, 3.0)
        np.testing.assert_allclose(loss, [-1.2, 3.0], rtol=1e-6)
        np.testing.assert_array_equal(
            surrogates.dual_clipped_tokens(log_ratio, advantage, 3.0), [False, True]
        )

    def test_clipped_tokens(self):
        good, bad = jnp.ones(5), -jnp.ones(5)
        np.testing.assert_array_equal(surrogates.clipped_high(self.RATIO, good, 0.2), [0, 0, 0, 0, 1])
        np.testing.assert_array_equal(surrogates.clipped_low(self.RATIO, bad, 0.2), [1, 0, 0, 0, 0])
        assert not np.any(surrogates.clipped_high(self.RATIO, bad, 0.2))

    @pytest.mark.parametrize("advantage", [1.3, -0.7, 0.0])
    def test_slopes(self, advantage):
        x = np.array([-1.0, -0.3, -0.1, 0.05, 0.1, 0.4, 1.5])
        check_slope(lambda d: surrogates.clipped(d, jnp.full(d.shape, advantage), 0.2, 0.28), x)
        check_slope(lambda lp: surrogates.reinforce(lp, jnp.full(lp.shape, advantage)), x)

    def test_slope_beyond_the_log_ratio_limit_is_zero_and_finite(self):
        d = jnp.array([25.0, -25.0, 1e4])
        slopes = jax.grad(lambda d: jnp.sum(surrogates.clipped(d, -jnp.ones(3), 0.2, 0.2)))(d)
        np.testing.assert_array_equal(slopes, [0, 0, 0])


class TestDivergences:
    def test_n10_k3_is_of_the_inverse_ratio(self):
        """log p = -1, log ref = -2: k3 = e^-1 - 1 + 1."""
        np.testing.assert_allclose(divergences.k3(jnp.float32(1.0)), np.exp(-1), rtol=1e-6)

    def test_n10_k3_is_an_unbiased_kl_estimate(self):
        p, q = np.array([0.7, 0.3]), np.array([0.4, 0.6])
        x = jnp.asarray(LOG(p / q))
        np.testing.assert_allclose(np.sum(p * divergences.k3(x)), 0.183787, atol=1e-6)
        np.testing.assert_allclose(np.sum(p * divergences.k1(x)), np.sum(p * LOG(p / q)), rtol=1e-6)
        np.testing.assert_allclose(np.sum(p * divergences.k2(x)), 0.181677, atol=1e-6)

    @pytest.mark.parametrize(
        "estimator, expected",
        [
            (divergences.k1, lambda x: np.ones_like(x)),
            (divergences.k2, lambda x: x),
            (divergences.k3, lambda x: 1 - np.exp(-x)),
            (divergences.k3_straight_through, lambda x: x),
        ],
    )
    def test_n10_gradients_are_the_documented_ones(self, estimator, expected):
        with testing.float64():
            x = jnp.array([-2.0, -0.1, 0.0, 0.3, 4.0])
            np.testing.assert_allclose(jax.vmap(jax.grad(estimator))(x), expected(np.asarray(x)), atol=1e-12)

    def test_n10_gradient_of_the_expected_k3_is_that_of_the_exact_kl(self):
        """Differentiated through p as a distribution; and E[∇ k3_straight_through] is the reverse KL's."""
        with testing.float64():
            q = jnp.log(jnp.array([0.4, 0.6]))
            logits = jnp.array([0.4, -0.3])

            def expected(kernel):
                def value(z):
                    p = jax.nn.log_softmax(z)
                    return jnp.sum(jnp.exp(p) * kernel(p - q))

                return jax.grad(value)(logits)

            exact = expected(divergences.k1)  # Σ p (log p - log q)
            np.testing.assert_allclose(expected(divergences.k3), exact, atol=1e-12)

            def sampled(z):
                logp = jax.nn.log_softmax(z)
                weight = jax.lax.stop_gradient(jnp.exp(logp))
                return jnp.sum(weight * divergences.k3_straight_through(logp - q))

            np.testing.assert_allclose(jax.grad(sampled)(logits), exact, atol=1e-12)

    def test_straight_through_has_the_value_of_k3(self):
        x = jnp.array([-1.0, 0.5])
        np.testing.assert_allclose(divergences.k3_straight_through(x), divergences.k3(x), rtol=1e-6)

    def test_k3_keeps_its_digits_near_zero(self):
        """e^-x - 1 + x in f32 loses all of them at x = 1e-3."""
        np.testing.assert_allclose(divergences.k3(jnp.float32(1e-3)), 1e-6 / 2, rtol=1e-3)

    def test_k3_weighted(self):
        x, d = jnp.float32(0.5), jnp.float32(0.2)
        np.testing.assert_allclose(
            divergences.k3_weighted(x, d), np.exp(0.2) * (np.exp(-0.5) - 0.5), rtol=1e-5
        )
        # gradient r x when both move with log π
        with testing.float64():
            gradient = jax.grad(lambda lp: divergences.k3_weighted(lp + 0.5, lp + 0.2))(0.0)
            np.testing.assert_allclose(gradient, np.exp(0.2) * 0.5, rtol=1e-12)

    @pytest.mark.parametrize("estimator", [divergences.k1, divergences.k2, divergences.k3])
    def test_slopes(self, estimator):
        check_slope(estimator, np.array([-3.0, -0.2, 0.1, 1.0, 5.0]))


class TestRatios:
    MASK = jnp.array([[False, True, True, False, False]])
    SEQUENCE = jnp.zeros((1, 5), int)

    def log_ratio(self, padded, kernel=ratios.sequence_log_ratio):
        lp = jnp.array([[0.0, 0.2, 0.4, padded, padded]])
        return kernel(lp, jnp.zeros((1, 5)), self.SEQUENCE, self.MASK)

    @pytest.mark.parametrize("kernel", [ratios.sequence_log_ratio, ratios.sequence_log_ratio_per_token])
    def test_n13_sequence_ratio_is_the_geometric_mean_of_trained_tokens(self, kernel):
        first, second = self.log_ratio(-2.0, kernel), self.log_ratio(-6.0, kernel)
        np.testing.assert_allclose(jnp.exp(first)[0, 1:3], [1.34986, 1.34986], rtol=1e-5)
        np.testing.assert_array_equal(first, second)

    def test_n13_gradient_is_shared_by_trained_tokens_only(self):
        lp = jnp.array([[0.0, 0.2, 0.4, -2.0, -2.0]])

        def first_token(lp):
            return ratios.sequence_log_ratio(lp, jnp.zeros_like(lp), self.SEQUENCE, self.MASK)[0, 1]

        np.testing.assert_allclose(jax.grad(first_token)(lp), [[0, 0.5, 0.5, 0, 0]])

    def test_per_token_form_has_the_gradient_of_its_token(self):
        lp = jnp.array([[0.0, 0.2, 0.4, -2.0, -2.0]])

        def first_token(lp):
            kernel = ratios.sequence_log_ratio_per_token
            return kernel(lp, jnp.zeros_like(lp), self.SEQUENCE, self.MASK)[0, 1]

        np.testing.assert_allclose(jax.grad(first_token)(lp), [[0, 1, 0, 0, 0]])

    def test_token_ratio_is_zero_under_the_mask(self):
        lp = jnp.array([[jnp.nan, -1.0, -2.0, jnp.inf, 3.0]])
        d = ratios.token_log_ratio(lp, jnp.full((1, 5), -1.5), self.MASK)
        np.testing.assert_allclose(d, [[0, 0.5, -0.5, 0, 0]])


def stats(values):
    values = jnp.asarray(values, jnp.float32)
    n = float(values.size)
    return Groups(
        size=jnp.full(values.shape, n),
        mean=jnp.full(values.shape, values.mean()),
        deviation=values - values.mean(),
        square=jnp.full(values.shape, jnp.sum((values - values.mean()) ** 2)),
        constant=jnp.full(values.shape, bool(values.min() == values.max())),
    )


class TestAdvantages:
    def test_n04_std_with_both_ddof(self):
        four = stats([1, 0, 0, 0])
        np.testing.assert_allclose(
            advantages.centered_by_std(four, 1, 0.0), [1.5, -0.5, -0.5, -0.5], rtol=1e-5
        )
        np.testing.assert_allclose(
            advantages.centered_by_std(four, 0, 0.0), [1.7321, -0.57735, -0.57735, -0.57735], rtol=1e-4
        )
        np.testing.assert_allclose(
            advantages.centered_by_std(stats([1, 0]), 1, 0.0), [0.70711, -0.70711], rtol=1e-4
        )

    def test_leave_one_out(self):
        np.testing.assert_allclose(advantages.leave_one_out(stats([1, 0, 0, 0])), [1, -1 / 3, -1 / 3, -1 / 3])

    def test_centered_by_mean(self):
        np.testing.assert_allclose(advantages.centered_by_mean(stats([1, 0, 0, 0]), 0.0), [3, -1, -1, -1])
        np.testing.assert_array_equal(advantages.centered_by_mean(stats([-1, 0, 0, 0]), 0.0), [0, 0, 0, 0])

    def test_whitened(self):
        values = jnp.array([[1.0, 2.0, 3.0, jnp.nan]])
        mask = jnp.array([[True, True, True, False]])
        np.testing.assert_allclose(advantages.whitened(values, mask, 1, 0.0), [[-1, 0, 1, 0]], atol=1e-6)
        same = advantages.whitened(jnp.full((1, 4), 0.3), mask, 1, 1e-8)
        np.testing.assert_array_equal(same, jnp.zeros((1, 4)))

    def test_returns(self):
        reward = jnp.array([[0.0, 1.0, 5.0, 2.0]])
        mask = jnp.array([[True, True, False, True]])
        ids = jnp.zeros((1, 4), int)
        np.testing.assert_allclose(advantages.discounted_returns(reward, 0.5, ids, mask), [[1, 2, 0, 2]])


class TestCorrections:
    Q = jnp.log(jnp.array([[2.0, 0.5, 4.0, 1.0]]))
    SEQUENCE = jnp.array([[4, 4, 4, 9]])
    MASK = jnp.array([[True, True, True, False]])

    def test_levels(self):
        args = (self.Q, self.SEQUENCE, self.MASK)
        np.testing.assert_allclose(corrections.token_weight(*args), [[2, 0.5, 4, 1]], rtol=1e-6)
        np.testing.assert_allclose(corrections.sequence_weight(*args), [[4, 4, 4, 1]], rtol=1e-6)
        np.testing.assert_allclose(corrections.geometric_weight(*args), [[4 ** (1 / 3)] * 3 + [1]], rtol=1e-6)

    def test_truncated_and_inside(self):
        w = jnp.array([0.2, 1.0, 3.0])
        np.testing.assert_allclose(corrections.truncated(w, 2.0, None), [0.2, 1, 2])
        np.testing.assert_allclose(corrections.truncated(w, 2.0, 0.5), [0.5, 1, 2])
        np.testing.assert_array_equal(corrections.inside(w, 0.2, 2.0), [True, True, False])
        np.testing.assert_array_equal(corrections.inside(w, None, None), [True, True, True])


def test_overlong_penalty_by_hand():
    lengths = jnp.array([1.0, 768.0, 896.0, 1024.0, 2000.0])
    np.testing.assert_allclose(rewards.overlong_penalty(lengths, 1024, 256, 2.0), [0, 0, -1, -2, -2])
