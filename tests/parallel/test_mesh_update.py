"""One device = any mesh of eight: loss, metrics, gradient norm, parameters, scores."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm import recipes
from jaxrl_llm.learner.critic import fill_values, init_critic, make_critic_step, make_values
from jaxrl_llm.learner.score import fill_logprobs, make_score
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.trust_region import make_trust_region_step
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.transforms import needed_fields
from jaxrl_llm.types import TokenBatch

GRPO = recipes.grpo()
# Plain gradient descent: Adam would hide a gradient that is too large by a factor.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))


def _batch(B=13, T=16):
    """Rows of very different lengths, one without any trained token; 13 divides by nothing."""
    rng = np.random.default_rng(0)
    lengths = np.array([16, 4, 5, 16, 6, 3, 9, 16, 4, 4, 12, 7, 16])
    columns = np.arange(T)
    mask = (columns >= 2) & (columns < lengths[:, None])
    mask[5] = False
    return TokenBatch.from_rows(
        rng.integers(3, 128, (B, T)),
        mask,
        group=np.arange(B) // 4,
        reward=rng.integers(0, 2, B).astype(np.float32),
        logprob_behavior=np.where(mask, -4.5, 0).astype(np.float32),
        lengths=lengths,
    )


def _run(mesh, micro_batch_rows):
    state = init_state(
        init_params(TINY, jax.random.key(0)), OPTIMIZER, GRPO, key=jax.random.key(1), config=TINY, mesh=mesh
    )
    batch = _batch()
    scores = np.asarray(make_score(TINY, mesh, micro_batch_rows=micro_batch_rows)(state.params, batch))
    prepared, objective_state = make_prepare(GRPO, mesh)(batch, state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    step = make_update_step(GRPO, TINY, OPTIMIZER, mesh, micro_batch_rows=micro_batch_rows)
    state, metrics = step(state, prepared)
    return state, {name: float(mean.value) for name, mean in metrics.items()}, scores


@pytest.fixture(scope="module")
def one_device():
    state, metrics, scores = _run(None, None)
    return jax.tree.map(np.asarray, state.params), metrics, scores


def test_d01_d02_a_mesh_changes_no_number(one_device):
    """D01, D02: global denominator, no average over ranks; the norm is reported and clipped before any division.

    Of other meshes and models, see test_mesh_matrix.py.
    """
    sizes, micro_batch_rows = (2, 2, 2), 4
    expected_params, expected, expected_scores = one_device
    state, metrics, scores = _run(make_mesh(*sizes), micro_batch_rows)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert metrics["grad_norm"] > 0.5  # so that clipping acts
    np.testing.assert_allclose(scores, expected_scores, atol=1e-5)
    for a, b in zip(jax.tree.leaves(expected_params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)

    gate = state.params["layers"]["gate"]
    split = PartitionSpec(None, "fsdp" if sizes[1] > 1 else None, "tensor" if sizes[2] > 1 else None)
    expected_sharding = NamedSharding(make_mesh(*sizes), split)
    assert gate.sharding.shard_shape(gate.shape) == expected_sharding.shard_shape(gate.shape)


def test_micro_batches_must_divide_over_the_mesh():
    with pytest.raises(ValueError, match="micro_batch_rows=4 must be a positive multiple of 8"):
        make_update_step(GRPO, TINY, OPTIMIZER, make_mesh(8), micro_batch_rows=4)
    with pytest.raises(ValueError, match="multiple of 8"):
        make_score(TINY, make_mesh(4, 2), micro_batch_rows=12)


MESHES = pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 4, 1)], ids=["data8", "2x4"])


def _critic_run(mesh):
    """One step of PPO's policy and one of its critic, from values that the critic gave."""
    params = init_params(TINY, jax.random.key(0))
    critic = init_critic(init_params(TINY, jax.random.key(2)), TINY)
    critic["value"] = critic["value"] + np.random.default_rng(1).normal(size=TINY.hidden_size)
    objective = recipes.ppo(lam=0.95)
    state = init_state(
        params,
        OPTIMIZER,
        objective,
        key=jax.random.key(1),
        config=TINY,
        mesh=mesh,
        critic=critic,
        critic_optimizer=OPTIMIZER,
    )
    batch = _batch()
    needed = needed_fields(objective)
    batch = fill_values(batch, state, make_values(TINY, mesh), needed)
    batch = fill_logprobs(batch, state, make_score(TINY, mesh), needed)
    batch, objective_state = make_prepare(objective, mesh)(batch, state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    state, policy = make_update_step(objective, TINY, OPTIMIZER, mesh)(state, batch)
    state, values = make_critic_step(TINY, OPTIMIZER, mesh, clip=0.2)(state, batch)
    return (state.params, state.critic), {**policy, **values}


def _trust_region_run(mesh):
    objective = recipes.trpo()
    state = init_state(
        init_params(TINY, jax.random.key(0)),
        optax.identity(),
        objective,
        key=jax.random.key(1),
        config=TINY,
        mesh=mesh,
    )
    batch = fill_logprobs(_batch(), state, make_score(TINY, mesh), needed_fields(objective))
    batch, objective_state = make_prepare(objective, mesh)(batch, state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    # One direction of the conjugate gradient: more amplify the rounding of a sum in another order.
    step = make_trust_region_step(objective, TINY, mesh, cg_iterations=2)
    state, metrics = step(state, batch)
    return (state.params,), metrics


@functools.cache
def _on_one_device(run):
    trees, metrics = run(None)
    return jax.tree.map(np.asarray, trees), {name: float(mean.value) for name, mean in metrics.items()}


@pytest.mark.slow
@MESHES
@pytest.mark.parametrize("run", [_critic_run, _trust_region_run], ids=["ppo", "trpo"])
def test_a_mesh_changes_no_number_of_ppo_and_trpo(run, sizes):
    expected_trees, expected = _on_one_device(run)
    trees, metrics = run(make_mesh(*sizes))
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        assert float(metrics[name].value) == pytest.approx(value, rel=2e-4, abs=2e-5), name
    assert expected["skipped"] == 0
    for a, b in zip(jax.tree.leaves(expected_trees), jax.tree.leaves(trees), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-4)
