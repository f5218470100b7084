"""The critic: what its values see, its loss and gradient, and PPO with it on a task of tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import recipes, testing
from jaxrl_llm.learner.critic import (
    fill_values,
    init_critic,
    init_value_head,
    make_critic_step,
    make_values,
    value_policy,
    values,
)
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.score import fill_logprobs, make_score
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import policy_output
from jaxrl_llm.transforms import needed_fields
from jaxrl_llm.types import TokenBatch

WIDE = dataclasses.replace(TINY, dtype="float64")
PPO = recipes.ppo(lam=0.95)
SGD = optax.sgd(1.0)


@pytest.fixture(autouse=True, scope="module")
def compile_fast():
    """Small programs, run a few times: compiling them fast matters more than running them fast.

    Programs compiled so round differently. JAX keeps them whatever the setting is later, so they are thrown away:
    a test that compares two runs bit for bit must not find some of them in one process.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()


@functools.cache
def params():
    return init_params(TINY, jax.random.key(0))


def with_head(params, seed=0, dtype="float32"):
    """A value head that is not zero."""
    head = init_value_head(TINY, dtype)
    noise = np.random.default_rng(seed).normal(size=TINY.hidden_size)
    return {**params, "value": head["value"] + noise, "value_bias": head["value_bias"] + 0.3}


