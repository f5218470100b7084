"""Which prompts and lengths dominate an update."""

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import recipes
from jaxrl_llm.learner.share import coefficients, gradient_share, trajectory_shares
from jaxrl_llm.types import PolicyOutput, TokenBatch


def batch_of(lengths, reward, group, *, width=9):
    lengths = np.asarray(lengths)
    columns = np.arange(width)
    mask = (columns >= 1) & (columns < 1 + lengths[:, None])
    tokens = np.where(columns < 1 + lengths[:, None], 5, 0)
    return TokenBatch.from_rows(
        tokens, mask, group=np.asarray(group), reward=np.asarray(reward, float), lengths=1 + lengths,
        logprob_behavior=np.where(mask, -1.0, 0.0), version=0,
    )  # fmt: skip


def share(objective, batch, logprob=None):
    batch, state = objective.prepare(batch, objective.init())
    output = PolicyOutput(logprob=jnp.where(batch.mask, -1.0, 0.0) if logprob is None else logprob)
    c = coefficients(objective, output, batch, state)
    return np.asarray(c), {k: float(v) for k, v in gradient_share(c, batch).items()}


def test_by_hand():
    """Group 0: lengths 1 and 3; group 1: lengths 2 and 2. Advantages ±½ (no std)."""
    batch = batch_of([1, 3, 2, 2], [1, 0, 1, 0], [0, 0, 1, 1])
    tokens = jrl.chain(jrl.group_advantage(scale="none"), jrl.normalize_by_token(), jrl.reinforce_surrogate())
    c, s = share(tokens, batch)
    np.testing.assert_allclose(
        c[:, 1:5], [[-0.5, 0, 0, 0], [0.5] * 3 + [0], [-0.5] * 2 + [0] * 2, [0.5] * 2 + [0] * 2]
    )
    assert s["share_largest_group"] == pytest.approx(0.5) and s["share_groups"] == pytest.approx(2.0)
    # One of four trajectories is the longest quarter: 3 of 8 tokens, and 3 of 8 of the mass.
    assert s["share_longest_quarter"] == pytest.approx(3 / 8) == s["tokens_longest_quarter"]
    sequences = jrl.chain(
        jrl.group_advantage(scale="none"), jrl.normalize_by_sequence(), jrl.reinforce_surrogate()
    )
    _, s = share(sequences, batch)
    assert s["share_longest_quarter"] == pytest.approx(1 / 4) and s[
        "tokens_longest_quarter"
    ] == pytest.approx(3 / 8)


def test_a_group_without_signal_has_no_share():
    batch = batch_of([2, 2, 2, 2], [1, 0, 1, 1], [0, 0, 1, 1])
    _, s = share(recipes.grpo(), batch)
    assert s["share_largest_group"] == pytest.approx(1.0) and s["share_groups"] == pytest.approx(1.0)


def test_clipped_tokens_have_no_share():
    batch = batch_of([1, 1], [1, 0], [0, 0])
    logprob = jnp.where(batch.mask, jnp.array([[0.0], [-1.0]]), 0.0)  # the first ratio is e: clipped
    c, s = share(recipes.grpo(), batch, logprob)
    assert c[0, 1] == 0 and c[1, 1] > 0 and s["share_largest_group"] == pytest.approx(1.0)


def test_nothing_to_train_gives_zeros():
    batch = batch_of([2, 2], [1, 1], [0, 0])
    _, s = share(recipes.grpo(), batch)
    assert s["share_largest_group"] == s["share_groups"] == s["share_longest_quarter"] == 0
    _, s = share(recipes.grpo(), batch_of([0, 0], [1, 0], [0, 0]))
    assert set(s.values()) == {0.0}


def test_shares_of_trajectories_over_several_updates():
    trajectory = np.array([[0, 0, 1, 9], [2, 2, 2, 9]])
    mask = np.array([[0, 1, 1, 0], [0, 1, 1, 0]], bool)
    mass = np.array([[5, 1, 2, 5], [5, 3, np.nan, 5], [7, 7, 7, 7]], np.float32)  # its last row was added
    one = trajectory_shares([(mass, trajectory, mask)], 4)
    np.testing.assert_allclose(one, np.array([1, 2, 3, 0]) / 6)
    two = trajectory_shares([(mass, trajectory, mask), (mass[:1], trajectory[:1] + 1, mask[:1])], 4)
    np.testing.assert_allclose(two, np.array([1, 3, 5, 0]) / 9)
    assert trajectory_shares([(0 * mass[:2], trajectory, mask)], 3).tolist() == [0, 0, 0]
    assert trajectory_shares([], 2).tolist() == [0, 0]
