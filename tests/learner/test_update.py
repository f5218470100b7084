"""The update step: what it adds up, divides, skips, reports and leaves alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_llm import recipes
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.score import fill_logprobs, make_score
from jaxrl_llm.learner.state import finish_train_step, init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step, merge_extremes
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import parameter_specs
from jaxrl_llm.transforms import (
    chain,
    given_advantage,
    needed_fields,
    normalize_by_token,
    reinforce_surrogate,
)
from jaxrl_llm.types import PolicyOutput, TokenBatch

TOKEN_MEAN = chain(given_advantage(), normalize_by_token(), reinforce_surrogate())
toy_prepare = make_prepare(TOKEN_MEAN)


def toy_policy(params, batch):
    """The log-prob of a token is a parameter of its own: the gradient says who was paired with whom."""
    return PolicyOutput(logprob=params["w"][batch.tokens])


def toy_batch(losses, *, columns=None):
    """Rows of trained tokens with distinct ids 0, 1, …; with w = 1 token i contributes losses[i]."""
    width = 1 + (columns or max(len(row) for row in losses))
    tokens, mask = np.zeros((len(losses), width), int), np.zeros((len(losses), width), bool)
    advantage = np.zeros((len(losses), width), np.float32)
    ids = iter(range(10_000))
    for i, row in enumerate(losses):
        for j, value in enumerate(row, start=1):
            tokens[i, j], mask[i, j], advantage[i, j] = next(ids), True, -value
    return TokenBatch.from_rows(tokens, mask, advantage=advantage)


def toy_step(batch, *, optimizer=None, w=None, steps=1, state=None, **options):
    optimizer = optimizer or optax.sgd(1.0)
    batch, _ = toy_prepare(batch, TOKEN_MEAN.init())
    if state is None:
        params = {"w": jnp.ones(16) if w is None else w}
        state = init_state(params, optimizer, TOKEN_MEAN, key=jax.random.key(0))
    step = make_update_step(TOKEN_MEAN, TINY, optimizer, policy=toy_policy, **options)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, {name: float(mean.value) for name, mean in metrics.items()}


# ------------------------------------------------------------------- sums, denominators, micro-batches


@pytest.mark.parametrize("rows", [None, 1, 2])
def test_n01_micro_batches_share_one_denominator(rows):
    """N01: [2.0 | 1.0 1.0 1.0 0.5] is 5.5 / 5 = 1.1; the mean of means would be 1.4375, two divisions 0.55."""
    state, metrics = toy_step(toy_batch([[2.0], [1.0, 1.0, 1.0, 0.5]]), micro_batch_rows=rows)
    assert metrics["loss"] == pytest.approx(1.1, rel=1e-6)
    delta = 1.0 - np.asarray(state.params["w"])
    np.testing.assert_allclose(delta[:5], np.array([2.0, 1.0, 1.0, 1.0, 0.5]) / 5, rtol=1e-6)
    assert not delta[5:].any()


def test_n01_five_micro_batches_of_one_token():
    state, metrics = toy_step(toy_batch([[2.0], [1.0], [1.0], [1.0], [0.5]]), micro_batch_rows=1)
    assert metrics["loss"] == pytest.approx(1.1, rel=1e-6)
    np.testing.assert_allclose(
        1 - np.asarray(state.params["w"])[:5], np.array([2, 1, 1, 1, 0.5]) / 5, rtol=1e-6
    )


def test_n01_an_incomplete_last_micro_batch_is_not_dropped():
    """N01, variant: five rows in micro-batches of two; the sixth row is inert."""
    state, metrics = toy_step(toy_batch([[2.0], [1.0], [1.0], [1.0], [0.5]]), micro_batch_rows=2)
    assert metrics["loss"] == pytest.approx(1.1, rel=1e-6) and metrics["trained_tokens"] == 5
    assert 1 - float(state.params["w"][4]) == pytest.approx(0.1)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_d04_every_sample_meets_its_own_advantage(rows):
    """D04: A = 1 … 8 over samples whose gradients are one-hot gives back 1 … 8."""
    state, _ = toy_step(toy_batch([[-float(a)] for a in range(1, 9)]), micro_batch_rows=rows)
    np.testing.assert_allclose((np.asarray(state.params["w"])[:8] - 1) * 8, np.arange(1, 9), rtol=1e-6)


def test_a_row_without_tokens_adds_nothing():
    """D01: two tokens with sum 6, eight with sum 8, none: 14 / 10 and not the mean 2.0 of means."""
    _, metrics = toy_step(toy_batch([[3.0, 3.0], [1.0] * 8, []]), micro_batch_rows=1)
    assert metrics["loss"] == pytest.approx(1.4, rel=1e-6)


def test_padding_width_changes_nothing():
    narrow = toy_step(toy_batch([[2.0], [1.0, 0.5]]))
    wide = toy_step(toy_batch([[2.0], [1.0, 0.5]], columns=9))
    assert narrow[1] == wide[1]
    assert np.array_equal(narrow[0].params["w"], wide[0].params["w"])


# ------------------------------------------------------------------- skipped steps


def test_n28_a_step_that_is_not_finite_changes_nothing_but_the_count():
    """N28: schedule 0 -> 1 over 10 steps, gradients [1, NaN, 1, 1]: rates 0.0, skipped, 0.1, 0.2."""
    optimizer = optax.sgd(optax.linear_schedule(0.0, 1.0, 10), momentum=0.9)
    good, bad = toy_batch([[1.0]]), toy_batch([[np.nan]])
    state, _ = toy_step(good, optimizer=optimizer)
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = toy_step(bad, optimizer=optimizer, state=state)
    after = jax.tree.map(np.asarray, (state.params, state.opt_state))
    for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert np.array_equal(a, b)
    assert metrics["skipped"] == 1 and int(state.skipped) == 1
    positions = [float(state.params["w"][0])]
    for _ in range(2):
        state, metrics = toy_step(good, optimizer=optimizer, state=state)
        positions.append(float(state.params["w"][0]))
    # velocities 1, 1.9, 2.71 times the rates 0.0, 0.1, 0.2
    np.testing.assert_allclose(-np.diff(positions), [0.19, 0.542], rtol=1e-5)
    assert metrics["skipped"] == 0 and int(state.skipped) == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rows", [None, 1])
def test_n28_one_bad_micro_batch_spoils_the_whole_step(value, rows):
    state, metrics = toy_step(toy_batch([[1.0], [value]]), micro_batch_rows=rows)
    assert metrics["skipped"] == 1 and np.array_equal(state.params["w"], np.ones(16))


def test_a_gradient_that_overflows_is_skipped():
    state, metrics = toy_step(toy_batch([[3e38, 3e38]]))
    assert metrics["skipped"] == 1 and np.array_equal(state.params["w"], np.ones(16))


@pytest.mark.parametrize("rows", [None, 1])
def test_nothing_to_train_on_is_a_skipped_step(rows):
    """Also with weight decay and momentum, which would move the parameters on a zero gradient."""
    optimizer = make_optimizer(0.1, weight_decay=0.5)
    state, _ = toy_step(toy_batch([[1.0]]), optimizer=optimizer)
    before = np.asarray(state.params["w"])
    state, metrics = toy_step(
        toy_batch([[], []], columns=1), optimizer=optimizer, state=state, micro_batch_rows=rows
    )
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0
    assert metrics["skipped"] == 1 and int(state.skipped) == 1
    assert np.array_equal(state.params["w"], before)


# ------------------------------------------------------------------- precision, clipping, state


def test_n17_small_updates_accumulate_in_f32_masters():
    """N17: 1,000 updates of 1e-5 move 1.0 to 0.98999; bf16 parameters would stay at 1.0. Resume is bitwise."""
    batch = toy_batch([[1.0]])
    kw = {"optimizer": optax.sgd(1e-5), "steps": 500}
    start = jnp.ones(16, jnp.bfloat16)
    half, _ = toy_step(batch, w=start, **kw)
    saved = jax.tree.map(np.asarray, half.params)
    whole, _ = toy_step(batch, state=half, **kw)
    assert whole.params["w"].dtype == jnp.float32
    assert float(whole.params["w"][0]) == pytest.approx(0.98999, abs=2e-5)
    assert float(whole.params["w"][0].astype(jnp.bfloat16)) == 0.98828125
    resumed, _ = toy_step(batch, w=jax.tree.map(jnp.asarray, saved)["w"], **kw)
    assert np.array_equal(resumed.params["w"], whole.params["w"])


@pytest.mark.parametrize("rows", [None, 1])
def test_d02_norm_is_of_the_whole_gradient_and_clipped_once(rows):
    """D02: gradient norm 2.0 is reported as 2.0 and clipped to 1.0, whatever the split."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    state, metrics = toy_step(toy_batch([[4.0] * 2, [4.0] * 2]), optimizer=optimizer, micro_batch_rows=rows)
    assert metrics["grad_norm"] == pytest.approx(2.0, rel=1e-6)
    assert float(jnp.linalg.norm(1 - state.params["w"])) == pytest.approx(1.0, rel=1e-6)


