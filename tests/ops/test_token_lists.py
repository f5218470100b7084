"""Log-probs of lists of tokens: equal to the dense formula in value and gradient, from the head to an update."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxrl_llm as jrl
from jaxrl_llm.learner.score import fill_logprobs, make_score, make_score_lists, topk_size
from jaxrl_llm.learner.state import init_state
from jaxrl_llm.learner.update import make_prepare, make_update_step
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import head_logprobs, head_output, policy_output
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.transforms import needed_fields


def head_case(V=37, D=8, K=3):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    ids = rng.permuted(np.tile(np.arange(V), (4, 11, 1)), axis=-1)[..., :K]
    ids[0, 0] = ids[0, 0, 0]  # a list may name a token twice, and the target
    targets = rng.integers(0, V, (4, 11))
    ids[1, 1, 0] = targets[1, 1]
    return (
        (normal(4, 11, D), normal(D, V)),
        jnp.asarray(targets, jnp.int32),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.uniform(0.5, 2.0, (4, 11)), jnp.float32),
        jnp.asarray(rng.random((4, 11)) < 0.6),
        (normal(4, 11), normal(4, 11), normal(4, 11, K)),
    )


@pytest.mark.parametrize(("chunk", "blocks"), [(7, 1), (10, 2)])
@pytest.mark.parametrize("entropy", [False, True])
def test_listed_tokens_equal_the_dense_path(chunk, blocks, entropy):
    weights, targets, ids, temperature, active, (dp, de, dk) = head_case()

    def weighted(logprob, spread, listed):
        where = active.astype(jnp.float32)
        total = jnp.sum(logprob * dp * where) + jnp.sum(listed * dk * where[..., None])
        return total + (jnp.sum(spread * de * where) if entropy else 0.0)

    def chunked(weights):
        out = head_output(
            *weights,
            targets,
            temperature,
            active,
            dtype="float32",
            entropy=entropy,
            listed=ids,
            chunk=chunk,
            blocks=blocks,
        )
        return weighted(out.logprob, out.entropy, out.topk_logprob), out

    def dense(weights):
        logits = jnp.matmul(*weights, precision="highest") / temperature[..., None]
        logp = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
        listed = jnp.take_along_axis(logp, ids, axis=-1)
        spread = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
        return weighted(chosen, spread, listed), (chosen, listed)

    got, out = jax.jit(jax.grad(chunked, has_aux=True))(weights)
    want, (chosen, listed) = jax.jit(jax.grad(dense, has_aux=True))(weights)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.logprob, jnp.where(active, chosen, 0.0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        out.topk_logprob, jnp.where(active[..., None], listed, 0.0), rtol=1e-5, atol=1e-5
    )
    assert out.topk_ids is None and (out.entropy is None) == (not entropy)


def test_the_likeliest_tokens_are_found():
    (h, w), targets, _, temperature, active, _ = head_case()
    out = jax.jit(
        lambda h, w: head_output(h, w, targets, temperature, active, dtype="float32", find=4, chunk=7)
    )(h, w)
    logp = jax.nn.log_softmax(jnp.matmul(h, w, precision="highest") / temperature[..., None])
    values, ids = jax.lax.top_k(logp, 4)
    where = np.asarray(active)
    assert np.array_equal(np.asarray(out.topk_ids)[where], np.asarray(ids)[where])
    np.testing.assert_allclose(
        np.asarray(out.topk_logprob)[where], np.asarray(values)[where], rtol=1e-5, atol=1e-5
    )
    assert not np.any(np.asarray(out.topk_logprob)[~where])
    with pytest.raises(ValueError, match="not both"):
        head_output(h, w, targets, temperature, active, dtype="float32", find=4, listed=out.topk_ids)


def test_no_array_of_the_whole_vocabulary_is_made():
    """The backward pass of a list holds the logits of a chunk and no more."""
    (h, w), targets, ids, temperature, active, _ = head_case(V=512)

    def total(h, w):
        out = head_output(h, w, targets, temperature, active, dtype="float32", listed=ids, chunk=4)
        return jnp.sum(out.topk_logprob)

    text = jax.jit(jax.grad(total, (0, 1))).lower(h, w).as_text()
    assert "4x512" in text and "44x512" not in text and "11x512" not in text


def test_without_lists_the_program_is_that_of_before():
    """No gather of a list and no scatter is in the program when no list is asked for."""
    (h, w), targets, _, temperature, active, _ = head_case()

    def total(h, w):
        return jnp.sum(head_logprobs(h, w, targets, temperature, active, dtype="float32", chunk=7)[0])

    assert "scatter" not in str(jax.make_jaxpr(jax.grad(total, (0, 1)))(h, w))


# ------------------------------------------------------------------------------------------- the learner


def params(seed=0):
    return init_params(TINY, jax.random.key(seed))


def batch(rows=4, width=12, **fields):
    rng = np.random.default_rng(3)
    tokens = rng.integers(3, TINY.vocab_size, (rows, width))
    mask = np.zeros((rows, width), bool)
    mask[:, 4:9] = True
    return jrl.TokenBatch.from_rows(
        tokens,
        mask,
        group=np.arange(rows) // 2,
        reward=np.arange(rows) % 2,
        logprob_behavior=np.where(mask, -5.0, 0.0),
        **fields,
    )


@jax.jit
def dense(parameters, rows):
    hidden = forward(parameters, TINY, rows.tokens, rows.positions, rows.segments)
    logp = jax.nn.log_softmax(jnp.matmul(hidden, head_weight(parameters, TINY), precision="highest"))
    return jnp.pad(logp[:, :-1], ((0, 0), (1, 0), (0, 0)))  # entry t describes token t


SIMKO = jrl.simko()


def test_the_learner_fills_the_lists_of_the_proximal_policy():
    rows, state = batch(), init_state(params(), optax.sgd(0.1), SIMKO, key=jax.random.key(0))
    assert topk_size(SIMKO) == 3 and topk_size(jrl.grpo()) == 0
    lists = make_score_lists(TINY, 3, micro_batch_rows=3)
    filled = fill_logprobs(rows, state, make_score(TINY), needed_fields(SIMKO), lists)
    values, ids = jax.lax.top_k(dense(state.params, rows), 3)
    where = np.asarray(rows.mask)
    assert np.array_equal(np.asarray(filled.topk_ids)[where], np.asarray(ids)[where])
    np.testing.assert_allclose(
        np.asarray(filled.topk_logprob_proximal)[where], np.asarray(values)[where], atol=1e-4
    )
    np.testing.assert_allclose(filled.logprob_proximal, make_score(TINY)(state.params, rows), atol=1e-5)
    # Frozen within a train step; and lists that the rollout gave are kept.
    assert fill_logprobs(filled, state, None, needed_fields(SIMKO), None) is filled
    given = dataclasses.replace(rows, topk_ids=filled.topk_ids[..., ::-1])
    again = lists(state.params, given)
    assert again.topk_ids is given.topk_ids or np.array_equal(again.topk_ids, given.topk_ids)
    np.testing.assert_allclose(
        np.asarray(again.topk_logprob_proximal)[where][:, ::-1], np.asarray(values)[where], atol=1e-4
    )


@pytest.mark.slow
def test_an_update_with_lists_has_the_gradient_of_the_dense_formula():
    state = init_state(params(), optax.sgd(1.0), SIMKO, key=jax.random.key(0))
    rows = fill_logprobs(batch(), state, make_score(TINY), needed_fields(SIMKO), make_score_lists(TINY, 3))
    rows = rows.replace(topk_logprob_proximal=rows.topk_logprob_proximal + 0.1)
    prepared, _ = make_prepare(SIMKO)(rows, state.objective_state)

    def total(parameters):
        logp = dense(parameters, prepared)
        output = jrl.PolicyOutput(
            logprob=jnp.take_along_axis(logp, prepared.tokens[..., None], axis=-1)[..., 0],
            entropy=-jnp.sum(jnp.exp(logp) * logp, axis=-1),
            topk_logprob=jnp.take_along_axis(logp, prepared.topk_ids, axis=-1),
        )
        result = jrl.transforms.evaluate(SIMKO, output, prepared)
        return result.loss_sum / result.denominator

    before = jax.tree.map(np.asarray, state.params)
    gradient = jax.jit(jax.grad(total))(state.params)
    step = make_update_step(SIMKO, TINY, optax.sgd(1.0), micro_batch_rows=2)
    state, metrics = step(state, prepared)
    assert float(metrics["skipped"].value) == 0 and float(metrics["forking"].value) > 0

    def close(old, new, slope):
        np.testing.assert_allclose(np.asarray(new) - old, -np.asarray(slope), rtol=1e-3, atol=2e-5)

    jax.tree.map(close, before, state.params, gradient)


def test_missing_lists_are_told():
    with pytest.raises(ValueError, match="topk_ids, which is None"):
        policy_output(params(), TINY, batch(), topk=True)
    with pytest.raises(ValueError, match="between 1 and"):
        make_score_lists(TINY, TINY.vocab_size + 1)
    objective = jrl.dppo(kind="topk_kl")  # the list of the sampler, which this batch does not have
    state = init_state(params(), optax.sgd(0.1), objective, key=jax.random.key(0))
    with pytest.raises(ValueError, match="topk_ids, which no scoring pass gives"):
        fill_logprobs(batch(), state, None, needed_fields(objective), make_score_lists(TINY, 3))


def test_lists_on_a_mesh_are_those_of_one_device():
    rows = batch(rows=8)
    parameters = params()
    alone = make_score_lists(TINY, 3)(parameters, rows)
    spread = make_score_lists(TINY, 3, make_mesh(4, 2))(parameters, rows)
    where = np.asarray(rows.mask)
    assert np.array_equal(np.asarray(alone.topk_ids)[where], np.asarray(spread.topk_ids)[where])
    np.testing.assert_allclose(alone.topk_logprob_proximal, spread.topk_logprob_proximal, atol=1e-4)
    np.testing.assert_allclose(alone.logprob_proximal, spread.logprob_proximal, atol=1e-4)
