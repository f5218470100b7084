"""Kernels of advantages and of shaped rewards: numbers computed by hand, or by loops over subsets and steps."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import testing
from jaxrl_llm.losses import advantages, rewards
from jaxrl_llm.ops.segments import following, groups, members, trajectories


@pytest.fixture(autouse=True, scope="module")
def double():
    with testing.float64():
        yield


SIZE = 8  # all groups are filled up to so many trajectories, so that they share compiled operations


def grouped(values, group=None, valid=None):
    """(values, stats, of) of trajectories that are one token each; further ones have no reward."""
    n, more = len(values), SIZE - len(values)
    values = jnp.asarray([*values, *[0.0] * more], jnp.float64)
    group = jnp.asarray([*(np.zeros(n, int) if group is None else group), *range(90, 90 + more)])[:, None]
    valid = jnp.asarray([*(np.ones(n, bool) if valid is None else valid), *[False] * more])
    mask = jnp.ones((SIZE, 1), bool)
    each = trajectories(jnp.arange(SIZE)[:, None], mask)
    return values, groups(values, valid, group, mask, each), members(valid, group, mask, each)


def test_members_total_over_valid_trajectories_of_the_group():
    values, _, of = grouped([1.0, 2.0, 4.0, 8.0], group=[7, 7, 3, 7], valid=[True, True, True, False])
    np.testing.assert_array_equal(of.sum(values)[:4], [3.0, 3.0, 4.0, 3.0])
    np.testing.assert_array_equal(of.max(values)[:4], [2.0, 2.0, 4.0, 2.0])
    np.testing.assert_array_equal(of.min(values)[:4], [1.0, 1.0, 4.0, 1.0])


def test_following_skips_masked_tokens_and_crosses_rows():
    mask = jnp.array([[0, 1, 0, 1], [1, 0, 1, 0]], bool)
    values = jnp.array([[jnp.nan, 2.0, jnp.nan, 3.0], [4.0, jnp.nan, 5.0, jnp.nan]])
    end = jnp.array([[9.0, 9.0, 9.0, 7.0], [9.0, 9.0, 8.0, 9.0]])
    apart = following(values, jnp.array([[0] * 4, [1] * 4]), mask, end)
    np.testing.assert_array_equal(apart[0, [1, 3]], [3.0, 7.0])
    np.testing.assert_array_equal(apart[1, [0, 2]], [5.0, 8.0])
    together = following(values, jnp.zeros((2, 4), int), mask, end)
    np.testing.assert_array_equal(together[0, [1, 3]], [3.0, 4.0])
    np.testing.assert_array_equal(together[1, [0, 2]], [5.0, 8.0])


class TestLeaveOneOutStd:
    def test_against_a_loop(self):
        values = [0.2, 1.0, -0.5, 0.7, 0.1]
        found = advantages.leave_one_out_by_std(*grouped(values), 1e-6)
        for i, value in enumerate(values):
            others = np.delete(values, i)
            np.testing.assert_allclose(found[i], (value - others.mean()) / (others.std(ddof=1) + 1e-6))

    def test_equal_others_do_not_divide(self):
        # the others of the first are all 0.1, whose variance is a residue of rounding
        found = advantages.leave_one_out_by_std(*grouped([1.0, 0.1, 0.1, 0.1]), 0.0)
        np.testing.assert_allclose(found[0], 0.9)
        np.testing.assert_allclose(found[1:4], -0.3 / np.std([1.0, 0.1, 0.1], ddof=1))

    def test_two_or_fewer(self):
        found = advantages.leave_one_out_by_std(*grouped([1.0, 0.25, 3.0], group=[0, 0, 1]), 0.0)
        np.testing.assert_allclose(found[:3], [0.75, -0.75, 0.0])


def test_length_weighted():
    length = jnp.array([2.0, 6.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    _, stats, of = grouped([1.0, 0.0, 5.0], valid=[True, True, False])
    found = advantages.length_weighted(length, stats, of)
    np.testing.assert_allclose(found[:3], [0.75, -0.25, 0.0])  # baseline 2 / 8
    _, stats, of = grouped([0.3] * 8)
    np.testing.assert_array_equal(advantages.length_weighted(length, stats, of), 0.0)


def test_best_margin():
    values, _, of = grouped([0.25, 1.0, 0.5, 2.0, 2.0, 7.0], group=[0, 0, 0, 1, 1, 2])
    np.testing.assert_array_equal(advantages.best_margin(values, of)[:6], [0.0, 0.5, 0.0, 0.0, 0.0, 0.0])


class TestPassAtK:
    @pytest.mark.parametrize(
        "size, failures, k", [(4, 2, 1), (4, 3, 2), (6, 3, 3), (5, 4, 4), (5, 1, 3), (3, 2, 3)]
    )
    def test_against_all_subsets(self, size, failures, k):
        """The advantage of an answer is the mean over the subsets that hold it of their centred, scaled best."""
        right = np.arange(size) >= failures
        best = {subset: float(right[list(subset)].any()) for subset in itertools.combinations(range(size), k)}
        mean = np.mean(list(best.values()))
        deviation = np.sqrt(mean * (1 - mean))
        expected = [
            (np.mean([b for subset, b in best.items() if i in subset]) - mean) / deviation
            if deviation
            else 0.0
            for i in range(size)
        ]
        right = jnp.asarray(np.resize(right, SIZE))
        found = advantages.pass_at_k(right, jnp.full(SIZE, float(size)), jnp.full(SIZE, float(failures)), k)
        np.testing.assert_allclose(found[:size], expected, atol=1e-12)

    def test_a_small_group_is_taken_whole(self):
        arguments = (jnp.arange(SIZE) == 0, jnp.full(SIZE, 2.0), jnp.full(SIZE, 1.0))
        np.testing.assert_array_equal(
            advantages.pass_at_k(*arguments, 5), advantages.pass_at_k(*arguments, 2)
        )


class TestGeneralizedAdvantages:
    def test_by_hand(self):
        # δ = [0 + 0.5·2 - 1, 0 + 0.5·4 - 2, 3 + 0.5·8 - 4] = [0, 0, 3]; γλ = 0.25
        row = lambda *x: jnp.array([x])  # noqa: E731
        found = advantages.generalized_advantages(
            row(0.0, 0.0, 3.0),
            row(1.0, 2.0, 4.0),
            row(jnp.nan, jnp.nan, 8.0),
            0.5,
            0.5,
            row(0, 0, 0),
            row(True, True, True),
        )
        np.testing.assert_allclose(found, [[0.1875, 0.75, 3.0]])

    def test_gap_carries_across(self):
        mask = np.array([[1, 0, 0, 1, 1]], bool)
        rng = np.random.default_rng(0)
        reward, value = np.where(mask, rng.normal(size=(2, 1, 5)), np.nan)
        zeros, ids = jnp.zeros((1, 5)), jnp.zeros((1, 5), int)
        found = advantages.generalized_advantages(
            jnp.asarray(reward), jnp.asarray(value), zeros, 0.9, 0.7, ids, jnp.asarray(mask)
        )
        r, v = reward[mask], value[mask]
        after, expected = 0.0, []
        for t in (2, 1, 0):
            after = r[t] + 0.9 * (v[t + 1] if t < 2 else 0.0) - v[t] + 0.63 * after
            expected.insert(0, after)
        np.testing.assert_allclose(found[mask], expected)
        np.testing.assert_array_equal(found[~mask], 0.0)

    def test_lam_one_is_the_return_minus_the_value(self):
        rng = np.random.default_rng(1)
        reward, value = jnp.asarray(rng.normal(size=(2, 3, 6)))
        ids = jnp.broadcast_to(jnp.arange(3)[:, None], (3, 6))
        mask = jnp.ones((3, 6), bool)
        found = advantages.generalized_advantages(reward, value, jnp.zeros((3, 6)), 0.9, 1.0, ids, mask)
        np.testing.assert_allclose(found, advantages.discounted_returns(reward, 0.9, ids, mask) - value)


def test_explained_variance():
    mask = jnp.array([True, True, True, False])
    returns = jnp.array([0.0, 1.0, 2.0, jnp.nan])
    assert float(advantages.explained_variance(returns, returns, mask)) == 1.0
    assert float(advantages.explained_variance(jnp.zeros(4), returns, mask)) == 0.0
    np.testing.assert_allclose(advantages.explained_variance(returns / 2, returns, mask), 0.75)
    assert float(advantages.explained_variance(returns, jnp.ones(4), mask)) == 0.0


def test_moving_average_of_one_is_the_usual_step():
    old, decay = jnp.array([1.0, 2.0]), 0.9
    found = advantages.moving_average(old, jnp.array([5.0, 0.0]), jnp.array([1.0, 0.0]), decay)
    np.testing.assert_allclose(found, [0.9 * 1.0 + 0.1 * 5.0, 2.0])
    twice = advantages.moving_average(old, jnp.array([6.0, 0.0]), jnp.array([2.0, 0.0]), decay)
    np.testing.assert_allclose(twice[0], 0.81 * 1.0 + 0.19 * 3.0)


def test_shaped_rewards():
    np.testing.assert_allclose(rewards.affine(jnp.array([-1.0, 1.0, 9.0]), 2.0, 0.5, 4.0), [-1.0, 3.0, 4.0])
    np.testing.assert_allclose(rewards.affine(jnp.array([9.0]), 2.0, 0.5, None), [19.0])
    cost = rewards.relative_length_cost(
        jnp.array([0.5, 0.5, -1.0, 0.5]), jnp.array([2.0, 4.0, 4.0, 0.0]), jnp.array([4.0, 4.0, 4.0, 0.0])
    )
    np.testing.assert_allclose(cost, [0.25, 0.5, 0.0, 0.0])
