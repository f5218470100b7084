"""Experts balanced by biases of their routers: the rule, the layer, the update, the sampler, files and meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import recipes
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimizer import make_optimizer
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY, TINY_MOE
from jaxrl_llm.models.experts import expert_mlp
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.load import load_model, with_router_bias
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.transforms.adaptive import moves_router_bias
from jaxrl_llm.types import Prompt, TokenBatch

BIASED = dataclasses.replace(TINY_MOE, router_bias=True)
L, E, K, D = TINY_MOE.num_layers, TINY_MOE.num_experts, TINY_MOE.experts_per_token, TINY_MOE.hidden_size


@pytest.fixture(scope="module", autouse=True)
def compiled_in_half_the_time():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # tests of other files that compare bits compile their own


def params(bias=0.0):
    """Of `BIASED`; the router prefers some experts. `bias`: times a fixed noise."""
    tree = init_params(BIASED, jax.random.key(0))
    router = tree["layers"]["router"] + 0.1 * jax.random.normal(jax.random.key(7), (L, D, E))
    noise = bias * jax.random.normal(jax.random.key(8), (L, E))
    return {**tree, "layers": {**tree["layers"], "router": router, "router_bias": noise}}


def objective(rate=0.01):
    return jrl.chain(recipes.grpo(), jrl.balance_experts_by_bias(rate))


def batch(rows=8, tokens=16):
    rng = np.random.default_rng(0)
    mask = np.broadcast_to(np.arange(tokens) >= 3, (rows, tokens))
    return TokenBatch.from_rows(
        rng.integers(3, 128, (rows, tokens)),
        mask,
        group=np.arange(rows) // 4,
        reward=np.arange(rows) % 2 * np.float32(1),
        logprob_behavior=np.where(mask, -4.5, 0).astype(np.float32),
        lengths=np.array([16, 16, 12, 16, 16, 9, 16, 16]),
    )


# ----------------------------------------------------------------------------------------- the rule


def test_the_rule_by_hand():
    """b_i + rate · sign(mean load - load_i), of the counted tokens only, the same however the batch is cut."""
    chain = jrl.chain(
        jrl.given_advantage(),
        jrl.normalize_by_token(),
        jrl.reinforce_surrogate(),
        jrl.balance_experts_by_bias(0.25),
    )
    rows = TokenBatch.from_rows(
        np.zeros((2, 4), np.int32),
        np.array([[False, True, True, True], [False, True, False, False]]),
        advantage=np.zeros((2, 4), np.float32),
    )
    # Three experts, two of a token. Counted: {0, 1}, {0, 1}, {0, 2}; and {0, 1}. Not counted: {2, 1}.
    chosen = np.array([[[2, 1], [0, 1], [0, 1], [0, 2]], [[2, 1], [0, 1], [2, 1], [2, 1]]])
    choice = np.eye(3, dtype=np.float32)[chosen].mean(axis=2)[:, :, None]
    output = jrl.PolicyOutput(logprob=jnp.zeros((2, 4)), router_choice=jnp.asarray(choice))
    prepared, state = chain.prepare(rows, chain.init())
    result = jrl.evaluate(chain, output, prepared, state)
    state = chain.update(state, result.metrics)
    shift = state["balance_experts_by_bias"]["router_shift"]
    # Loads 4, 3 and 1, mean 8 / 3: the first two lose, the third gains.
    np.testing.assert_array_equal(shift, [[-0.25, -0.25, 0.25]])
    even = {"load_of_balance_experts_by_bias": jrl.Mean(jnp.full((1, 3), 2.0), jnp.float32(3))}
    np.testing.assert_array_equal(
        chain.update(state, even)["balance_experts_by_bias"]["router_shift"], np.zeros((1, 3))
    )
    assert float(result.loss_sum) == 0


def test_the_biases_choose_and_do_not_weigh_and_have_no_gradient():
    layer = jax.tree.map(lambda x: x[0], params(0.2)["layers"])
    h = jax.random.normal(jax.random.key(1), (4, 16, D))
    run = jax.jit(
        jax.value_and_grad(
            lambda layer, ids: (lambda y, routed: (jnp.sum(y**2), (y, routed)))(
                *expert_mlp(layer, BIASED, h, ids)
            ),
            has_aux=True,
        )
    )
    free = jnp.full((4, 16, K), -1)
    (_, (y, routed)), grads = run(layer, free)
    probs = jax.nn.softmax(h @ layer["router"], axis=-1)
    expected = jax.lax.top_k(probs + layer["router_bias"], K)[1]
    np.testing.assert_array_equal(routed.ids, expected)
    np.testing.assert_array_equal(routed.preferred, jax.lax.top_k(probs, K)[1])
    assert 0.2 < np.mean(np.asarray(routed.ids) != np.asarray(routed.preferred)) < 1
    # Those experts, asked for by number of a router without biases, give the same output and the same gradients.
    plain = {**layer, "router_bias": jnp.zeros(E)}
    (_, (same, _)), same_grads = run(plain, expected)
    np.testing.assert_array_equal(y, same)
    jax.tree.map(np.testing.assert_array_equal, grads, same_grads)
    assert not np.any(grads["router_bias"]) and np.abs(grads["router"]).max() > 0


def test_what_fits_together_is_asked_for():
    with pytest.raises(ValueError, match="no experts.*balance_experts_by_bias"):
        make_update_step(objective(), TINY, optax.sgd(0.1))
    with pytest.raises(ValueError, match="the model has none.*with_router_bias"):
        make_update_step(objective(), TINY_MOE, optax.sgd(0.1))
    with pytest.raises(ValueError, match="router_bias needs experts"):
        dataclasses.replace(TINY, router_bias=True)
    with pytest.raises(ValueError, match="rate must be a number ≥ 0, got -1"):
        jrl.balance_experts_by_bias(-1)
    assert moves_router_bias(objective()) and not moves_router_bias(recipes.grpo())
    scheduled = jrl.scheduled(jrl.balance_experts_by_bias, rate=lambda updates: 0.1 / (1 + updates))
    assert moves_router_bias(jrl.chain(recipes.grpo(), scheduled))


def test_a_model_gets_biases_once_and_they_are_refused_where_a_file_has_no_place(tmp_path):
    model = load_model("tiny-moe")
    biased = with_router_bias(model)
    assert biased.config == BIASED and with_router_bias(biased) is biased
    assert biased.params["layers"]["router_bias"].shape == (L, E)
    assert with_router_bias(load_model("tiny")).config.router_bias is False
    back = with_router_bias(biased, False)
    assert back.config == model.config and back.params["layers"].keys() == model.params["layers"].keys()
    # Biases of 0 are none.
    folder = save_hf(biased.config, biased.params, None, tmp_path / "zeros")
    assert load_model(folder).config == TINY_MOE
    with pytest.raises(InputError, match="biases.*up to 0.*other experts.*--drop-router-bias"):
        save_hf(BIASED, params(0.1), None, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    folder = save_hf(BIASED, params(0.1), None, tmp_path / "dropped", drop_router_bias=True)
    np.testing.assert_array_equal(load_model(folder).params["layers"]["router"], params()["layers"]["router"])


# --------------------------------------------------------------------------------------- the update


ADAM, SGD = make_optimizer(1e-3, weight_decay=0.5), optax.sgd(0.1)


@functools.cache
def stepped(rate, mesh=None, micro_batch_rows=None, optimizer=ADAM):
    """(state before, step, prepared batch)."""
    on = None if mesh is None else make_mesh(**dict(mesh))
    chain = recipes.grpo() if rate is None else objective(rate)
    tree = jax.tree.map(lambda x: x.copy(), params())
    state = init_state(tree, optimizer, chain, key=jax.random.key(1), config=BIASED, mesh=on)
    prepared, objective_state = make_prepare(chain, on)(batch(), state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    step = make_update_step(
        chain,
        BIASED,
        optimizer,
        on,
        micro_batch_rows=micro_batch_rows,
        remat=micro_batch_rows is not None,
        donate=False,
        entropy=False,
    )
    return state, step, prepared


def loads(state):
    """i[layers, E], tokens of each expert among the trained ones, of the parameters before an update, by hand."""
    rows = batch()
    found = jrl.policy_output(state.params, BIASED, rows, router_choice=True)
    return np.sum((np.asarray(found.router_choice) > 0) & np.asarray(rows.mask)[..., None, None], axis=(0, 1))


@pytest.mark.slow
def test_an_update_moves_the_biases_by_the_rule_and_nothing_else_by_them():
    before, step, rows = stepped(0.01)
    after, metrics = step(before, rows)
    load = loads(before)
    expected = np.float32(0.01) * np.sign(load.mean(axis=1, keepdims=True) - load)
    np.testing.assert_array_equal(after.params["layers"]["router_bias"], expected.astype(np.float32))
    assert float(metrics["router_bias_max"].value) == pytest.approx(0.01)
    assert float(metrics["expert_preferred_max"].value) == float(metrics["expert_load_max"].value)
    plain_before, plain, plain_rows = stepped(None)
    other, other_metrics = plain(plain_before, plain_rows)
    for name in ("loss", "grad_norm", "router_entropy"):
        assert float(metrics[name].value) == float(other_metrics[name].value), name
    assert not np.any(other.params["layers"]["router_bias"])

    def without(state):
        return {**state.params, "layers": {**state.params["layers"], "router_bias": 0}}

    jax.tree.map(np.testing.assert_array_equal, without(after), without(other))
    # A bias that is there already is neither decayed nor changed by a step that is skipped.
    bias = 0.3 * jnp.ones((L, E))
    given = before.replace(
        params={**before.params, "layers": {**before.params["layers"], "router_bias": bias}}
    )
    moved = step(given, rows)[0].params["layers"]["router_bias"]
    np.testing.assert_array_equal(
        moved, bias + expected.astype(np.float32)
    )  # one bias for all chooses as none
    nothing = rows.replace(count=jnp.zeros_like(rows.count))
    skipped, _ = step(given, nothing)
    assert int(skipped.skipped) == 1
    np.testing.assert_array_equal(skipped.params["layers"]["router_bias"], bias)


@pytest.mark.slow
def test_updates_even_out_the_loads():
    state, step, rows = stepped(0.01)
    worst, preferred = [], []
    for _ in range(25):
        state, metrics = step(state, rows)
        worst.append(float(metrics["expert_load_max"].value))
        preferred.append(float(metrics["expert_preferred_max"].value))
    assert worst[0] > 1.6 and max(worst[-5:]) - 1 < 0.5 * (worst[0] - 1), worst
    assert preferred[-1] > worst[-1]  # the biases did it, not the router


def numbers(metrics):
    return {name: float(mean.value) for name, mean in metrics.items() if name != "expert_exchange"}


@pytest.mark.slow
def test_an_update_on_a_mesh_in_micro_batches_is_that_of_one_device():
    """Two updates, so that the second chooses with the biases of the first."""
    one, many = (
        stepped(0.05, optimizer=SGD),
        stepped(0.05, (("fsdp", 2), ("expert", 4)), 4 * 2, SGD),
    )
    found = []
    for state, step, rows in (one, many):
        state, _ = step(state, rows)
        state, metrics = step(state, rows)
        found.append((jax.tree.map(np.asarray, state.params), numbers(metrics)))
    (expected, figures), (params_, metrics) = found
    assert figures["expert_preferred_max"] != figures["expert_load_max"]
    assert metrics == pytest.approx(figures, rel=1e-5, abs=1e-5)
    np.testing.assert_array_equal(params_["layers"]["router_bias"], expected["layers"]["router_bias"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params_, expected)


# -------------------------------------------------------------------------------------- the sampler


@pytest.mark.slow
def test_sampler_and_learner_choose_alike_with_biases():
    """The learner's own choices, without replay, are the recorded ones; and they hang on the biases."""
    rng = np.random.default_rng(0)
    prompts = [Prompt(uid=f"p{n}", tokens=rng.integers(3, 128, n).astype(np.int32)) for n in (1, 5, 17)]
    sampler = Sampler(BIASED, slots=8, page_size=8, pages=64)
    tree = params(0.2)
    completions = sampler.generate(tree, prompts, SamplingParams(max_tokens=10, n=2, seed=3))
    T = max(len(c.prompt.tokens) + len(c.tokens) for c in completions)
    tokens, mask = np.zeros((len(completions), T), np.int32), np.zeros((len(completions), T), bool)
    for row, c in enumerate(completions):
        P, N = len(c.prompt.tokens), len(c.tokens)
        tokens[row, : P + N] = np.concatenate([c.prompt.tokens, c.tokens])
        mask[row, P : P + N] = True
    lengths = np.array([len(c.prompt.tokens) + len(c.tokens) for c in completions])
    rows = TokenBatch.from_rows(tokens, mask, lengths=lengths)
    score = jax.jit(lambda tree, rows: jrl.policy_output(tree, BIASED, rows))
    found, plain = score(tree, rows), score(params(), rows)
    for row, c in enumerate(completions):
        P, N = len(c.prompt.tokens), len(c.tokens)
        np.testing.assert_array_equal(found.routed.ids[row, : P + N - 1], c.routing_ids)
        np.testing.assert_allclose(found.logprob[row, P : P + N], c.logprobs, atol=1e-4)
    assert np.abs(np.where(mask, found.logprob - plain.logprob, 0)).max() > 1e-2


@pytest.mark.slow
def test_a_capacity_of_the_objective_drops_and_counts():
    chain = jrl.chain(
        jrl.group_advantage(),
        jrl.normalize_by_token(),
        jrl.reinforce_surrogate(),
        jrl.balance_experts(0.0, capacity=0.75),
    )
    state = init_state(
        jax.tree.map(lambda x: x.copy(), params()), SGD, chain, key=jax.random.key(1), config=BIASED
    )
    prepared, objective_state = make_prepare(chain)(batch(), state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    _, metrics = make_update_step(chain, BIASED, SGD, remat=False, entropy=False)(state, prepared)
    tight = dataclasses.replace(BIASED, expert_capacity=0.75)
    routed = jrl.policy_output(params(), tight, batch()).routed
    live = np.asarray(batch().segments) != 0
    room = int(np.ceil(0.75 * live.size * K / E))
    dropped = 0
    for layer in range(L):
        chosen = np.asarray(routed.ids)[:, :, layer][live]
        dropped += np.maximum(np.bincount(chosen.ravel(), minlength=E) - room, 0).sum()
    assert dropped > 0
    assert float(metrics["expert_dropped"].value) == pytest.approx(dropped / (live.sum() * K * L))
