"""Mixtures of experts: the layer itself, and Qwen3-MoE through learner, sampler, mesh and files."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jrl
from jaxrl_llm import recipes
from jaxrl_llm.diagnostics.parity import certify, show_certificate
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.score import make_score
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY, TINY_MOE
from jaxrl_llm.models.experts import expert_mlp, on_mesh
from jaxrl_llm.models.formats.export import save_hf
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.parallel.mesh import BATCH_AXES, make_mesh
from jaxrl_llm.parallel.rules import param_shardings
from jaxrl_llm.sampler import Sampler, SamplingParams
from jaxrl_llm.types import Prompt, TokenBatch

E, K, D = TINY_MOE.num_experts, TINY_MOE.experts_per_token, TINY_MOE.hidden_size


@functools.cache
def params():
    return init_params(TINY_MOE, jax.random.key(0))


def one_layer():
    return jax.tree.map(lambda x: x[0], params()["layers"])


def hidden(rows=4, tokens=16, dtype="float32"):
    return jax.random.normal(jax.random.key(1), (rows, tokens, D), dtype)


@functools.cache
def layer_of(config):
    return jax.jit(lambda layer, h, ids=None: expert_mlp(layer, config, h, ids))


def by_hand(layer, h, ids=None):
    """Every expert for every token, and then a weighted sum."""
    probs = jax.nn.softmax(h @ layer["router"], axis=-1)
    chosen = jax.lax.top_k(probs, K)[1] if ids is None else ids
    gates = jnp.take_along_axis(probs, chosen, axis=-1)
    gates = gates / gates.sum(-1, keepdims=True)
    up = jnp.einsum("btd,edf->btef", h, layer["expert_up"])
    gate = jnp.einsum("btd,edf->btef", h, layer["expert_gate"])
    every = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, layer["expert_down"])
    return jnp.sum(jnp.take_along_axis(every, chosen[..., None], axis=2) * gates[..., None], axis=2)


def test_the_layer_is_the_weighted_sum_of_its_experts_and_so_is_its_gradient():
    layer, h = one_layer(), hidden()
    weights = jax.random.normal(jax.random.key(2), h.shape)

    def total(run):
        return jax.jit(jax.value_and_grad(lambda layer, h: jnp.sum(run(layer, h) * weights), (0, 1)))

    value, grads = total(lambda layer, h: expert_mlp(layer, TINY_MOE, h)[0])(layer, h)
    expected, expected_grads = total(by_hand)(layer, h)
    assert value == pytest.approx(float(expected), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), grads, expected_grads)
    assert all(np.abs(grads[0][name]).max() > 0 for name in ("router", "expert_gate", "expert_down"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_a_token_do_not_depend_on_its_neighbours(dtype):
    config = dataclasses.replace(TINY_MOE, dtype=dtype)
    layer = jax.tree.map(lambda x: x.astype(dtype), one_layer())
    h = hidden(8, 1, dtype)
    run = jax.jit(lambda h: expert_mlp(layer, config, h)[0])
    y = run(h)
    order = np.array([5, 0, 7, 2, 1, 4, 6, 3])
    np.testing.assert_array_equal(run(h[order]), y[order])
    others = h.at[1:].set(3 * hidden(8, 1, dtype)[::-1][1:] + 1)  # the first token among strangers
    np.testing.assert_array_equal(run(others)[0], y[0])
    crowd = jnp.broadcast_to(h[:1], h.shape)  # all want the same experts
    np.testing.assert_array_equal(run(crowd), jnp.broadcast_to(y[:1], y.shape))


def test_given_experts_are_used_with_the_gates_that_the_router_gives_them_now():
    layer, h = one_layer(), hidden()
    ids = jax.random.permutation(
        jax.random.key(3), jnp.broadcast_to(jnp.arange(E), (4, 16, E)), -1, independent=True
    )
    ids = ids[..., :K].at[0, 0].set(-1)
    y, routed = layer_of(TINY_MOE)(layer, h, ids)
    own = jax.lax.top_k(h[0, 0] @ layer["router"], K)[1]
    expected = by_hand(layer, h, ids.at[0, 0].set(own))
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_array_equal(routed.ids, ids.at[0, 0].set(own))


def test_capacity_drops_the_last_tokens_of_a_full_expert_and_counts_them():
    config = dataclasses.replace(TINY_MOE, expert_capacity=0.5)
    layer, h = one_layer(), hidden()
    y, routed = layer_of(config)(layer, h)
    room = int(np.ceil(0.5 * h.shape[0] * h.shape[1] * K / E))
    ids, seen = np.asarray(routed.ids).reshape(-1, K), np.zeros(E, int)
    dropped = np.zeros(len(ids))
    for n, chosen in enumerate(ids):
        for e in chosen:
            dropped[n] += seen[e] >= room
            seen[e] += 1
    assert 0 < dropped.sum() < ids.size
    np.testing.assert_array_equal(np.asarray(routed.dropped).reshape(-1), dropped)
    whole = np.asarray(layer_of(TINY_MOE)(layer, h)[0]).reshape(-1, D)
    np.testing.assert_allclose(np.asarray(y).reshape(-1, D)[dropped == 0], whole[dropped == 0], atol=1e-6)
    assert np.all(np.asarray(y).reshape(-1, D)[dropped == K] == 0)


def test_a_saved_model_is_read_back_bit_for_bit(tmp_path):
    folder = save_hf(TINY_MOE, params(), None, tmp_path / "moe")
    loaded = load_model(folder)
    assert loaded.config == TINY_MOE
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params())
    assert loaded.config.num_parameters == sum(x.size for x in jax.tree.leaves(loaded.params))
    config = json.loads((folder / "config.json").read_text())
    for change, part in (
        ({"mlp_only_layers": [1]}, "mlp_only_layers=[1]"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than num_experts=8"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size must be a positive integer"),
        ({"num_experts": 10**9}, "num_experts=1000000000"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
    ):
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(InputError, match="config.json|the files hold") as caught:
            load_model(folder)
        assert part in str(caught.value)


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


@functools.cache
def updated(sizes, micro_batch_rows=None):
    """(parameters after a step of gradient descent, metrics, log-probs before)."""
    mesh = None if sizes is None else make_mesh(*sizes[:3], expert=sizes[3])
    objective, optimizer = recipes.grpo(), optax.sgd(0.1)
    copies = jax.tree.map(lambda x: x.copy(), params())
    state = init_state(copies, optimizer, objective, key=jax.random.key(1), config=TINY_MOE, mesh=mesh)
    score = make_score(TINY_MOE, mesh)(state.params, batch())
    prepared, objective_state = make_prepare(objective, mesh)(batch(), state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    step = make_update_step(objective, TINY_MOE, optimizer, mesh, micro_batch_rows=micro_batch_rows)
    state, metrics = step(state, prepared)
    figures = {k: float(m.value) for k, m in metrics.items()}
    return jax.tree.map(np.asarray, state.params), figures, np.asarray(score)


def same(found, expected):
    for name, value in expected[1].items():
        if name == "expert_exchange":  # which is what a mesh adds
            continue
        assert found[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert expected[1]["grad_norm"] > 0
    np.testing.assert_allclose(found[2], expected[2], atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found[0], expected[0])


@pytest.mark.slow
def test_micro_batches_change_no_number():
    same(updated(None, 2), updated(None))


@pytest.mark.slow
def test_a_mesh_changes_no_number():
    """Of other meshes, see tests/parallel/test_mesh_matrix.py."""
    sizes = (1, 1, 2, 4)
    same(updated(sizes), updated(None))
    # Each token goes to the 3 other ranks as f32 with 2 experts and gates, and comes back as f32; in 2 layers.
    moved = 2 * 3 * 8 * 16 * (4 * D + 2 * 8 + 4 * D) * sizes[2]
    assert updated(sizes)[1]["expert_exchange"] == moved


# ------------------------------------------------------------------------------------------ the sampler

SAMPLING = SamplingParams(max_tokens=10, n=2, seed=3)


@functools.cache
def prompts():
    rng = np.random.default_rng(0)
    return [Prompt(uid=f"p{n}", tokens=rng.integers(3, 128, n).astype(np.int32)) for n in (1, 5, 17, 30)]


@functools.cache
def sampled(dtype="float32"):
    config = dataclasses.replace(TINY_MOE, dtype=dtype)
    return Sampler(config, slots=8, page_size=8, pages=64).generate(params(), prompts(), SAMPLING)


def rows_of(completions):
    """(tokens, routing_ids, logprob) of completions as rows."""
    T = max(len(c.prompt.tokens) + len(c.tokens) for c in completions)
    tokens, logprob = np.zeros((len(completions), T), np.int32), np.zeros((len(completions), T), np.float32)
    routing = np.full((len(completions), T, TINY_MOE.num_layers, K), -1, np.int16)
    for row, c in enumerate(completions):
        P, N = len(c.prompt.tokens), len(c.tokens)
        tokens[row, : P + N] = np.concatenate([c.prompt.tokens, c.tokens])
        routing[row, : P + N - 1] = c.routing_ids
        logprob[row, P : P + N] = c.logprobs
    return tokens, routing, logprob


def gaps(completions, config, tree, replay):
    tokens, routing, logprob = rows_of(completions)
    found = token_logprobs(tree, config, tokens, routing_ids=routing if replay else None)
    return np.abs(np.asarray(found) - logprob)[logprob != 0]


def test_sampler_and_learner_agree_and_the_experts_of_every_token_are_recorded():
    completions = sampled()
    for c in completions:
        assert c.routing_ids.shape == (len(c.prompt.tokens) + len(c.tokens) - 1, TINY_MOE.num_layers, K)
        assert c.routing_ids.min() >= 0 and c.routing_ids.max() < E
    for replay in (False, True):
        assert gaps(completions, TINY_MOE, params(), replay).max() < 1e-4


def test_what_is_sampled_and_recorded_does_not_depend_on_slots_neighbours_or_preemption():
    expected = {(c.prompt.uid, c.index): c for c in sampled()}
    # Other neighbours in other slots, and too few pages, so that rows are preempted and come back.
    small, preempted = Sampler(TINY_MOE, slots=8, page_size=8, pages=14), 0
    for sampler, asked in ((small, prompts()[::-1]), (small, prompts()[2:3])):
        for c in sampler.generate(params(), asked, SAMPLING):
            other = expected[c.prompt.uid, c.index]
            np.testing.assert_array_equal(c.tokens, other.tokens)
            np.testing.assert_array_equal(c.logprobs, other.logprobs)
            np.testing.assert_array_equal(c.routing_ids, other.routing_ids)
        assert sampler.stats.completions == 2 * len(asked)
        preempted += sampler.stats.preemptions
    assert preempted


@pytest.mark.slow
def test_with_room_for_all_tokens_an_all_to_all_gives_the_same_numbers():
    mesh = make_mesh(fsdp=2, expert=4)
    layer, h = one_layer(), hidden(8, 8)
    weights = jax.random.normal(jax.random.key(2), h.shape)

    def measured(config):
        def total(layer, h):
            y, routed = expert_mlp(layer, config, h)
            return jnp.sum(y * weights), (y, routed.dropped)

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(layer, h)

    roomy = on_mesh(dataclasses.replace(TINY_MOE, expert_capacity=E / K), mesh, BATCH_AXES)
    (_, (y, dropped)), grads = measured(roomy)
    (_, (expected, _)), expected_grads = measured(TINY_MOE)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), grads, expected_grads)
    assert np.all(dropped == 0)
    tight = on_mesh(dataclasses.replace(TINY_MOE, expert_capacity=0.5), mesh, BATCH_AXES)
    (_, (y, dropped)), _ = measured(tight)
    kept = np.asarray(dropped) == 0
    assert 0 < kept.sum() < kept.size
    np.testing.assert_allclose(np.asarray(y)[kept], np.asarray(expected)[kept], atol=1e-5)


@pytest.mark.slow
def test_however_uneven_no_token_is_dropped_on_a_mesh():
    """A device has memory for its mean load and a quarter: what is more is computed in further rounds, exactly."""
    layer, h = one_layer(), hidden(8, 8)
    weights = jax.random.normal(jax.random.key(2), h.shape)

    def measured(config):
        def total(layer, h, ids):
            y, routed = expert_mlp(layer, config, h, ids)
            return jnp.sum(y * weights), (y, routed.dropped)

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))

    one, many = measured(TINY_MOE), measured(on_mesh(TINY_MOE, make_mesh(fsdp=2, expert=4), BATCH_AXES))
    for chosen in (
        (-1, -1),
        (0, 1),
        (3, 6),
    ):  # as the router likes; all on one of four devices; on two of them
        ids = jnp.broadcast_to(jnp.array(chosen), (8, 8, K))
        (_, (expected, _)), expected_grads = one(layer, h, ids)
        (_, (y, dropped)), grads = many(layer, h, ids)
        np.testing.assert_allclose(y, expected, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), grads, expected_grads)
        assert np.all(dropped == 0) and np.abs(expected_grads[0]["expert_up"]).max() > 0.1


@pytest.mark.slow
def test_experts_on_other_devices_change_no_sampled_token():
    mesh = make_mesh(expert=4, tensor=2)
    spread = jax.device_put(params(), param_shardings(TINY_MOE, mesh))
    sampler = Sampler(TINY_MOE, slots=8, page_size=8, pages=64, mesh=mesh)
    for c, expected in zip(sampler.generate(spread, prompts(), SAMPLING), sampled(), strict=True):
        np.testing.assert_array_equal(c.tokens, expected.tokens)
        np.testing.assert_array_equal(c.routing_ids, expected.routing_ids)
        np.testing.assert_allclose(c.logprobs, expected.logprobs, atol=1e-5)


@pytest.mark.slow
def test_replay_closes_the_gap_that_a_router_that_chooses_differently_opens():
    completions = sampled("bfloat16")
    config = dataclasses.replace(TINY_MOE, dtype="bfloat16")
    moved = jax.tree.map(lambda x: x, params())
    noise = 0.02 * jax.random.normal(jax.random.key(5), moved["layers"]["router"].shape)
    moved["layers"] = moved["layers"] | {"router": moved["layers"]["router"] + noise}
    without, replayed = (gaps(completions, config, moved, replay) for replay in (False, True))
    assert replayed.mean() < 0.5 * without.mean() and replayed.max() < without.max()


# ------------------------------------------------------------------------------------------ balance


def test_the_balance_penalty_is_the_one_computed_by_hand():
    stage = jrl.balance_experts(0.5)
    # One row of 3 tokens, of which 2 are trained; 1 layer of 2 experts, 1 of a token.
    tokens = np.zeros((1, 3), np.int32)
    rows = TokenBatch.from_rows(
        tokens, np.array([[False, True, True]]), advantage=np.zeros((1, 3), np.float32)
    )
    chain = jrl.chain(
        jrl.given_advantage(), jrl.normalize_by_token(), jrl.token_ratio(), jrl.clip_surrogate(), stage
    )
    rows = rows.replace(logprob_behavior=jnp.zeros((1, 3)))
    probs = jnp.array([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4]]).reshape(1, 3, 1, 2)
    output = jrl.PolicyOutput(
        logprob=jnp.zeros((1, 3)),
        router_probs=probs,
        router_choice=jnp.array([1.0, 0.0]) * jnp.ones((1, 3, 1, 2)),
    )
    prepared, state = chain.prepare(rows, chain.init())
    first = jrl.evaluate(chain, output, prepared, state)
    assert float(first.loss_sum) == pytest.approx(2 * 0.5)  # even loads: coef a token
    state = chain.update(state, first.metrics)
    np.testing.assert_array_equal(state["balance_experts"]["expert_load"], [[1.0, 0.0]])
    second = jrl.evaluate(chain, output, prepared, state)
    assert float(second.loss_sum) == pytest.approx(0.5 * 2 * (0.8 + 0.6))


@pytest.mark.slow
def test_balancing_evens_out_the_loads_and_needs_experts():
    objective = jrl.chain(recipes.grpo(), jrl.balance_experts(1.0))
    with pytest.raises(ValueError, match="the model has no experts"):
        make_update_step(objective, TINY, optax.sgd(0.1))
    optimizer = optax.sgd(0.05)
    copies = jax.tree.map(lambda x: x.copy(), params())
    state = init_state(copies, optimizer, objective, key=jax.random.key(1))
    prepared, objective_state = make_prepare(objective)(batch(), state.objective_state)
    state = dataclasses.replace(state, objective_state=objective_state)
    step = make_update_step(objective, TINY_MOE, optimizer, remat=False)
    loads = []
    for _ in range(30):
        state, metrics = step(state, prepared)
        loads.append(float(metrics["expert_load_max"].value))
    assert loads[-1] < 0.7 * loads[0], loads


@pytest.mark.slow
def test_the_certificate_says_what_the_gap_would_be_without_replay():
    config = dataclasses.replace(TINY_MOE, dtype="bfloat16")
    probes = [dataclasses.replace(p, uid=f"parity/{i}") for i, p in enumerate(prompts())]
    certificate = certify(
        lambda asked: Sampler(config, slots=8, page_size=8, pages=64).generate(params(), asked, SAMPLING),
        make_score(config),
        probes,
        params=params(),
        config=config,
        temperature=1.0,
    )
    assert certificate.passed, certificate.reasons
    assert certificate.unreplayed_mean_gap >= certificate.mean_gap > 0
    assert "own experts" in show_certificate(certificate)


@functools.cache
def four_experts(normalize):
    """(config, program) of a layer of four, of which two are chosen."""
    config = dataclasses.replace(TINY_MOE, num_experts=4, experts_per_token=2, normalize_gates=normalize)
    return config, jax.jit(lambda layer, h: expert_mlp(layer, config, h)[0])


@pytest.mark.parametrize(
    "normalize,logits,expected",
    [
        (False, [2.0, 1.0, 0.0, -1.0], [0.64391, 0.23688, 0, 0]),  # what is left of the softmax
        (True, [2.0, 1.0, 0.0, -1.0], [0.73106, 0.26894, 0, 0]),
        (False, [-1.0, 0.0, 1.0, 2.0], [0, 0, 0.23688, 0.64391]),
        (True, [3.0, 3.0, 3.0, 3.0], [0.5, 0.5, 0, 0]),  # equal ones: the first
        (False, [3.0, 3.0, 3.0, 3.0], [0.25, 0.25, 0, 0]),
        (True, [200.0, -200.0, 0.0, 0.0], [1, 0, 0, 0]),
    ],
)
def test_n19_gates_add_up_to_one_only_where_the_checkpoint_says_so(normalize, logits, expected):
    """Experts that give 1 in a column of their own, so that the layer's output is its gates."""
    config, run = four_experts(normalize)
    F = config.expert_size
    first = jnp.zeros((4, D, F)).at[:, 0, 0].set(1.0)
    layer = {
        "router": jnp.zeros((D, 4)).at[0].set(jnp.asarray(logits)),
        "expert_gate": first,
        "expert_up": first,
        "expert_down": jnp.zeros((4, F, D)).at[jnp.arange(4), 0, jnp.arange(4)].set(1 / jax.nn.silu(1.0)),
    }
    h = jnp.zeros((1, 3, D)).at[..., 0].set(1.0)
    y = run(layer, h)
    np.testing.assert_allclose(y[0, :, :4], np.tile(expected, (3, 1)), atol=1e-5)
    assert not np.asarray(y)[..., 4:].any()


@pytest.mark.parametrize("given,normalize", [(None, False), (False, False), (True, True)])
def test_n19_the_folder_says_whether_gates_add_up_to_one(tmp_path, given, normalize):
    folder = save_hf(TINY_MOE, params(), None, tmp_path / "model")
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw = {k: v for k, v in raw.items() if k != "norm_topk_prob"} | (
        {} if given is None else {"norm_topk_prob": given}
    )
    path.write_text(json.dumps(raw))
    assert load_model(folder).config.normalize_gates is normalize  # absent: no, as in transformers
