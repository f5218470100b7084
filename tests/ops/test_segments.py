"""Sums over sequences, trajectories and groups, with hand-made numbers and arbitrary ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.ops import segments

# Row 0 packs sequences 900 and 3; row 1 holds sequence 17 and padding (-1).
SEQUENCE = jnp.array([[900, 900, 900, 3, 3], [17, 17, 17, -1, -1]])
VALUES = jnp.array([[1.0, 2.0, 3.0, 10.0, 20.0], [5.0, 6.0, 0.0, 0.0, 0.0]])
MASK = jnp.array([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]], bool)


def test_sequence_runs_number_the_sequences_of_a_row():
    np.testing.assert_array_equal(segments.sequence_runs(SEQUENCE), [[0, 0, 0, 1, 1], [0, 0, 0, 1, 1]])


def test_sequence_sum_mean_max():
    np.testing.assert_allclose(
        segments.sequence_sum(VALUES, SEQUENCE), [[6, 6, 6, 30, 30], [11, 11, 11, 0, 0]]
    )
    np.testing.assert_allclose(
        segments.sequence_mean(VALUES, SEQUENCE, MASK), [[2, 2, 2, 15, 15], [5.5, 5.5, 5.5, 0, 0]]
    )
    np.testing.assert_allclose(segments.sequence_max(VALUES, SEQUENCE, MASK)[:, :3], [[3, 3, 3], [6, 6, 6]])


def test_sequence_sum_is_row_local():
    """The same id in two rows is two sequences, and any subset of rows gives the same numbers."""
    same = jnp.zeros_like(SEQUENCE)
    np.testing.assert_allclose(segments.sequence_sum(VALUES, same)[:, 0], [36, 11])
    np.testing.assert_array_equal(
        segments.sequence_sum(VALUES, SEQUENCE)[1:], segments.sequence_sum(VALUES[1:], SEQUENCE[1:])
    )


@jax.jit
def group_statistics(values, valid, group, trajectory, mask):
    each = segments.trajectories(trajectory, mask)
    stats = segments.groups(each.sum(values, mask), each.any(valid, mask), group, mask, each)
    return [each.spread(x) for x in (stats.size, stats.mean, stats.deviation, stats.constant)]


def test_groups_count_trajectories_once_whatever_their_length():
    """Trajectory 8 has two sequences in two rows and six tokens; it is still one of two members."""
    trajectory = jnp.array([[8, 8, 8], [8, 8, 8], [-40, 0, 0]])
    group = jnp.array([[77] * 3, [77] * 3, [77, 0, 0]])
    mask = jnp.array([[1, 1, 1], [1, 1, 1], [1, 0, 0]], bool)
    values = jnp.array([[0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [3.0, np.nan, 0.0]])
    size, mean, deviation, constant = group_statistics(values, jnp.ones_like(mask), group, trajectory, mask)
    np.testing.assert_allclose(size[mask], 2)
    np.testing.assert_allclose(mean[mask], 2)
    np.testing.assert_allclose(deviation[mask], [-1] * 6 + [1])
    assert not np.any(constant[mask])


def test_groups_leave_out_what_has_no_value():
    trajectory = jnp.arange(3)[:, None] * jnp.ones((1, 3), int)
    mask = jnp.ones((3, 3), bool)
    values = jnp.array([[1.0, 0, 0], [0, 0, 0], [2.0, 0, 0]])
    valid = jnp.array([[1] * 3, [0] * 3, [1] * 3], bool)
    size, mean, deviation, _ = group_statistics(values, valid, jnp.zeros((3, 3), int), trajectory, mask)
    assert float(size[0, 0]) == 2 and float(mean[0, 0]) == 1.5
    np.testing.assert_allclose(deviation[:, 0], [-0.5, 0, 0.5])


@pytest.mark.parametrize("value, count", [(0.3, 8), (0.1, 7), (0.7, 16), (1.0, 4), (0.0, 4)])
def test_n02_equal_values_are_constant_and_deviate_by_exactly_zero(value, count):
    values = jnp.full((count, 1), value, jnp.float32)
    ids = jnp.arange(count)[:, None]
    mask = jnp.ones((count, 1), bool)
    _, mean, deviation, constant = group_statistics(values, mask, ids * 0, ids, mask)
    assert np.all(deviation == 0) and np.all(constant)
    assert np.all(mean == np.float32(value))


def test_last_token():
    trajectory = jnp.array([[5, 5, 5, 2], [2, 2, 9, 9]])
    mask = jnp.array([[0, 1, 1, 1], [1, 0, 0, 0]], bool)
    np.testing.assert_array_equal(segments.last_token(trajectory, mask), [[0, 0, 1, 0], [1, 0, 0, 0]])


def test_suffix_scan_crosses_masked_spans_and_sequences():
    trajectory = jnp.array([[1, 1, 1, 1], [1, 1, 6, 6]])
    mask = jnp.array([[1, 1, 0, 1], [0, 1, 1, 1]], bool)
    values = jnp.array([[1.0, 2.0, 100.0, 4.0], [100.0, 8.0, 16.0, 32.0]])
    # trajectory 1: tokens 1, 2, 4, 8 with factor 1/2; trajectory 6: 16, 32
    result = segments.suffix_scan(values, jnp.full((2, 4), 0.5), trajectory, mask)
    np.testing.assert_allclose(result, [[4, 6, 0, 8], [0, 8, 32, 32]])


def test_group_sum_with_arbitrary_ids():
    group = jnp.array([[-5, -5], [10**6, -5]])
    np.testing.assert_allclose(
        segments.group_sum(jnp.array([[1.0, 2.0], [4.0, 8.0]]), group), [[11, 11], [4, 11]]
    )
