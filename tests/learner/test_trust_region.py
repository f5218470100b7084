"""TRPO's step against dense linear algebra on a bigram policy, and on the tiny decoder."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import recipes, testing
from jaxrl_llm.learner.score import fill_logprobs, make_score
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.trust_region import (
    conjugate_gradient,
    decoder_features,
    fisher_product,
    head_fisher,
    head_kl,
    make_trust_region_step,
)
from jaxrl_llm.learner.update import make_prepare
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.transforms import loss, needed_fields
from jaxrl_llm.types import TokenBatch

V = testing.VOCABULARY
WIDE = dataclasses.replace(TINY, dtype="float64")
TRPO = recipes.trpo()
EXACT = {"cg_iterations": 150, "cg_residual": 1e-26}  # 121 parameters: the system is solved


def bigram(params, batch):
    """`testing.tiny_policy` as features: the token before selects a row of logits."""
    before = jnp.pad(batch.tokens, ((0, 0), (1, 0)))[:, :-1]
    return jax.nn.one_hot(before, V, dtype=params.dtype), params


def bigram_batch(params):
    """A batch of ragged rows that `params` sampled at several temperatures."""
    batch = testing.sample_batch()
    batch = batch.replace(temperature=jnp.linspace(0.7, 1.4, batch.mask.size).reshape(batch.shape))
    logprob = logprobs(params, batch)
    return batch.replace(logprob_behavior=logprob, logprob_proximal=logprob)


def logprobs(params, batch):
    h, w = bigram(params, batch)
    every = jax.nn.log_softmax(h @ w / batch.temperature[..., None])
    chosen = jnp.take_along_axis(every, batch.tokens[..., None], -1)[..., 0]
    return jnp.where(batch.mask, chosen, 0.0)


def mean_kl(start, end, batch):
    def every(params):
        h, w = bigram(params, batch)
        return jax.nn.log_softmax(h @ w / batch.temperature[..., None])

    p, q = every(start), every(end)
    kl = jnp.sum(jnp.exp(p) * (p - q), -1)
    return jnp.sum(jnp.where(batch.mask, kl, 0.0)) / jnp.sum(batch.mask)


def dense_fisher(params, batch):
    """Σ over trained tokens of J^T (diag p - p p^T) J / N, from loops over tokens."""
    out = np.zeros((V, V, V, V))
    z, tokens, mask, tau = map(np.asarray, (params, batch.tokens, batch.mask, batch.temperature))
    for b, t in np.argwhere(mask):
        before = tokens[b, t - 1]
        p = np.exp(z[before] / tau[b, t])
        p /= p.sum()
        out[before, :, before, :] += (np.diag(p) - np.outer(p, p)) / tau[b, t] ** 2
    return out.reshape(V * V, V * V) / mask.sum()


@functools.cache
def compiled_step(**options):
    return make_trust_region_step(TRPO, WIDE, policy=bigram, donate=False, **EXACT, **options)


prepare = make_prepare(TRPO)


def take_step(params, batch, max_kl=0.01, damping=0.05, **options):
    batch, objective_state = prepare(batch, TRPO.init())
    state = init_state(params, optax.identity(), TRPO, key=jax.random.key(0))
    state = state.replace(objective_state=objective_state)
    state, metrics = compiled_step(max_kl=max_kl, damping=damping, **options)(state, batch)
    return state, {name: float(mean.value) for name, mean in metrics.items()}


# ------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize(("chunk", "blocks"), [(None, 1), (5, 1), (6, 2)])
def test_kl_and_fisher_of_the_head_equal_the_dense_ones(chunk, blocks):
    with testing.float64():
        rng = np.random.default_rng(0)
        B, T, D = 4, 7, 3
        h, g, dh = (jnp.asarray(rng.normal(size=(B, T, D))) for _ in range(3))
        w, u, dw = (jnp.asarray(rng.normal(size=(D, V))) for _ in range(3))
        tau = jnp.asarray(rng.uniform(0.5, 2.0, (B, T)))
        active = jnp.asarray(rng.random((B, T)) < 0.6).at[3].set(False)
        weight = jnp.where(active, jnp.asarray(rng.random((B, T))), 0.0)
        spoilt = jnp.where(active[..., None], h, jnp.nan), jnp.where(active, tau, jnp.nan)

        def logits(h, w):
            return h @ w / tau[..., None]

        p, q = jax.nn.log_softmax(logits(h, w)), jax.nn.log_softmax(logits(g, u))
        expected = np.where(active, np.sum(np.exp(p) * (p - q), -1), 0.0)
        options = {"dtype": "float64", "chunk": chunk, "blocks": blocks}
        found = head_kl((spoilt[0], w), (g, u), spoilt[1], active, **options)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)

        dz, pull = jax.jvp(logits, (h, w), (dh, dw))[1], jax.vjp(logits, h, w)[1]
        p = jnp.exp(p)
        bent = weight[..., None] * (p * dz - p * jnp.sum(p * dz, -1, keepdims=True))
        found = head_fisher((spoilt[0], w), (dh, dw), spoilt[1], weight, **options)
        for a, b in zip(found, pull(bent), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_fisher_product_through_the_decoder_is_the_hessian_of_the_kl():
    """Against central differences of the KL's gradient, with the logits of the whole batch in memory."""
    with testing.float64():
        params = init_params(WIDE, jax.random.key(0), "float64")
        rng = np.random.default_rng(0)
        vector = jax.tree.map(lambda x: jnp.asarray(0.1 * rng.normal(size=x.shape)), params)
        batch = TokenBatch.from_rows(rng.integers(3, 128, (2, 6)), np.ones((2, 6), bool), temperature=0.8)
        weight = jnp.where(batch.mask, jnp.asarray(rng.random((2, 6))), 0.0)

        def every(p):
            h, w = decoder_features(WIDE, False)(p, batch)
            return jax.nn.log_softmax(h @ w / 0.8)

        start = every(params)

        @jax.jit
        def gradient(scale):
            def kl(p):
                return jnp.sum(weight * jnp.sum(jnp.exp(start) * (start - every(p)), -1))

            return jax.grad(kl)(jax.tree.map(lambda p, v: p + scale * v, params, vector))

        expected = jax.tree.map(lambda a, b: (a - b) / 2e-6, gradient(1e-6), gradient(-1e-6))
        found = jax.jit(
            functools.partial(fisher_product, decoder_features(WIDE, True), dtype="float64", chunk=4)
        )(params, vector, batch, weight)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_conjugate_gradient_solves_and_says_what_is_left():
    with testing.float64():
        rng = np.random.default_rng(0)
        root = rng.normal(size=(6, 6))
        A, b = root @ root.T + np.eye(6), rng.normal(size=6)
        x, r = conjugate_gradient(lambda v: A @ v, jnp.asarray(b), iterations=20, residual=1e-28)
        np.testing.assert_allclose(x, np.linalg.solve(A, b), rtol=1e-10)
        x, r = conjugate_gradient(lambda v: A @ v, jnp.asarray(b), iterations=3, residual=0.0)
        np.testing.assert_allclose(r, b - A @ x, atol=1e-12)
        assert np.linalg.norm(r) > 1e-6
        small, _ = conjugate_gradient(lambda v: A @ v, jnp.asarray(b * 1e-9), iterations=20, residual=1e-20)
        np.testing.assert_allclose(small, 1e-9 * np.linalg.solve(A, b), rtol=1e-8)
        for bad in (np.nan, -1.0):
            x, r = conjugate_gradient(lambda v, bad=bad: bad * v, jnp.asarray(b), iterations=9, residual=0.0)
            assert not np.any(x) and np.array_equal(r, b)


