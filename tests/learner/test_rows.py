"""Inert rows, micro-batches, minibatches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.learner.rows import micro_batches, minibatches, pad_rows
from jaxrl_llm.recipes import grpo
from jaxrl_llm.types import TokenBatch

prepare = jax.jit(grpo().prepare)


def _batch(B=5, T=4):
    tokens = np.arange(B * T).reshape(B, T) + 1
    batch = TokenBatch.from_rows(
        tokens,
        np.ones((B, T), bool),
        reward=np.arange(B, dtype=np.float32),
        group=np.zeros(B),
        temperature=0.5,
        logprob_behavior=np.zeros((B, T), np.float32),
        rewards={"exact": jnp.ones((B, T))},
    )
    return prepare(batch, {})[0]


def test_added_rows_are_inert():
    batch = _batch()
    padded = pad_rows(batch, 4)
    assert padded.shape == (8, 4)
    for field in ("mask", "segments", "norm", "count", "advantage", "reward", "reward_valid"):
        assert not np.any(np.asarray(getattr(padded, field))[5:])
    assert np.all(np.asarray(padded.temperature)[5:] == 1.0)  # logits are divided by it
    for name, mean in padded.logged.items():
        assert float(jnp.sum(mean.count)) == float(jnp.sum(batch.logged[name].count))
    assert pad_rows(batch, 5) is batch


def test_micro_batches_hold_consecutive_rows_and_rebuild_a_batch():
    batch = _batch(6)
    split, rebuild = micro_batches(batch, 2)
    second = rebuild([x[1] for x in split])
    assert jax.tree.structure(second) == jax.tree.structure(batch)
    assert np.array_equal(second.tokens, batch.tokens[2:4])
    assert np.array_equal(second.rewards["exact"], batch.rewards["exact"][2:4])
    assert second.learner_version is batch.learner_version


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_minibatches_train_every_row_once(number):
    batch = _batch()
    parts = minibatches(batch, number, jax.random.key(0))
    assert len({part.shape for part in parts}) == 1  # one compilation
    seen = sorted(int(t) for part in parts for t in np.asarray(part.tokens)[:, 0] if t)
    assert seen == sorted(np.asarray(batch.tokens)[:, 0].tolist())
    for part in parts:  # each row kept its own advantage
        for token, advantage in zip(
            np.asarray(part.tokens)[:, 0], np.asarray(part.advantage)[:, 1], strict=True
        ):
            if token:
                row = (token - 1) // 4
                assert advantage == np.asarray(batch.advantage)[row, 1]


def test_minibatches_without_a_key_keep_the_order():
    parts = minibatches(_batch(4), 2)
    assert np.asarray(parts[0].tokens)[:, 0].tolist() == [1, 5]
    assert np.asarray(parts[1].tokens)[:, 0].tolist() == [9, 13]


def test_too_many_minibatches_are_refused():
    with pytest.raises(ValueError, match="6 minibatches of a batch of 5 rows"):
        minibatches(_batch(), 6)


def test_inert_rows_take_no_place_in_a_minibatch():
    """Packed batches end in rows of padding: shuffled in, they would leave minibatches with nothing to train on."""
    batch = pad_rows(_batch(5), 32)
    parts = minibatches(batch, 4, jax.random.key(1))
    assert [int(np.asarray(part.mask).any(axis=1).sum()) for part in parts] == [2, 1, 1, 1]
    assert {part.shape for part in parts} == {(8, batch.shape[1])}
    assert len(minibatches(batch, 8)) == 5  # fewer rows than minibatches: none is empty
    empty = dataclasses.replace(batch, mask=batch.mask & False)
    assert minibatches(empty, 4) == [empty]
