"""Tokens of a row split over devices (mesh axis context): the numbers of one device."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import recipes
from jaxrl_llm.config import load_config
from jaxrl_llm.diagnostics.metrics import read_metrics
from jaxrl_llm.learner.rows import place_batch
from jaxrl_llm.learner.score import make_score, make_score_lists
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import data_devices, make_mesh
from jaxrl_llm.rollout.pack import pack
from jaxrl_llm.train import train
from jaxrl_llm.types import Prompt, Trajectory

GRPO = recipes.grpo()
# Plain gradient descent: Adam would hide a gradient that is too large by a factor.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
WIDTH = 64  # tokens of a row


def _batch(rows=4):
    """Groups of 4 with a prompt in common and a few without: rows with families, and segments across every border."""
    rng = np.random.default_rng(0)

    def make(prompt, group):
        new = int(rng.integers(5, 12))
        tokens = np.concatenate([prompt, rng.integers(3, 128, new)]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        return Trajectory(
            prompt=Prompt(uid=f"g{group}", tokens=prompt),
            group=group,
            tokens=tokens,
            mask=mask,
            logprob=np.where(mask, -4.5, 0).astype(np.float32),
            version=np.where(mask, 0, -1).astype(np.int32),
            kv_version=np.where(mask, 0, -1).astype(np.int32),
            reward=float(rng.integers(0, 2)),
        )

    prompts = [rng.integers(3, 128, length).astype(np.int32) for length in (19, 9, 14, 30)]
    given = [make(prompt, group) for group, prompt in enumerate(prompts) for _ in range(4)]
    batch = pack(given, learner_version=0, row_tokens=WIDTH - 3, pad_to_multiple=WIDTH, rows_multiple=rows)
    segments = np.asarray(batch.segments)
    for border in range(WIDTH // 4, WIDTH, WIDTH // 4):
        assert np.any((segments[:, border] == segments[:, border - 1]) & (segments[:, border] != 0)), border
    assert np.any(segments < 0)
    return batch


def _run(mesh, config, micro_batch_rows=4):
    state = init_state(
        init_params(config, jax.random.key(0)),
        OPTIMIZER,
        GRPO,
        key=jax.random.key(1),
        config=config,
        mesh=mesh,
    )
    batch = _batch()
    prepared, objective_state = make_prepare(GRPO, mesh)(batch, state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    step = make_update_step(GRPO, config, OPTIMIZER, mesh, micro_batch_rows=micro_batch_rows)
    state, metrics = step(state, prepared)
    return state, {name: float(mean.value) for name, mean in metrics.items()}


@pytest.fixture(scope="module")
def one_device():
    found = {}

    def of(config):
        if config not in found:
            state, metrics = _run(None, config)
            found[config] = jax.tree.map(np.asarray, state.params), metrics
        return found[config]

    return of


@pytest.mark.parametrize(
    ("sizes", "config"),
    [
        pytest.param({"context": 2, "fsdp": 2, "tensor": 2}, TINY, id="2x2x2", marks=pytest.mark.slow),
        pytest.param({"context": 4, "fsdp": 2}, TINY, id="4x2", marks=pytest.mark.slow),
        # 2 key/value heads do not divide over 4 devices.
        pytest.param({"context": 2, "tensor": 4}, TINY, id="2xtensor4", marks=pytest.mark.slow),
    ],
)
def test_splitting_the_tokens_of_rows_changes_no_number(one_device, sizes, config):
    expected_params, expected = one_device(config)
    state, metrics = _run(make_mesh(**sizes), config)
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        if name != "expert_exchange":  # bytes between devices
            assert metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert metrics["grad_norm"] > 0.5  # so that clipping acts
    for a, b in zip(jax.tree.leaves(expected_params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)
    gate = state.params["layers"]["gate"] if config is TINY else state.params["layers"]["q"]
    assert gate.sharding.shard_shape(gate.shape)[1] == gate.shape[1] // (
        sizes["context"] * sizes.get("fsdp", 1)
    )


@pytest.mark.slow
def test_scores_and_lists_of_tokens_are_those_of_one_device():
    params = init_params(TINY, jax.random.key(0))
    batch, mesh = _batch(), make_mesh(context=4, fsdp=2)
    expected = make_score_lists(TINY, 3)(params, batch)
    found = make_score_lists(TINY, 3, mesh)(params, batch)
    np.testing.assert_allclose(found.logprob_proximal, expected.logprob_proximal, atol=1e-5)
    np.testing.assert_array_equal(found.topk_ids, expected.topk_ids)
    np.testing.assert_allclose(found.topk_logprob_proximal, expected.topk_logprob_proximal, atol=1e-5)
    placed = place_batch(found, mesh)
    assert placed.topk_ids.addressable_shards[0].data.shape == (batch.shape[0] // 2, WIDTH // 4, 3)


def test_rows_that_do_not_divide_are_refused():
    batch = jax.tree.map(lambda x: x[:, :62] if jnp.ndim(x) >= 2 else x, _batch())
    with pytest.raises(
        ValueError, match="62 tokens do not divide into the 4 shards of the mesh axis context"
    ):
        make_score(TINY, make_mesh(context=4))(init_params(TINY, jax.random.key(0)), batch)
    with pytest.raises(ValueError, match="must be at least 1, got .*mesh.context=0"):
        make_mesh(context=0)


def test_replicas_of_the_sampler_need_a_whole_copy():
    with pytest.raises(ValueError, match="takes 2 devices"):
        data_devices(make_mesh(2, context=2))


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ppo", "trpo"])
def test_runs_with_a_critic_and_with_a_trust_region_have_the_figures_of_one_device(objective, tmp_path):
    figures = []
    for name, mesh in (("one", ()), ("split", ("mesh.context=2",))):
        settings = [f"objective={objective}", "steps=2", "evaluation.items=0", *mesh]
        train(load_config("configs/tiny.yaml", settings), tmp_path / name)
        rows = read_metrics(tmp_path / name)
        wanted = (
            "optimizer/grad_norm",
            "policy/loss",
            "policy/entropy",
            "policy/critic_loss",
            "policy/critic_grad_norm",
        )
        figures.append([{key: row[key] for key in wanted if key in row} for row in rows])
    assert any(row.get("optimizer/grad_norm") for row in figures[0])
    for one, split in zip(*figures, strict=True):
        assert split == pytest.approx(one, rel=1e-3, abs=1e-6)