def test_learning_rate_is_reported_when_it_is_applied():
    optimizer = make_optimizer(1e-3, warmup_steps=4)
    state, seen = None, []
    for _ in range(5):
        state, metrics = toy_step(toy_batch([[1.0]]), optimizer=optimizer, state=state)
        seen.append(metrics["learning_rate"])
    np.testing.assert_allclose(seen, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3], rtol=1e-6)


def test_state_is_donated_unless_told_otherwise():
    w = jnp.ones(16)
    toy_step(toy_batch([[1.0]]), w=w, donate=False)
    assert not w.is_deleted()
    toy_step(toy_batch([[1.0]]), w=w)
    assert w.is_deleted()


def test_gap_to_the_sampler_is_the_largest_of_all_micro_batches():
    batch = toy_batch([[1.0], [1.0], [1.0]])
    behavior = np.array([[0, 0.9], [0, 3.5], [0, 1.0]], np.float32)  # w is 1 everywhere
    _, metrics = toy_step(
        dataclasses.replace(batch, logprob_behavior=jnp.asarray(behavior)), micro_batch_rows=1
    )
    assert metrics["logprob_gap_max"] == pytest.approx(2.5)
    assert metrics["kl_behavior"] == pytest.approx((-0.1 + 2.5 + 0.0) / 3, abs=1e-6)