def rows(seed=0, B=5, T=9, **changes):
    """Ragged rows with a gap in a mask, one that trains nothing, one without a reward, two that were cut."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, T + 1, B)
    columns = np.arange(T)
    mask = (columns >= 2) & (columns < lengths[:, None])
    mask[0, 3] = False
    mask[3] = False
    given = {
        "reward": np.array([1.0, 0.0, np.nan, 1.0, 0.5]),
        "truncated": np.array([True, False, False, True, True]),
        "lengths": lengths,
        **changes,
    }
    return TokenBatch.from_rows(rng.integers(3, 128, (B, T)), mask, **given)


values_of = jax.jit(values, static_argnums=1)


# -------------------------------------------------------------------------------------------- values


def test_a_value_has_seen_the_tokens_before_and_no_other():
    batch, critic = rows(), with_head(params())
    value = np.asarray(values_of(critic, TINY, batch))
    assert value.shape == batch.shape and not np.any(value[~np.asarray(batch.mask)])
    assert np.std(value[np.asarray(batch.mask)]) > 0.1
    at = 4
    changed = batch.replace(tokens=batch.tokens.at[:, at].add(-1))
    moved = np.asarray(values_of(critic, TINY, changed)) != value
    later = np.asarray(batch.mask) & (np.arange(9) > at)
    assert not moved[:, : at + 1].any() and moved[later].all()


def test_packed_rows_have_the_values_of_padded_ones():
    batch, critic = rows(), with_head(params())
    value = np.asarray(values_of(critic, TINY, batch))[np.asarray(batch.mask)]
    packed = testing.pack(batch)
    found = np.asarray(values_of(critic, TINY, packed))[np.asarray(packed.mask)]
    np.testing.assert_allclose(np.sort(found), np.sort(value), atol=1e-4)


def test_values_fill_what_is_needed_and_nothing_else():
    critic = with_head(init_critic(params(), TINY))
    state = init_state(
        params(), SGD, PPO, key=jax.random.key(0), critic=critic, critic_optimizer=make_optimizer(1e-3)
    )
    score, batch = make_values(TINY, micro_batch_rows=2), rows()
    assert fill_values(batch, state, score, {"entropy", "logprob_proximal"}) is batch
    filled = fill_values(batch, state, score, {"value"})
    np.testing.assert_allclose(filled.value, values_of(critic, TINY, batch), atol=1e-6)
    assert filled.bootstrap_value is None
    both = fill_values(filled, state, score, {"value", "bootstrap_value"})
    assert both.value is filled.value  # frozen within a train step

    # A token more at the end of each row: the value before it is the one after the last.
    longer = TokenBatch.from_rows(jnp.pad(batch.tokens, ((0, 0), (0, 1))), np.ones((5, 10), bool))
    after = np.asarray(values_of(critic, TINY, longer))
    end = np.asarray(both.bootstrap_value)
    for b in range(5):
        where = np.flatnonzero(np.asarray(batch.mask[b]))
        expected = after[b, where[-1] + 1] if b in (0, 4) else 0.0  # row 3 is cut, and trains nothing
        np.testing.assert_allclose(end[b][where], expected, atol=1e-5)
    assert not end[~np.asarray(batch.mask)].any()


def test_without_a_critic_it_says_what_to_create():
    state = init_state(params(), SGD, PPO, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"init_critic\(params, config\)"):
        fill_values(rows(), state, make_values(TINY), {"value"})
    with pytest.raises(ValueError, match="state.critic is None"):
        make_critic_step(TINY, SGD)(state, rows())
    with pytest.raises(ValueError, match="critic without critic_optimizer"):
        init_state(params(), SGD, PPO, key=jax.random.key(0), critic=init_value_head(TINY))
    with pytest.raises(ValueError, match="clip must be a number > 0"):
        make_critic_step(TINY, SGD, clip=0.0)


# ---------------------------------------------------------------------------------- loss and gradient


def critic_state(policy, critic):
    return init_state(policy, SGD, PPO, key=jax.random.key(0), critic=critic, critic_optimizer=SGD)


@pytest.mark.parametrize(
    ("own", "options"),
    [("model", {"clip": 0.2, "whiten": True, "micro_batch_rows": 2}), ("head", {})],
)
def test_gradient_equals_finite_differences(own, options):
    """In float64, along three directions, of a loss written with loops over tokens."""
    with testing.float64():
        policy = init_params(WIDE, jax.random.key(0), "float64")
        rng = np.random.default_rng(1)
        batch = jax.tree.map(lambda x: x, rows())
        old = rng.normal(size=batch.shape)
        returns = old + 0.3 * rng.normal(size=batch.shape)
        returns[~np.asarray(batch.mask)] = np.nan  # must not be read
        batch = batch.replace(
            value=jnp.asarray(old), returns=jnp.asarray(returns), signal=batch.mask & batch.reward_valid
        )
        full = with_head(policy, dtype="float64")
        critic = full if own == "model" else {name: full[name] for name in ("value", "value_bias")}
        on = np.asarray(batch.signal)

        def written(critic):
            now = np.asarray(values_of({**policy, **critic}, WIDE, batch))
            total = 0.0
            for b, t in np.argwhere(on):
                v, r, o = now[b, t], returns[b, t], old[b, t]
                error = (v - r) ** 2
                if "clip" in options:
                    error = max(error, (o + np.clip(v - o, -0.2, 0.2) - r) ** 2)
                total += error / 2
            scale = 1 / np.var(returns[on], ddof=1) if "whiten" in options else 1.0
            return scale * total / on.sum()

        step = make_critic_step(WIDE, SGD, donate=False, **options)
        state, metrics = step(critic_state(policy, critic), batch)
        metrics = {name: float(mean.value) for name, mean in metrics.items()}
        gradient = jax.tree.map(lambda a, b: a - b, critic, state.critic)
        assert metrics["critic_loss"] == pytest.approx(written(critic), rel=1e-9)
        assert metrics["critic_grad_norm"] == pytest.approx(float(optax.global_norm(gradient)), rel=1e-6)
        assert metrics["critic_skipped"] == 0
        assert all(
            a is b or np.array_equal(a, b)
            for a, b in zip(*map(jax.tree.leaves, (state.params, policy)), strict=True)
        )
        for seed in range(3):
            noise = np.random.default_rng(seed)
            along = jax.tree.map(lambda x, n=noise: n.normal(size=x.shape), critic)
            up, down = (
                written(jax.tree.map(lambda c, d, s=s: c + s * 1e-6 * d, critic, along)) for s in (1, -1)
            )
            expected = sum(jax.tree.leaves(jax.tree.map(lambda g, d: jnp.sum(g * d), gradient, along)))
            assert (up - down) / 2e-6 == pytest.approx(float(expected), rel=1e-5)


def test_bad_returns_and_empty_batches_are_skipped():
    step = make_critic_step(TINY, SGD, donate=False)
    start = with_head(init_critic(params(), TINY))
    state = critic_state(params(), start)
    batch = rows().replace(returns=jnp.ones((5, 9)))
    for changed in ({"returns": jnp.full((5, 9), jnp.nan)}, {"mask": jnp.zeros((5, 9), bool)}):
        after, metrics = step(state, batch.replace(**changed))
        assert float(metrics["critic_skipped"].value) == 1 and int(after.skipped) == 1
        assert all(
            np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (after.critic, start)), strict=True)
        )
    _, metrics = step(state, batch)
    assert float(metrics["critic_skipped"].value) == 0


def test_a_shared_head_gives_both_from_one_pass():
    """Log-probs and entropy are those of the policy alone; a detached value moves the head only."""
    batch, shared = rows(), with_head(params())
    batch = batch.replace(temperature=jnp.full((5, 9), 0.7))
    policy = value_policy(TINY, entropy=True, remat=False)
    output = jax.jit(policy)(shared, batch)
    alone = jax.jit(lambda p, b: policy_output(p, TINY, b, entropy=True))(params(), batch)
    np.testing.assert_allclose(output.logprob, alone.logprob, atol=1e-5)
    np.testing.assert_allclose(output.entropy, alone.entropy, atol=1e-5)
    np.testing.assert_allclose(output.value, values_of(shared, TINY, batch), atol=1e-5)
    for detach in (False, True):
        policy = value_policy(TINY, detach=detach, remat=False)
        gradient = jax.jit(jax.grad(lambda p, policy=policy: jnp.sum(policy(p, batch).value ** 2)))(shared)
        head = float(optax.global_norm([gradient.pop("value"), gradient.pop("value_bias")]))
        body = float(optax.global_norm(gradient))
        assert head > 1 and (body == 0 if detach else body > 1)


# ---------------------------------------------------------------------------------------- PPO at work

PROMPTS, LENGTH = 32, 6


@jax.jit
def sample(params, key):
    """Rows of one prompt token and LENGTH sampled ones, from the decoder itself."""
    width = LENGTH + 1
    tokens = jnp.zeros((PROMPTS, width), jnp.int32).at[:, 0].set(3 + jnp.arange(PROMPTS) % 2)
    positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)

    def draw(t, tokens):
        hidden = forward(params, TINY, tokens, positions, jnp.ones_like(tokens))
        logits = hidden[:, t - 1].astype(jnp.float32) @ head_weight(params, TINY)
        return tokens.at[:, t].set(jax.random.categorical(jax.random.fold_in(key, t), logits))

    return jax.lax.fori_loop(1, width, draw, tokens)


def bandit(tokens):
    """1 for each sampled token of the prompt's half of the vocabulary, at the token."""
    upper = np.asarray(tokens[:, :1]) == 4
    return ((np.asarray(tokens) >= TINY.vocab_size // 2) == upper).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("own", ["model", "shared"])
def test_ppo_learns_a_bandit_of_tokens(own):
    """The reward of a random policy is half; sixteen train steps of two updates each raise it well above."""
    optimizer = make_optimizer(5e-3)
    if own == "model":
        objective = PPO
        critic = init_critic(params(), TINY)
        given = {"critic": critic, "critic_optimizer": optimizer}
        start = jax.tree.map(jnp.copy, params())
        step = make_update_step(objective, TINY, optimizer, remat=False)
        critic_step = make_critic_step(TINY, optimizer, clip=0.5, remat=False)
    else:
        objective = recipes.ppo(lam=0.95, value_coef=0.5, value_clip=0.5)
        given, critic_step = {}, None
        start = {**jax.tree.map(jnp.copy, params()), **init_value_head(TINY)}
        step = make_update_step(objective, TINY, optimizer, policy=value_policy(TINY, remat=False))
    score, score_values, prepare = make_score(TINY), make_values(TINY), make_prepare(objective)
    state = init_state(start, optimizer, objective, key=jax.random.key(0), **given)
    needed = {f for f in needed_fields(objective) if hasattr(TokenBatch, f) or f == "logprob_proximal"}
    earned, errors = [], []
    for i in range(16):
        tokens = sample({name: state.params[name] for name in params()}, jax.random.key(i))
        reward = bandit(tokens)
        batch = TokenBatch.from_rows(tokens, np.ones(tokens.shape, bool), reward=reward)
        batch = batch.replace(logprob_behavior=score(state.params, batch))
        batch = fill_values(batch, state, score_values, needed)
        batch = fill_logprobs(batch, state, score, needed)
        batch, objective_state = prepare(batch, state.objective_state)
        state = state.replace(objective_state=objective_state)
        earned.append(reward[:, 1:].mean())
        for _ in range(2):
            if critic_step is not None:
                state, of_critic = critic_step(state, batch)
            state, metrics = step(state, batch)
            assert float(metrics["skipped"].value) == 0
        error = of_critic["critic_error"] if critic_step else metrics["value_error"]
        errors.append(float(error.value))
    assert earned[0] < 0.6 and np.mean(earned[-4:]) > 0.8
    assert np.mean(errors[-4:]) < 0.3 * errors[0]
