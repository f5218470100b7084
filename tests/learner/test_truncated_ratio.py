"""What a token was drawn from, from the sampler to the learner: with the weights that sampled, every ratio is 1."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from jaxrl_llm import recipes
from jaxrl_llm.learner.critic import init_value_head, value_policy
from jaxrl_llm.learner.rows import pad_rows
from jaxrl_llm.learner.score import (
    fill_logprobs,
    make_score,
    make_score_lists,
    make_score_teacher,
    teacher_needs,
)
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.trust_region import make_trust_region_step
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.rewards.score import Score
from jaxrl_llm.rollout.collect import rollout_metrics, trajectory_of
from jaxrl_llm.rollout.pack import pack
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.types import Prompt

TRUNCATED = (
    {"top_p": 0.8},
    {"top_k": 9, "temperature": 0.7},
    {"min_p": 0.05, "temperature": 1.4},
    {"top_p": 0.95, "top_k": 40, "min_p": 0.01, "record_support": 6},
    {},  # from the whole vocabulary, in the same batch
    {
        "min_tokens": 5,
        "stop_ids": tuple(range(0, 128, 3)),
        "suppress_ids": (9, *range(100, 128)),
        "temperature": 0.8,
    },
    {"min_tokens": 3, "stop_ids": tuple(range(0, 128, 5)), "top_p": 0.9},
)


@functools.cache
def model(seed=0):
    """TINY with embeddings large enough for distributions that are neither flat nor greedy."""
    params = init_params(TINY, jax.random.key(seed))
    return {**params, "embed": params["embed"] * 6}


@functools.cache
def trajectories():
    rng = np.random.default_rng(0)
    sampler = Sampler(TINY, slots=8, page_size=8)
    out = []
    for number, truncation in enumerate(TRUNCATED):
        prompts = [
            Prompt(uid=f"{number}/{length}", tokens=rng.integers(3, 128, length).astype(np.int32))
            for length in (2, 9, 20)
        ]
        sampling = SamplingParams(max_tokens=9, n=2, seed=number, **{"record_support": 64, **truncation})
        for i, c in enumerate(sampler.generate(model(), prompts, sampling, version=3)):
            group, reward = len(TRUNCATED) * number + i // 2, float(i % 2)
            out.append(trajectory_of(c, Score(reward), group=group, temperature=sampling.temperature))
    return tuple(out)


def packed(row_tokens=None):
    return pack(trajectories(), learner_version=3, pad_to_multiple=16, row_tokens=row_tokens)


def gap(found, batch):
    mask = np.asarray(batch.mask)
    assert mask.sum() > 150
    return np.abs(np.asarray(found) - np.asarray(batch.logprob_behavior))[mask]


@pytest.mark.slow
@pytest.mark.parametrize("row_tokens", [None, 96])
def test_the_learner_finds_the_log_probs_of_the_sampler(row_tokens):
    batch = packed(row_tokens)
    assert batch.support_ids.shape == (*batch.shape, 64)
    if row_tokens:
        assert (np.asarray(batch.segments) < 0).any()  # prompts are shared
    score = make_score(TINY, micro_batch_rows=4, chunk=40)
    assert gap(score(model(), batch), batch).max() <= 2e-5
    lists = make_score_lists(TINY, 5, micro_batch_rows=4)(model(), batch)
    assert gap(lists.logprob_proximal, batch).max() <= 2e-5
    # Over the whole vocabulary they differ where something was left out.
    whole = gap(score(model(), batch.replace(support_ids=None)), batch)
    assert 0.05 < whole.max() and (whole < 2e-5).any()


@pytest.mark.slow
def test_every_policy_is_taken_over_the_same_tokens():
    """Reference and teacher with the weights of the policy have its log-probs; others have finite ones."""
    objective = recipes.grpo(kl_coef=0.1)
    batch = packed()
    state = init_state(model(), optax.sgd(0.1), objective, key=jax.random.key(0), reference=True, config=TINY)
    score = make_score(TINY, micro_batch_rows=5)
    filled = fill_logprobs(batch, state, score, {"logprob_proximal", "logprob_reference"})
    assert filled.support_ids is batch.support_ids
    for found in (filled.logprob_proximal, filled.logprob_reference):
        assert gap(found, batch).max() <= 2e-5
    wanted = teacher_needs(recipes.grpo())._replace(logprob=True)
    taught = make_score_teacher(TINY, wanted, micro_batch_rows=5)(model(), batch)
    assert gap(taught.logprob_teacher, batch).max() <= 2e-5
    other = np.asarray(score(model(1), batch))[np.asarray(batch.mask)]
    assert np.isfinite(other).all() and (other <= 1e-6).all() and np.ptp(other) > 1


def run_update(mesh, rows, batch):
    objective = recipes.grpo()
    optimizer = optax.sgd(0.5)
    params = jax.tree.map(np.array, model())
    state = init_state(params, optimizer, objective, key=jax.random.key(1), config=TINY, mesh=mesh)
    score = make_score(TINY, mesh, micro_batch_rows=rows)
    batch = fill_logprobs(batch, state, score, {"logprob_proximal"})
    prepared, objective_state = make_prepare(objective, mesh)(batch, state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    state, metrics = make_update_step(objective, TINY, optimizer, mesh, micro_batch_rows=rows)(
        state, prepared
    )
    figures = {name: float(mean.value) for name, mean in metrics.items()}
    return figures, np.asarray(batch.logprob_proximal), jax.tree.map(np.asarray, state.params)


@functools.cache
def one_device():
    return run_update(None, 7, packed())


@pytest.mark.slow
def test_the_first_update_has_ratios_of_1():
    figures, proximal, _ = one_device()
    assert abs(figures["ratio_min"] - 1) < 2e-5 and abs(figures["ratio_max"] - 1) < 2e-5
    assert figures["logprob_gap_max"] < 2e-5 and figures["grad_norm"] > 0.01
    assert gap(proximal, packed()).max() <= 2e-5


@pytest.mark.slow
def test_a_mesh_of_eight_scores_the_same():
    batch = packed()
    assert batch.shape[0] % 8  # rows of padding are added
    score = make_score(TINY, make_mesh(data=8), micro_batch_rows=16)
    assert gap(score(model(), batch), batch).max() <= 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_a_mesh_of_eight_changes_nothing(axes):
    mesh = make_mesh(**axes)
    batch = packed()
    figures, proximal, params = run_update(mesh, 8, batch)
    want, want_proximal, want_params = one_device()
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(proximal[mask], want_proximal[mask], atol=2e-5)
    assert gap(proximal, batch).max() <= 2e-5 and figures["logprob_gap_max"] < 2e-5
    for name in ("loss", "grad_norm", "entropy", "ratio_max"):
        np.testing.assert_allclose(figures[name], want[name], rtol=1e-4, atol=1e-6, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), params, want_params)


def test_rows_of_padding_have_no_support():
    batch = pad_rows(packed(), 8)
    assert (np.asarray(batch.support_ids[-1]) == -1).all() and not np.asarray(batch.mask[-1]).any()


def test_a_policy_with_a_value_head_takes_them_over_the_support_too():
    batch = packed()
    params = {**model(), **init_value_head(TINY)}
    output = jax.jit(value_policy(TINY, remat=False))(params, batch)
    assert gap(output.logprob, batch).max() <= 2e-5


@pytest.mark.slow
def test_the_loss_of_a_trust_region_step_too():
    batch, objective = packed(), recipes.grpo()
    optimizer = optax.identity()
    params = jax.tree.map(np.array, model())
    state = init_state(params, optimizer, objective, key=jax.random.key(1), config=TINY)
    prepared, objective_state = make_prepare(objective)(batch, state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    step = make_trust_region_step(objective, TINY, micro_batch_rows=10, cg_iterations=3)
    _, metrics = step(state, prepared)
    figures = {name: float(mean.value) for name, mean in metrics.items()}
    assert figures["logprob_gap_max"] < 2e-5 and figures["ratio_max"] < 1 + 2e-5
    assert 0 < figures["trust_region_kl"] <= 0.01 and figures["trust_region_gain"] > 0


def test_metrics_tell_the_size_of_the_support_and_how_often_it_was_cut():
    all_of_them = trajectories()
    kept = [t for t in all_of_them if t.support_cut is not None]  # truncated
    assert 0 < len(kept) < len(all_of_them)
    sizes = np.concatenate([(t.support_ids[t.mask] >= 0).sum(axis=1) for t in kept])
    cut = np.concatenate([t.support_cut[t.mask] for t in kept])
    metrics = rollout_metrics(all_of_them)
    assert metrics["completion/support_size"] == sizes.mean() and 1 < sizes.mean() < 64
    assert metrics["completion/support_cut"] == cut.mean() and 0 < cut.mean() < 0.6
    without = rollout_metrics([t for t in all_of_them if t.support_ids is None])
    left_out = rollout_metrics(
        [t for t in all_of_them if t.support_ids is not None and t.support_cut is None]
    )
    assert left_out["completion/support_size"] == 0.0
    assert not {"completion/support_size", "completion/support_cut"} & without.keys()