def test_objective_state_advances_once_a_step_and_not_on_a_skipped_one():
    counter = chain(*[TOKEN_MEAN])._replace(
        init=lambda: {"counter": {"steps": jnp.zeros(()), "loss": jnp.zeros(())}},
        update=lambda state, metrics: {
            "counter": {
                "steps": state["counter"]["steps"] + 1,
                "loss": metrics["loss_policy"].value,
            }
        },
    )
    optimizer = optax.sgd(0.0)
    state = init_state({"w": jnp.ones(16)}, optimizer, counter, key=jax.random.key(0))
    step = make_update_step(counter, TINY, optimizer, policy=toy_policy, micro_batch_rows=1)
    for losses, steps in (([[2.0], [1.0]], 1), ([[np.nan], [1.0]], 1), ([[4.0], [1.0]], 2)):
        batch, _ = toy_prepare(toy_batch(losses), TOKEN_MEAN.init())
        state, _ = step(state, batch)
        assert float(state.objective_state["counter"]["steps"]) == steps
    assert float(state.objective_state["counter"]["loss"]) == pytest.approx(2.5)  # exact over micro-batches


def test_micro_batch_rows_must_be_positive():
    with pytest.raises(ValueError, match="micro_batch_rows=0"):
        make_update_step(TOKEN_MEAN, TINY, optax.sgd(1.0), micro_batch_rows=0)


# ------------------------------------------------------------------- the decoder