# ----------------------------------------------------------------------------------------- the step


@pytest.mark.parametrize(
    ("max_kl", "damping", "options"),
    [(0.01, 0.05, {}), (2.0, 1e-3, {"micro_batch_rows": 3, "chunk": 5})],
)
@pytest.mark.slow
def test_the_step_is_that_of_a_dense_solve(max_kl, damping, options):
    """x = -(F + damping)⁻¹ g, scaled to max_kl, and every figure that is reported; in one piece and in parts."""
    with testing.float64():
        params = testing.tiny_policy_params(1)
        batch = bigram_batch(params)
        state, metrics = take_step(params, batch, max_kl, damping, **options)

        def value(p):
            return loss(TRPO, logprobs(p, batch), batch)[0]

        g = np.asarray(jax.grad(value)(params)).ravel()
        H = dense_fisher(params, batch) + damping * np.eye(V * V)
        x = np.linalg.solve(H, -g)
        full = np.sqrt(2 * max_kl / (x @ H @ x)) * x
        taken = np.asarray(state.params - params).ravel()
        np.testing.assert_allclose(taken, metrics["trust_region_scale"] * full, rtol=1e-6, atol=1e-9)

        assert metrics["trust_region_kl"] == pytest.approx(float(mean_kl(params, state.params, batch)))
        assert 0 < metrics["trust_region_kl"] <= max_kl
        assert metrics["loss"] == pytest.approx(float(value(params)), abs=1e-12)
        gain = float(value(params) - value(state.params))
        assert metrics["trust_region_gain"] == pytest.approx(gain) and gain > 0
        assert metrics["grad_norm"] == pytest.approx(np.linalg.norm(g))
        assert metrics["trust_region_residual"] < 1e-9 and metrics["skipped"] == 0
        assert metrics["ratio_max"] == pytest.approx(1.0)
        # The step before the one taken was outside the region, or no better; a full step has none before it.
        if metrics["trust_region_scale"] == 1:
            assert max_kl < 1
        else:
            double = params + 2 * (state.params - params)
            assert mean_kl(params, double, batch) > max_kl or value(double) >= value(params)


