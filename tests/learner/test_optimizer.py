"""AdamW, warm-up, schedules, clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm.learner.optimizer import applied_learning_rate, decayed, make_optimizer, make_schedule


def _rates(schedule, steps):
    return [float(schedule(i)) for i in range(steps)]


def test_k05_warm_up_reaches_the_peak_at_its_last_update():
    """K05: linear warm-up of 4 updates to 1e-3, constant after."""
    rates = _rates(make_schedule(1e-3, warmup_steps=4), 6)
    np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3], rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.5, 1.0, 1.0, 0.82, 0.64, 0.46, 0.28]),
        ("cosine", [0.5, 1.0, 1.0, 0.914, 0.689, 0.411, 0.186]),
    ],
)
def test_decay_starts_at_the_peak_and_the_last_update_still_moves(schedule, expected):
    rate = make_schedule(1.0, warmup_steps=2, total_steps=7, schedule=schedule, final_fraction=0.1)
    np.testing.assert_allclose(_rates(rate, 7), expected, atol=1e-3)
    assert float(rate(100)) == pytest.approx(0.1)  # a longer run stays there


def test_default_is_a_constant_rate():
    assert _rates(make_schedule(3e-5), 3) == pytest.approx([3e-5] * 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "exponential"}, "constant, linear or cosine"),
        ({"schedule": "linear"}, "total_steps"),
        ({"schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "greater than warmup_steps"),
        ({"warmup_steps": -1}, "negative"),
    ],
)
def test_impossible_schedules_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(1e-3, **arguments)


def test_negative_clip_norm_is_refused():
    with pytest.raises(ValueError, match="clip_norm"):
        make_optimizer(1e-3, clip_norm=-1.0)


def test_one_step_equals_adamw_by_hand():
    """Loshchilov & Hutter: p - lr * (m_hat / (sqrt(v_hat) + eps) + decay * p), gradient clipped to norm 1."""
    params = {"w": jnp.array([3.0, -4.0]), "mlp_norm": jnp.array([1.0])}
    grads = {"w": jnp.array([3.0, 4.0]), "mlp_norm": jnp.array([12.0])}  # norm 13
    optimizer = make_optimizer(0.1, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.01, clip_norm=1.0)
    state = optimizer.init(params)
    for _ in range(2):
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    # A constant gradient gives m_hat / sqrt(v_hat) = sign(g), clipped or not.
    w = np.array([3.0, -4.0])
    for _ in range(2):
        w = w - 0.1 * (np.array([1.0, 1.0]) + 0.01 * w)
    np.testing.assert_allclose(params["w"], w, rtol=1e-5)
    np.testing.assert_allclose(params["mlp_norm"], [0.8], rtol=1e-5)  # not decayed
    mu = optax.tree_utils.tree_get(state, "mu")
    np.testing.assert_allclose(mu["w"], (1 - 0.9**2) * np.array([3.0, 4.0]) / 13, rtol=1e-5)


def test_updates_are_those_of_optax():
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)}
    ours = make_optimizer(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1, clip_norm=0.7)
    theirs = optax.chain(
        optax.clip_by_global_norm(0.7), optax.adamw(1e-2, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.1)
    )
    states = [optimizer.init(params) for optimizer in (ours, theirs)]
    for _ in range(4):
        grads = {"w": jnp.asarray(rng.standard_normal((3, 4)), jnp.float32)}
        results = [o.update(grads, s, params) for o, s in zip((ours, theirs), states, strict=True)]
        states = [state for _, state in results]
        np.testing.assert_allclose(results[0][0]["w"], results[1][0]["w"], rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 0, 0.0])
def test_no_clipping(clip_norm):
    optimizer = make_optimizer(1.0, clip_norm=clip_norm)
    _, state = optimizer.update({"w": jnp.array([30.0])}, optimizer.init({"w": jnp.array([0.0])}))
    assert float(optax.tree_utils.tree_get(state, "mu")["w"][0]) == pytest.approx(3.0)


def test_only_matrices_decay(tiny_params):
    mask = decayed(tiny_params)
    assert mask["layers"] == {name: not name.endswith("norm") for name in tiny_params["layers"]}
    assert mask["embed"] and not mask["final_norm"]


def test_k05_saved_moments_and_schedule_position_continue_exactly():
    """K05: save after 3 updates, restore, and the next ones are bitwise those of the uninterrupted run."""
    optimizer = make_optimizer(1e-3, warmup_steps=4, weight_decay=0.1)
    update = jax.jit(optimizer.update)
    rng = np.random.default_rng(0)
    grads = [{"w": jnp.asarray(rng.standard_normal(5), jnp.float32)} for _ in range(6)]

    def run(params, state, grads):
        rates = []
        for g in grads:
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
            rates.append(float(applied_learning_rate(state)))
        return params, state, rates

    start = {"w": jnp.ones(5)}
    params, state, rates = run(start, optimizer.init(start), grads)
    np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3], rtol=1e-6)
    half, half_state, _ = run(start, optimizer.init(start), grads[:3])
    saved = jax.tree.map(np.asarray, (half, half_state))
    restored = jax.tree.map(jnp.asarray, saved)
    again, again_state, again_rates = run(*restored, grads[3:])
    assert again_rates == rates[3:]
    for a, b in zip(jax.tree.leaves((params, state)), jax.tree.leaves((again, again_state)), strict=True):
        assert np.array_equal(a, b)


def test_rate_of_another_optimizer_is_not_invented():
    assert applied_learning_rate(optax.sgd(0.1).init({"w": jnp.ones(2)})) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("b1", 0.99999999),
        ("b2", 0.99999999),
        ("b2", 1.0),
        ("eps", 1e-46),
        ("eps", 1e-39),
        ("learning_rate", 1e39),
        ("weight_decay", 1e300),
    ],
)
def test_numbers_that_overflow_or_vanish_in_f32_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        make_optimizer(**{"learning_rate": 1e-3, name: value})