def numpy_params(config=TINY, seed=0):
    """Parameters that do not depend on the random generator of a JAX version."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        if spec.init == "ones":
            return jnp.ones(spec.shape)
        std = 0.02 if spec.init == "embed" else spec.fan_in**-0.5
        return jnp.asarray(rng.standard_normal(spec.shape) * std, jnp.float32)

    return jax.tree.map(leaf, parameter_specs(config), is_leaf=lambda x: hasattr(x, "fan_in"))


def tiny_batch(seed=0, B=8, T=20):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(8, T + 1, B)
    prompt = rng.integers(2, 6, B)
    columns = np.arange(T)
    mask = (columns >= prompt[:, None]) & (columns < lengths[:, None])
    return TokenBatch.from_rows(
        rng.integers(3, TINY.vocab_size, (B, T)),
        mask,
        group=np.arange(B) // 4,
        reward=rng.integers(0, 2, B).astype(np.float32),
        logprob_behavior=np.where(mask, -4.5 + 0.5 * rng.standard_normal((B, T)), 0).astype(np.float32),
        lengths=lengths,
        version=0,
    )


GRPO = recipes.grpo()
ADAMW = make_optimizer(1e-3, weight_decay=0.1, warmup_steps=2)
SGD = optax.sgd(1.0)

# Compiled once for all tests: the update step of a decoder takes seconds to compile.
prepare = make_prepare(GRPO)
adamw_step = make_update_step(GRPO, TINY, ADAMW, micro_batch_rows=4)
score = make_score(TINY)


@functools.cache
def sgd_step(dtype="float32", **options):
    return make_update_step(GRPO, dataclasses.replace(TINY, dtype=dtype), SGD, **options)


def begin(params, optimizer, batch):
    state = init_state(params, optimizer, GRPO, key=jax.random.key(0))
    return state, prepare(batch, state.objective_state)[0]


@functools.cache
def sgd_result(dtype="float32", **options):
    """Parameters and metrics after one SGD update of the fixed model and batch."""
    state, batch = begin(numpy_params(), SGD, tiny_batch())
    state, metrics = sgd_step(dtype, **options)(state, batch)
    return state.params, metrics


def test_one_whole_update_is_pinned():
    """Loss, norms and parameters of two GRPO updates with AdamW on a fixed model and batch.

    What a change of these numbers means: the mathematics of training has changed, somewhere between the
    decoder (rotary embedding, norms, attention, head), the log-probs (alignment, temperature), the recipe
    `grpo` (advantages with ddof 1, sequence means, clipping at 0.2), the optimiser (AdamW, clip 1.0, warm-up)
    and the division by the denominator. If the change was meant, say in the commit which formula changed
    and pin the new numbers; if it was not, look for it in that order. Another order of floating-point sums
    moves them by less than the tolerances.
    """
    state, batch = begin(numpy_params(), ADAMW, tiny_batch())
    figures = []
    for _ in range(2):
        state, metrics = adamw_step(state, batch)
        update = jax.tree.map(lambda a, b: a - b, state.params, numpy_params())
        figures.append(
            [
                float(metrics[name].value)
                for name in ("loss", "grad_norm", "entropy", "kl_behavior", "learning_rate")
            ]
            + [float(optax.global_norm(state.params)), float(optax.global_norm(update))]
        )
    np.testing.assert_allclose(figures, PINNED, rtol=2e-4)


PINNED = [
    [0.017525302, 0.95518023, 4.8396082, 0.29393223, 5e-4, 36.710884, 0.14335829],
    [-0.0060732365, 0.68661624, 4.8395491, 0.31334337, 1e-3, 36.710738, 0.36896852],
]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"micro_batch_rows": 3, "remat": "dots", "chunk": 5}])
def test_ways_of_computing_change_no_result(options):
    for a, b in zip(jax.tree.leaves(sgd_result()), jax.tree.leaves(sgd_result(**options)), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


def test_bf16_compute_keeps_f32_masters_and_follows_f32():
    """Half-precision products, f32 everything else: the update points where the f32 one does."""
    deltas = []
    for dtype in ("float32", "bfloat16"):
        params, _ = sgd_result(dtype)
        assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        delta = jax.tree.map(lambda a, b: np.asarray(a - b).ravel(), params, numpy_params())
        deltas.append(np.concatenate(jax.tree.leaves(delta)))
    cosine = np.dot(*deltas) / np.prod([np.linalg.norm(d) for d in deltas])
    assert cosine > 0.999
    assert np.linalg.norm(deltas[1]) == pytest.approx(np.linalg.norm(deltas[0]), rel=0.02)


def test_n26_reference_equals_the_start_and_never_moves():
    """N26: KL 0 and ratio 1 at step 0; the reference is bitwise unchanged after 5 updates, without moments."""
    objective = recipes.grpo(kl_coef=0.1)
    optimizer = make_optimizer(1e-2)
    state = init_state(numpy_params(), optimizer, objective, key=jax.random.key(0), reference=True)
    assert all(
        a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(state.reference), strict=True)
    )
    frozen = jax.tree.map(np.asarray, state.reference)
    raw = tiny_batch()
    first, second = score(state.params, raw), score(state.params, raw)
    assert np.array_equal(first, second)  # nothing random in a forward pass
    raw = dataclasses.replace(raw, logprob_behavior=first)
    batch = fill_logprobs(raw, state, score, needed_fields(objective))
    assert batch.logprob_proximal is None and np.array_equal(batch.logprob_reference, first)
    batch, objective_state = make_prepare(objective)(batch, state.objective_state)
    step = make_update_step(objective, TINY, optimizer)
    for i in range(5):
        state, metrics = step(state, batch)
        if i == 0:
            assert abs(float(metrics["penalty_penalize_kl"].value)) < 1e-9
            assert float(metrics["logprob_gap_max"].value) < 1e-5
    assert float(metrics["penalty_penalize_kl"].value) > 1e-6
    for a, b in zip(jax.tree.leaves(frozen), jax.tree.leaves(state.reference), strict=True):
        assert np.array_equal(a, b)
    sizes = sorted(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert sizes == sorted(2 * [x.size for x in jax.tree.leaves(state.params)])


def test_t10_on_policy_ratios_are_one():
    """T10: with unchanged weights the learner's number of each token is the sampler's, temperature included."""
    raw = dataclasses.replace(tiny_batch(), temperature=jnp.full((8, 20), 0.6))
    params = {**numpy_params(), "embed": numpy_params()["embed"] * 10}  # very uneven probabilities
    behavior = make_score(TINY, micro_batch_rows=3)(params, raw)
    assert float(jnp.std(behavior[raw.mask])) > 1.0
    np.testing.assert_allclose(score(params, raw), behavior, atol=2e-5)  # another split into micro-batches
    assert not np.any(np.asarray(behavior)[~np.asarray(raw.mask)])
    _, metrics = sgd_step()(*begin(params, SGD, dataclasses.replace(raw, logprob_behavior=behavior)))
    assert float(metrics["logprob_gap_max"].value) < 1e-4
    assert abs(float(metrics["kl_behavior"].value)) < 1e-5


def test_n29_weights_are_arguments_and_never_captured():
    """N29: a compiled program given a new policy gives the scores of a fresh program."""
    raw = tiny_batch()
    first, second = score(numpy_params(), raw), score(numpy_params(seed=1), raw)
    assert float(jnp.max(jnp.abs(first - second))) > 0.1
    assert np.array_equal(second, make_score(TINY)(numpy_params(seed=1), raw))


def test_training_raises_the_probability_of_rewarded_tokens():
    """The sign of everything at once: updates make the rewarded rows likelier than the others."""
    raw = tiny_batch()
    before = score(numpy_params(), raw)
    state, batch = begin(numpy_params(), ADAMW, dataclasses.replace(raw, logprob_behavior=before))
    for _ in range(20):
        state, _ = adamw_step(state, batch)
    moved = np.asarray(score(state.params, raw) - before)
    good, bad = np.asarray(batch.advantage) > 0, np.asarray(batch.advantage) < 0
    assert good.any() and bad.any()
    assert moved[good].mean() > 0.02 and moved[bad].mean() < -0.02


def test_only_needed_fields_are_filled():
    state = init_state({"w": jnp.ones(2)}, optax.sgd(0.0), TOKEN_MEAN, key=jax.random.key(0))
    calls = []

    def score(params, batch):
        calls.append(params)
        return jnp.full(batch.shape, float(len(calls)))

    raw = tiny_batch()
    assert fill_logprobs(raw, state, score, {"entropy"}) is raw and not calls
    filled = fill_logprobs(raw, state, score, {"logprob_proximal"})
    assert float(filled.logprob_proximal[0, 0]) == 1.0 and calls == [state.params]
    assert fill_logprobs(filled, state, score, {"logprob_proximal"}) is filled  # frozen within a train step


def test_missing_reference_and_missing_rollout_fields_are_named():
    state = init_state({"w": jnp.ones(2)}, optax.sgd(0.0), TOKEN_MEAN, key=jax.random.key(0))
    with pytest.raises(ValueError, match="reference=True"):
        fill_logprobs(tiny_batch(), state, lambda *_: None, {"logprob_reference"})
    with pytest.raises(ValueError, match="batch.baseline_reward"):
        fill_logprobs(tiny_batch(), state, lambda *_: None, {"baseline_reward"})


def test_finish_train_step_counts_versions():
    state = init_state({"w": jnp.ones(2)}, optax.sgd(0.0), TOKEN_MEAN, key=jax.random.key(0))
    assert int(state.version) == 0 and int(finish_train_step(state).version) == 1


def test_the_worst_extreme_is_not_reported_as_the_best():
    values = {
        "ratio_max": jnp.array([jnp.inf, 2.0]),
        "logprob_gap_max": jnp.array([jnp.nan, 1.0]),
        "ratio_min": jnp.array([jnp.inf, 0.5]),
    }
    merged = {name: float(mean.value) for name, mean in merge_extremes(values).items()}
    assert (
        merged["ratio_max"] == np.inf and np.isnan(merged["logprob_gap_max"]) and merged["ratio_min"] == 0.5
    )
    nothing = merge_extremes({"ratio_min": jnp.array([jnp.inf]), "ratio_max": jnp.array([0.0])})
    assert [float(mean.value) for mean in nothing.values()] == [0.0, 0.0]