def test_when_no_step_is_inside_the_region_nothing_moves():
    """The full step of a wide region without damping overshoots, and one try finds no other."""
    with testing.float64():
        params = testing.tiny_policy_params(1)
        state, metrics = take_step(params, bigram_batch(params), 2.0, 1e-3, backtracks=1)
        assert np.array_equal(state.params, params) and int(state.skipped) == 1
        assert metrics["skipped"] == 1 and metrics["trust_region_scale"] == 0
        assert metrics["trust_region_kl"] == 0 and metrics["trust_region_gain"] == 0


def test_without_a_usable_gradient_nothing_moves():
    with testing.float64():
        params = testing.tiny_policy_params(1)
        batch = bigram_batch(params)
        ones = jnp.ones(batch.shape)
        for changed in (
            {"reward": ones * 0},
            {"reward_valid": ones < 0},
            {"mask": ones < 0},
            {"logprob_proximal": ones * jnp.nan},
        ):
            state, metrics = take_step(params, batch.replace(**changed))
            assert np.array_equal(state.params, params)
            assert metrics["skipped"] == 1 and int(state.skipped) == 1
            if "logprob_proximal" not in changed:
                assert np.all(np.isfinite(list(metrics.values())))


def test_arguments_are_checked():
    for bad, text in (({"max_kl": 0.0}, "max_kl"), ({"damping": -1.0}, "damping"), ({"backtracks": 0}, "1")):
        with pytest.raises(ValueError, match=text):
            make_trust_region_step(TRPO, TINY, **bad)


@pytest.mark.slow
def test_the_tiny_decoder_improves_within_the_region(tiny_params):
    """Four train steps on one batch: every step raises the surrogate and keeps the KL within its bound."""
    rng = np.random.default_rng(0)
    B, T = 8, 12
    raw = TokenBatch.from_rows(
        rng.integers(3, TINY.vocab_size, (B, T)),
        np.arange(T) >= rng.integers(2, 5, (B, 1)),
        group=np.arange(B) // 4,
        reward=np.array([1, 0, 0, 1, 0, 1, 0, 0]),
    )
    score = make_score(TINY)
    first = score(tiny_params, raw)
    step = make_trust_region_step(TRPO, TINY, max_kl=0.005, cg_iterations=5, micro_batch_rows=4)
    state = init_state(jax.tree.map(jnp.copy, tiny_params), optax.identity(), TRPO, key=jax.random.key(0))
    for _ in range(3):
        batch = raw.replace(logprob_behavior=score(state.params, raw))
        batch = fill_logprobs(batch, state, score, needed_fields(TRPO))
        batch, objective_state = prepare(batch, state.objective_state)
        state, metrics = step(state.replace(objective_state=objective_state), batch)
        metrics = {name: float(mean.value) for name, mean in metrics.items()}
        assert metrics["skipped"] == 0
        assert metrics["trust_region_gain"] > 1e-3
        assert 0.001 < metrics["trust_region_kl"] <= 0.005
    moved = np.asarray(score(state.params, raw) - first)
    advantage = np.asarray(batch.advantage)
    assert moved[advantage > 0].mean() > 0.05 and moved[advantage < 0].mean() < -0.05
