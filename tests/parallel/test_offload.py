"""What rests in the memory of the host changes no bit, survives a snapshot, and is fetched where it is read."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from runs import SHORT, TINY_YAML, run_to_the_end, same_run

from jaxrl_llm import recipes
from jaxrl_llm.config import load_config
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.score import fill_logprobs, make_score
from jaxrl_llm.learner.state import init_state, move_reference, reset_reference
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.snapshots.store import SnapshotStore
from jaxrl_llm.transforms import needed_fields
from jaxrl_llm.types import TokenBatch

BOTH = ("optimizer", "reference")
KL = recipes.grpo(kl_coef=0.1)
ADAMW = make_optimizer(1e-3, clip_norm=1.0)


def memories(tree):
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def begin(mesh, offload):
    return init_state(
        init_params(TINY, jax.random.key(0)),
        ADAMW,
        KL,
        key=jax.random.key(1),
        reference=True,
        config=TINY,
        mesh=mesh,
        offload=offload,
    )


def batch():
    rng = np.random.default_rng(0)
    mask = np.arange(12) >= rng.integers(3, 10, (8, 1))
    return TokenBatch.from_rows(
        rng.integers(3, 128, (8, 12)),
        mask,
        group=np.arange(8) // 4,
        reward=rng.integers(0, 2, 8).astype(np.float32),
        logprob_behavior=np.where(mask, -4.5, 0).astype(np.float32),
    )


def two_updates(mesh, offload):
    state, step = begin(mesh, offload), make_update_step(KL, TINY, ADAMW, mesh, micro_batch_rows=8)
    out = []
    for _ in range(2):
        filled = fill_logprobs(batch(), state, make_score(TINY, mesh), needed_fields(KL))
        prepared, objective_state = make_prepare(KL, mesh)(filled, state.objective_state)
        state, metrics = step(dataclasses.replace(state, objective_state=objective_state), prepared)
        out.append({name: np.asarray(mean.value) for name, mean in metrics.items()})
        state = move_reference(state, 0.5)
    assert step.jitted._cache_size() == 1  # what it returns lies where its argument lay
    return state, out


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, (1, 4, 2)])
def test_no_bit_changes(sizes):
    mesh = None if sizes is None else make_mesh(*sizes)
    there, there_metrics = two_updates(mesh, BOTH)
    here, here_metrics = two_updates(mesh, ())
    assert memories(there.opt_state) == memories(there.reference) == {"pinned_host"}
    assert memories(there.params) == memories(here.opt_state) == {"device"}
    if mesh is not None:
        places = [jax.tree.map(lambda x: x.sharding.spec, state.opt_state) for state in (there, here)]
        assert places[0] == places[1]
    jax.tree.map(np.testing.assert_array_equal, there_metrics, here_metrics)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((there.params, there.opt_state, there.reference)),
        jax.device_get((here.params, here.opt_state, here.reference)),
    )
    reset = reset_reference(there, ADAMW)
    assert memories(reset.opt_state) == memories(reset.reference) == {"pinned_host"}


@pytest.mark.slow
def test_a_step_that_is_skipped_leaves_the_moments_there():
    state = begin(None, ("optimizer",))
    before = jax.device_get(state.opt_state)
    nothing = batch()
    nothing = nothing.replace(mask=np.zeros_like(nothing.mask))
    step = make_update_step(recipes.grpo(), TINY, ADAMW)
    prepared, _ = make_prepare(recipes.grpo())(nothing, state.objective_state)
    state, metrics = step(state, prepared)
    assert float(metrics["skipped"].value) == 1 and memories(state.opt_state) == {"pinned_host"}
    assert memories(state.reference) == {"device"}
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.opt_state))


def test_a_snapshot_is_read_back_to_where_its_parts_rest(tmp_path):
    state, other = begin(None, BOTH), begin(None, ())
    with SnapshotStore(tmp_path) as store:
        store.save(1, state, {})
        store.wait()
        back = store.restore(like=state)[0]
        plain = store.restore(like=other)[0]
    assert memories(back.opt_state) == memories(back.reference) == {"pinned_host"}
    assert memories(plain.opt_state) == {"device"}
    for found in (back, plain):
        jax.tree.map(
            np.testing.assert_array_equal, jax.device_get(found.opt_state), jax.device_get(state.opt_state)
        )


def test_another_optimiser_rests_where_the_one_before_did():
    momentum = optax.sgd(0.1, momentum=0.9)
    for offload, there in ((BOTH, "pinned_host"), ((), "device")):
        state = reset_reference(begin(None, offload), momentum)
        assert memories(state.opt_state) == memories(state.reference) == {there}


@pytest.mark.parametrize("given", ["optimizer", ("optimizer", "critic")])
def test_what_cannot_rest_there_is_refused(given):
    with pytest.raises(ValueError, match="'optimizer' and 'reference'"):
        init_state(
            init_params(TINY, jax.random.key(0)), optax.sgd(0.1), KL, key=jax.random.key(1), offload=given
        )


@pytest.mark.slow
def test_a_run_and_its_resumption_are_the_same_run(tmp_path):
    sets = (*SHORT, "objective={recipe: grpo, kl_coef: 0.05}", "reference.move_every=2")
    plain = run_to_the_end(load_config(TINY_YAML, sets), tmp_path / "plain")
    offloaded = (*sets, "learner.offload=[optimizer, reference]")
    same_run(run_to_the_end(load_config(TINY_YAML, offloaded), tmp_path / "offloaded"), plain)
