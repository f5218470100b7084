"""Exact log-probs as fields of a batch, and as the values of an update."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jrl
from jaxrl_llm.learner.exact import make_exact_score, sampled_runs, with_exact_value
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.rollout.pack import pack
from jaxrl_llm.types import PolicyOutput, Prompt, StopReason, TokenBatch, Trajectory

RNG = np.random.default_rng(0)


def trajectory(prompt, new, group, mask=None, temperature=1.0):
    length = len(prompt) + new
    tokens = np.concatenate([prompt, RNG.integers(3, 128, new)]).astype(np.int32)
    mask = np.arange(length) >= len(prompt) if mask is None else mask
    return Trajectory(
        prompt=Prompt(uid=f"p{group}", tokens=np.asarray(prompt, np.int32)),
        group=group,
        tokens=tokens,
        mask=mask,
        logprob=np.full(length, -1.0, np.float32),
        version=np.where(mask, 0, -1).astype(np.int32),
        kv_version=np.where(mask, 0, -1).astype(np.int32),
        reward=1.0,
        rewards={},
        stop=StopReason.LENGTH,
        temperature=temperature,
    )


def trajectories():
    prompts = [RNG.integers(3, 128, n) for n in (1, 6, 9)]
    return [
        trajectory(prompt, new, group, temperature=0.5 + group)
        for group, prompt in enumerate(prompts)
        for new in (3, 5, 1)
    ]


@pytest.mark.parametrize("row_tokens", [None, 32])
def test_the_sequences_of_a_batch_are_those_that_it_was_packed_from(row_tokens):
    given = trajectories()
    batch = pack(given, pad_to_multiple=8, row_tokens=row_tokens, rows_multiple=4, learner_version=0)
    runs = sampled_runs(batch)
    found = {(tuple(run.prompt), tuple(run.tokens), run.temperature) for run in runs}
    wanted = {
        (tuple(t.tokens[~t.mask].tolist()), tuple(t.tokens[t.mask].tolist()), t.temperature) for t in given
    }
    assert len(runs) == len(given) and found == wanted


def test_values_reach_their_tokens_and_no_others():
    given = trajectories()
    batch = pack(given, pad_to_multiple=8, row_tokens=32, learner_version=0)
    score = make_exact_score(
        lambda params, sequences, temperature: [params + t.astype(np.float32) for _, t in sequences]
    )
    out = np.asarray(score(np.float32(1000), batch))
    mask = np.asarray(batch.mask)
    np.testing.assert_array_equal(out[mask], 1000.0 + np.asarray(batch.tokens)[mask])
    assert not out[~mask].any()


def test_turns_of_an_environment_are_refused():
    mask = np.array([False] * 4 + [True, True, False, True])
    batch = pack([trajectory(np.arange(3, 7), 4, 0, mask=mask)], pad_to_multiple=8, learner_version=0)
    with pytest.raises(ValueError, match="learner.exact to off"):
        sampled_runs(batch)


def test_the_value_is_exact_and_the_gradient_is_the_forward_passs():
    own = jnp.array([[-1e-3, -2.0, -30.0, 0.0]], jnp.float32)
    exact = jnp.array([[-3e-3, -2.0000002, -29.1, 7.0]], jnp.float32)
    mask = jnp.array([[True, True, True, False]])
    batch = TokenBatch.from_rows(jnp.ones((1, 5), int), jnp.pad(mask, ((0, 0), (1, 0))))
    batch = batch.replace(logprob_exact=jnp.pad(exact, ((0, 0), (1, 0))))

    def value(own):
        return with_exact_value(PolicyOutput(logprob=jnp.pad(own, ((0, 0), (1, 0)))), batch).logprob[:, 1:]

    np.testing.assert_array_equal(value(own), jnp.where(mask, exact, own))
    weights = jnp.array([[2.0, -3.0, 5.0, 7.0]])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(value(x) * weights))(own), weights)


def updated(logprob_behavior, logprob_exact):
    """(parameters after one update, metrics) of a policy that is a table of log-probs."""
    B, T = 4, 6
    rng = np.random.default_rng(1)
    table = {"table": jnp.asarray(rng.normal(size=(B, T)) - 3, jnp.float32)}
    mask = np.arange(T) >= np.array([[2], [3], [2], [4]])
    objective = jrl.recipes.grpo()
    batch = TokenBatch.from_rows(
        np.ones((B, T), int),
        mask,
        group=np.array([0, 0, 1, 1]),
        reward=np.array([1.0, 0.0, 0.0, 1.0]),
        logprob_behavior=logprob_behavior(table["table"]),
        version=0,
    )
    state = init_state(table, optax.sgd(1.0), objective, key=jax.random.key(0))
    batch, objective_state = make_prepare(objective)(batch, state.objective_state)
    batch = batch.replace(logprob_exact=logprob_exact(table["table"]))
    step = make_update_step(
        objective,
        TINY,
        optax.sgd(1.0),
        policy=lambda params, micro: PolicyOutput(logprob=params["table"]),
        donate=False,
        remat=False,
    )
    new, metrics = step(state.replace(objective_state=objective_state), batch)
    return np.asarray(new.params["table"] - table["table"]), metrics


def test_the_first_update_has_ratio_one_and_the_dense_gradient():
    def behavior(own):  # what a sampler recorded: near the learner's, not equal to it
        return own * jnp.float32(1 + 1e-3)

    dense, metrics = updated(lambda own: own, lambda own: None)
    exact, exact_metrics = updated(behavior, behavior)
    off, off_metrics = updated(behavior, lambda own: None)
    for name in ("ratio_min", "ratio_max"):
        assert float(exact_metrics[name].total) == 1.0 == float(metrics[name].total)
    assert float(exact_metrics["logprob_gap_max"].total) == 0.0
    assert float(off_metrics["logprob_gap_max"].total) > 1e-3 and float(off_metrics["ratio_max"].total) > 1
    assert np.abs(dense).max() > 0.05
    np.testing.assert_allclose(exact, dense, rtol=1e-6, atol=1e-8)
    assert np.abs(off - dense).max() > 1e-6
