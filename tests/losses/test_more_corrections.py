"""Kernels of corrections, divergences and critics: numbers by hand, derivatives against central differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import testing
from jaxrl_llm.losses import corrections, divergences, values

LOG = np.log


def check_slope(function, x, h=1e-6):
    """The derivative of an elementwise function against a central difference, in float64."""
    with testing.float64():
        x = jnp.asarray(x, jnp.float64)
        exact = jax.grad(lambda x: jnp.sum(function(x)))(x)
        near = (np.asarray(function(x + h)) - np.asarray(function(x - h))) / (2 * h)
        np.testing.assert_allclose(exact, near, rtol=1e-6, atol=1e-8)


class TestSecondMoment:
    def kept(self, moment, limit, valid=None):
        moment = jnp.asarray(moment, jnp.float32)[None]
        valid = jnp.ones(moment.shape, bool) if valid is None else jnp.asarray(valid)[None]
        return np.asarray(corrections.second_moment_kept(moment, valid, limit))[0].tolist()

    def test_drops_the_fewest_of_the_largest(self):
        # mean 0.1125; without 0.3: 0.05; without 0.1 too: 0.025
        moment = [0.1, 0.0, 0.3, 0.05]
        assert self.kept(moment, 0.2) == [True] * 4
        assert self.kept(moment, 0.06) == [True, True, False, True]
        assert self.kept(moment, 0.04) == [False, True, False, True]

    def test_the_bound_is_strict(self):
        assert self.kept([0.0, 0.5], 0.25) == [True, False]

    def test_the_smallest_stays_whatever_the_limit(self):
        assert self.kept([3.0, 2.0, 5.0], 1e-3) == [False, True, False]

    def test_equal_values_go_together(self):
        assert self.kept([0.2, 0.0, 0.2], 0.11) == [False, True, False]
        assert self.kept([0.2, 0.2], 0.1) == [True, True]  # both are the smallest

    def test_what_is_not_valid_does_not_count(self):
        assert self.kept([0.0, 9.0, 0.1], 0.06, [True, False, True]) == [True, False, True]

    def test_not_finite(self):
        assert self.kept([np.nan, 0.0, np.inf], 0.1) == [False, True, False]
        assert self.kept([np.nan, np.inf], 0.1) == [False, False]

    def test_nothing_valid(self):
        assert self.kept([0.1, 0.2], 0.1, [False, False]) == [False, False]


def test_stale_weight():
    age = jnp.array([-1, 0, 1, 2, 4])
    np.testing.assert_allclose(corrections.stale_weight(age, 0.5, 1), [1, 1, 1, 0.5, 0.125])
    np.testing.assert_allclose(corrections.stale_weight(age, 0.0, 0), [1, 1, 0, 0, 0])


def test_interpolated_proximal():
    behavior, current = jnp.log(jnp.array([0.2, 0.2, 0.2])), jnp.log(jnp.array([0.8, 0.8, 0.8]))
    share = jnp.array([0.0, 0.5, 1.0])
    logarithms = corrections.interpolated_proximal(behavior, current, share, False)
    np.testing.assert_allclose(logarithms, LOG([0.2, 0.4, 0.8]), rtol=1e-6)
    probabilities = corrections.interpolated_proximal(behavior, current, share, True)
    np.testing.assert_allclose(probabilities, LOG([0.2, 0.5, 0.8]), rtol=1e-6)


def test_weights_over_their_mean():
    weight, mask = jnp.array([[1.0, 3.0, 100.0]]), jnp.array([[True, True, False]])
    found = corrections.over_mean(weight, jnp.ones((1, 3)), mask)
    np.testing.assert_allclose(found[0, :2], [0.5, 1.5])
    shares = jnp.array([[1.0, 0.5, 0.5]])  # a sequence of one token, and one of two
    everywhere = jnp.ones((1, 3), bool)
    np.testing.assert_allclose(
        corrections.over_mean(jnp.array([[1.0, 3.0, 3.0]]), shares, everywhere), [[0.5, 1.5, 1.5]]
    )
    assert np.all(np.asarray(corrections.over_mean(weight, jnp.ones((1, 3)), jnp.zeros((1, 3), bool))) == 0)


def test_negative_offpolicy():
    log_ratio = jnp.array([[-0.3, -0.1, 0.0, 0.0]])  # drift of the first sequence 0.2, of the second 0
    sequence = jnp.array([[0, 0, 1, 1]])
    mask = jnp.ones((1, 4), bool)
    bad = jnp.full((1, 4), -1.0)
    found = corrections.negative_offpolicy(log_ratio, bad, sequence, mask, 0.1)
    assert found.tolist() == [[True, True, False, False]]
    assert not np.any(corrections.negative_offpolicy(log_ratio, -bad, sequence, mask, 0.1))
    assert not np.any(corrections.negative_offpolicy(log_ratio, bad, sequence, mask, 0.2))  # not above


def test_outlier_sequences():
    weight = jnp.array([[1.0, 5.0, 1.0, np.nan, 1.0, 9.0]])
    sequence = jnp.array([[0, 0, 1, 1, 2, 2]])
    mask = jnp.array([[True, True, True, True, True, False]])
    found = corrections.outlier_sequences(weight, sequence, mask, 0.5, 4.0)
    assert found.tolist() == [[True, True, True, True, False, False]]
    assert corrections.outlier_sequences(weight, sequence, mask, None, None).tolist() == [[False] * 6]


class TestEstimators:
    X = jnp.array([-0.7, 0.0, 0.4])
    R = jnp.array([0.2, 0.0, -0.5])

    def test_values(self):
        x, r = np.asarray(self.X), np.exp(np.asarray(self.R))
        np.testing.assert_allclose(divergences.magnitude(self.X), abs(x))
        np.testing.assert_allclose(divergences.k1_straight_through(self.X), x, rtol=1e-6)
        np.testing.assert_allclose(divergences.k1_weighted(self.X, self.R), r * x, rtol=1e-6)
        np.testing.assert_allclose(divergences.k1_policy_gradient(self.X, self.R), r * x, rtol=1e-6)
        np.testing.assert_allclose(divergences.k2_weighted(self.X, self.R), r * x**2 / 2, rtol=1e-6)

    def test_gradients_in_the_log_prob(self):
        """x and log r move with the log-prob alike."""
        x, r = np.asarray(self.X), np.exp(np.asarray(self.R))
        both = {
            divergences.k1_weighted: r * (x + 1),
            divergences.k1_policy_gradient: r * x,
            divergences.k2_weighted: r * (x**2 / 2 + x),
        }
        for function, expected in both.items():
            grad = jax.grad(lambda d, f=function: jnp.sum(f(self.X + d, self.R + d)))(jnp.zeros(3))
            np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-7)
        for function, expected in ((divergences.magnitude, np.sign(x)), (divergences.k1_straight_through, x)):
            grad = jax.grad(lambda d, f=function: jnp.sum(f(self.X + d)))(jnp.zeros(3))
            np.testing.assert_allclose(grad, expected, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("far", [-800.0, 800.0])
    def test_far_apart_is_finite(self, far):
        x = jnp.array([far])
        for function in (divergences.k1_weighted, divergences.k1_policy_gradient, divergences.k2_weighted):
            value, grad = jax.value_and_grad(lambda x, f=function: jnp.sum(f(x, x)))(x)
            assert np.isfinite(value) and np.all(np.isfinite(grad))


class TestDistributions:
    S, T = LOG([[0.5, 0.25, 0.25]]), LOG([[0.25, 0.25, 0.5]])

    def test_by_hand(self):
        kl = 0.25 * LOG(0.5) + 0.5 * LOG(2.0)
        np.testing.assert_allclose(divergences.forward_kl(self.S, self.T), [kl], rtol=1e-6)
        uneven = LOG([[0.25, 0.5, 0.25]])
        np.testing.assert_allclose(
            divergences.reverse_kl(uneven, LOG([[0.5, 0.25, 0.25]])), [0.25 * LOG(2.0)], rtol=1e-6
        )
        middle = LOG([[0.375, 0.25, 0.375]])
        half = 0.5 * divergences.forward_kl(middle, self.T) + 0.5 * divergences.forward_kl(middle, self.S)
        np.testing.assert_allclose(divergences.jensen_shannon(self.S, self.T, 0.5), half, rtol=1e-6)

    def test_jensen_shannon_is_bounded_where_kl_is_not(self):
        far = LOG([[1.0 - 2e-30, 1e-30, 1e-30]]), LOG([[1e-30, 1e-30, 1.0 - 2e-30]])
        with testing.float64():
            assert float(divergences.jensen_shannon(*map(jnp.asarray, far), 0.5)[0]) <= LOG(2.0) + 1e-12

    def test_slopes(self):
        rng = np.random.default_rng(0)
        logits, teacher = rng.normal(size=(1, 5)), rng.normal(size=(1, 5))

        def of(function):
            with testing.float64():
                there = jax.nn.log_softmax(jnp.asarray(teacher))
            return lambda z: function(jax.nn.log_softmax(jnp.append(z, logits[0, 1:])), there[0])

        for function in (
            divergences.forward_kl,
            divergences.reverse_kl,
            lambda s, t: divergences.jensen_shannon(s, t, 0.3),
            lambda s, t: divergences.forward_kl(divergences.with_rest(s[:2]), divergences.with_rest(t[:2])),
        ):
            check_slope(of(function), logits[0, :1])

    def test_the_rest_is_one_entry(self):
        found = np.exp(divergences.with_rest(jnp.log(jnp.array([[0.5, 0.2], [0.6, 0.4]]))))
        np.testing.assert_allclose(found, [[0.5, 0.2, 0.3], [0.6, 0.4, 1e-12]], rtol=1e-5, atol=1e-6)


class TestValues:
    V, OLD, R = jnp.array([1.0, 1.0, 1.0]), jnp.array([0.0, 0.9, 0.0]), jnp.array([2.0, 2.0, 0.0])

    def test_clipped(self):
        # v_c = 0.2, 1.0, 0.2: errors 1, 1, 1 against 3.24, 1, 0.04
        np.testing.assert_allclose(
            values.clipped_square_error(self.V, self.R, self.OLD, 0.2), [1.62, 0.5, 0.5], rtol=1e-6
        )
        assert values.value_clipped(self.V, self.R, self.OLD, 0.2).tolist() == [True, False, False]

    def test_gradient_is_cut_where_clipped(self):
        def total(v):
            return jnp.sum(values.clipped_square_error(v, self.R, self.OLD, 0.2))

        np.testing.assert_allclose(jax.grad(total)(self.V), [0.0, -1.0, 1.0], atol=1e-6)

    def test_square_error(self):
        np.testing.assert_allclose(values.square_error(self.V, self.R), [0.5, 0.5, 0.5])
        check_slope(lambda v: values.square_error(v, jnp.asarray(self.R, v.dtype)), [0.3, -2.0, 5.0])
