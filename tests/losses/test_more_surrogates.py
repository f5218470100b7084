"""Kernels of the surrogates beyond PPO's clip: numbers computed by hand, and derivatives against differences."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import testing
from jaxrl_llm.losses import surrogates, trust

LN2 = np.log(2.0)


def check_slope(function, x, h=1e-6):
    """jax.grad of an elementwise function against a central difference, in float64."""
    with testing.float64():
        x = jnp.asarray(x, jnp.float64)
        exact = jax.grad(lambda x: jnp.sum(function(x)))(x)
        rough = (np.asarray(function(x + h)) - np.asarray(function(x - h))) / (2 * h)
        np.testing.assert_allclose(exact, rough, rtol=1e-6, atol=1e-8)


class TestCappedScore:
    def test_the_weight_is_the_ratio_within_the_bounds(self):
        ratio = jnp.log(jnp.array([0.25, 0.5, 3.0, 9.0]))
        value = surrogates.capped_score(jnp.full(4, -1.0), ratio, jnp.full(4, 2.0), 0.5, 4.0)
        np.testing.assert_allclose(value, [1.0, 1.0, 6.0, 8.0], rtol=1e-6)

    def test_a_capped_token_keeps_its_gradient(self):
        def total(logprob):  # the anchor is -1, so the ratio of the last token is e^9
            return jnp.sum(surrogates.capped_score(logprob, logprob + 1.0, jnp.ones(2), None, 5.0))

        np.testing.assert_allclose(jax.grad(total)(jnp.array([-1.0, 8.0])), [-1.0, -5.0], rtol=1e-6)


class TestSoftGate:
    def test_value_and_slope_at_ratio_one(self):
        advantage = jnp.array([1.0, -1.0, 0.0])
        zero = jnp.zeros(3)
        np.testing.assert_allclose(surrogates.soft_gate(zero, advantage, 2.0, 4.0), [1.0, 0.5, 0.5])
        slope = jax.grad(lambda d: jnp.sum(surrogates.soft_gate(d, advantage, 2.0, 4.0)))(zero)
        np.testing.assert_allclose(slope, 1.0)

    def test_at_ratio_two(self):
        # 4/1 σ(1 (2 - 1)) = 4 · 0.7310586
        value = surrogates.soft_gate(jnp.array([LN2]), jnp.array([1.0]), 1.0, 1.05)
        np.testing.assert_allclose(value, 4 * 0.73105858, rtol=1e-6)
        check_slope(lambda d: surrogates.soft_gate(d, jnp.ones(3), 1.0, 1.05), [-0.5, 0.1, 0.7])

    def test_is_flat_far_away(self):
        def gate(d):
            return jnp.sum(surrogates.soft_gate(d, jnp.array([1.0, -1.0]), 1.0, 1.05))

        value, slope = jax.value_and_grad(gate)(jnp.array([800.0, -800.0]))
        assert np.isfinite(value) and np.array_equal(slope, [0.0, 0.0])


def test_quadratic():
    value = surrogates.quadratic(jnp.array([-2.0]), jnp.array([3.0]), jnp.array([0.5]), 0.2)
    np.testing.assert_allclose(value, 0.5 * 2.0 + 0.1 * 9.0)


class TestGeometricRatio:
    SEQUENCE = jnp.zeros((1, 4), jnp.int32)
    MASK = jnp.array([[True, True, True, False]])

    def ratio(self, d, advantage):
        return surrogates.geometric_ratio(
            jnp.array([d]), jnp.full((1, 4), advantage), self.SEQUENCE, self.MASK, 0.2, 0.4
        )[0, 0]

    def test_good_answers_are_cut_above(self):
        # (0.4 - 1 + 0.3) / 3, the masked token apart
        np.testing.assert_allclose(self.ratio([0.9, -1.0, 0.3, 7.0], 1.0), np.exp(-0.1), rtol=1e-6)

    def test_bad_answers_are_cut_below(self):
        np.testing.assert_allclose(self.ratio([0.9, -1.0, 0.3, 7.0], -1.0), np.exp(1.0 / 3), rtol=1e-6)

    def test_without_advantage_nothing_moves(self):
        assert self.ratio([0.9, -1.0, 0.3, 7.0], 0.0) == 1.0

    def test_no_trained_token(self):
        none = jnp.zeros((1, 4), bool)
        value = surrogates.geometric_ratio(jnp.ones((1, 4)), jnp.ones((1, 4)), self.SEQUENCE, none, 0.2, 0.4)
        assert np.all(np.asarray(value) == 1.0)


class TestSequenceGammaWeight:
    def weight(self, d, advantage):
        d = jnp.asarray([d])
        return surrogates.sequence_gamma_weight(
            d, jnp.full(d.shape, advantage), jnp.zeros(d.shape, jnp.int32), d > -1e9, (2.0, 3.0), (3.0, 2.0)
        )[0]

    def test_is_one_on_policy(self):
        np.testing.assert_allclose(self.weight([0.0, 0.0], 1.0), 1.0, rtol=1e-6)

    def test_at_twice_the_probability(self):
        # W = 2: W^k e^{λ (1 - W)} = 4 e^-3 and 8 e^-2
        np.testing.assert_allclose(self.weight([0.5, LN2 - 0.5], 1.0), 4 * np.exp(-3.0), rtol=1e-5)
        np.testing.assert_allclose(self.weight([LN2, 0.0], -1.0), 8 * np.exp(-2.0), rtol=1e-5)

    def test_extremes_are_finite(self):
        assert np.array_equal(self.weight([800.0, 800.0], 1.0), [0.0, 0.0])
        np.testing.assert_allclose(self.weight([-800.0, 0.0], 1.0), np.exp(3.0) * 1e-16, rtol=1e-3)


def test_shrunk_bound():
    ages = jnp.array([0.0, 1.0, 2.0, 9.0])
    np.testing.assert_allclose(surrogates.shrunk_bound(0.4, ages, 0.5, 0.05), [0.4, 0.2, 0.1, 0.05])
    # The floor never widens a bound.
    np.testing.assert_allclose(surrogates.shrunk_bound(0.01, ages, 0.5, 0.05), 0.01)


class TestDivergences:
    P, P0 = jnp.log(jnp.array([0.5, 0.1])), jnp.log(jnp.array([0.25, 0.1]))

    def test_binary_tv(self):
        np.testing.assert_allclose(trust.binary_tv(self.P, self.P0), [0.25, 0.0], atol=1e-7)

    def test_binary_kl(self):
        # 1/4 log(1/2) + 3/4 log(3/2)
        expected = 0.25 * np.log(0.5) + 0.75 * np.log(1.5)
        np.testing.assert_allclose(trust.binary_kl(self.P, self.P0), [expected, 0.0], atol=1e-6)

    def test_certain_and_impossible_tokens(self):
        value = trust.binary_kl(jnp.array([0.0, -800.0, 0.0]), jnp.array([0.0, 0.0, -800.0]))
        assert np.all(np.isfinite(value)) and abs(float(value[0])) < 1e-6

    def test_lists_with_a_bucket_for_the_rest(self):
        current = jnp.log(jnp.array([[[0.5, 0.3]]]))
        anchor = jnp.log(jnp.array([[[0.25, 0.25]]]))
        np.testing.assert_allclose(trust.topk_tv(current, anchor), [[0.5 * (0.25 + 0.05 + 0.3)]], rtol=1e-5)
        expected = 0.25 * np.log(0.5) + 0.25 * np.log(0.25 / 0.3) + 0.5 * np.log(0.5 / 0.2)
        np.testing.assert_allclose(trust.topk_kl(current, anchor), [[expected]], rtol=1e-5)

    def test_a_list_of_everything_has_no_rest(self):
        everything = jnp.log(jnp.array([[[0.5, 0.5]]]))
        for divergence in (trust.topk_kl, trust.topk_tv):
            np.testing.assert_allclose(divergence(everything, everything), 0.0, atol=1e-6)

    def test_only_moves_in_the_direction_of_the_advantage_count(self):
        far, p, q = jnp.full(4, 1.0), jnp.array([-1.0, -2.0, -1.0, -2.0]), jnp.full(4, -1.5)
        below, above = trust.outside_trust(far, p, q, jnp.array([1.0, 1.0, -1.0, -1.0]), 0.5, 0.5)
        assert np.array_equal(above, [True, False, False, False])
        assert np.array_equal(below, [False, False, False, True])
        below, above = trust.outside_trust(far, p, q, jnp.array([1.0, 1.0, -1.0, -1.0]), 1.0, 1.0)
        assert not np.any(below) and not np.any(above)  # exactly at the threshold is inside


class TestRanks:
    def test_covariance(self):
        advantage, logprob = jnp.array([[1.0, -1.0, 9.0]]), jnp.array([[-1.0, -3.0, jnp.nan]])
        counted = jnp.array([[True, True, False]])
        np.testing.assert_allclose(trust.covariance(advantage, logprob, counted), [[1.0, 1.0, 0.0]])
        assert np.all(np.asarray(trust.covariance(advantage, logprob, counted & False)) == 0)

    def test_largest_takes_ties_and_stays_among(self):
        score = jnp.array([[3.0, 1.0, 2.0], [2.0, 9.0, 0.0]])
        among = jnp.array([[True, True, True], [True, False, True]])
        assert np.array_equal(
            trust.largest(score, among, jnp.int32(2)), [[True, False, True], [True, False, False]]
        )
        assert not np.any(trust.largest(score, among, jnp.int32(0)))
        assert not np.any(trust.largest(score, among & False, jnp.int32(2)))
        assert np.array_equal(trust.largest(score, among, jnp.int32(100)), among)

    def test_hash_is_uniform_and_reads_every_word(self):
        numbers = np.asarray(trust.hash_uniform(jnp.arange(4096), jnp.zeros(4096, jnp.int32)))
        counts, _ = np.histogram(numbers, bins=8, range=(0.0, 1.0))
        assert np.all(np.abs(counts - 512) < 5 * np.sqrt(512))
        other = np.asarray(trust.hash_uniform(jnp.arange(4096), jnp.ones(4096, jnp.int32)))
        assert abs(np.corrcoef(numbers, other)[0, 1]) < 0.08

    def test_quantile_of_each_sequence(self):
        rng = np.random.default_rng(0)
        values = rng.normal(size=(2, 9))
        sequence = np.array([[5, 5, 5, 5, 2, 2, 2, 7, -1], [1] * 9])
        mask = np.array([[1, 0, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1]], bool)
        found = np.asarray(
            trust.sequence_quantile(jnp.asarray(values), jnp.asarray(sequence), jnp.asarray(mask), 0.8)
        )
        for row in range(2):
            for name in set(sequence[row]):
                at = sequence[row] == name
                inside = values[row][at & mask[row]]
                expected = np.quantile(inside, 0.8) if len(inside) else 0.0
                np.testing.assert_allclose(found[row][at], expected, rtol=1e-5)


def test_spread_ratio_keeps_the_value_and_moves_a_share_of_the_gradient():
    log_ratio, lists = jnp.array([[LN2]]), jnp.array([[[0.5, -1.0]]])
    share = jnp.array([[0.3]])
    value, (own, listed) = jax.value_and_grad(
        lambda *x: jnp.sum(trust.spread_ratio(*x, share)), argnums=(0, 1)
    )(log_ratio, lists)
    np.testing.assert_allclose(value, 2.0, rtol=1e-6)
    np.testing.assert_allclose(own, [[0.7 * 2.0]], rtol=1e-6)
    np.testing.assert_allclose(listed, [[[0.3, 0.3]]], rtol=1e-6)  # a share · r / K each, K = 2
