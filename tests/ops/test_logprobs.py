"""Chunked log-probs: equal to the dense formula, aligned, and small in memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import (
    default_chunk,
    head_logprobs,
    policy_output,
    segment_positions,
    token_logprobs,
)
from jaxrl_llm.types import TokenBatch

B, T = 3, 13

output = jax.jit(policy_output, static_argnums=1, static_argnames=("entropy", "remat", "chunk"))


def _tokens(shape=(B, T), seed=1):
    return np.random.default_rng(seed).integers(3, TINY.vocab_size, shape).astype(np.int32)


def _dense_head(h, w, targets, temperature, active):
    """Log-prob and entropy with all logits in memory."""
    logp = jax.nn.log_softmax(jnp.matmul(h, w, precision="highest") / temperature[..., None])
    chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return jnp.where(active, chosen, 0.0), jnp.where(active, -jnp.sum(jnp.exp(logp) * logp, -1), 0.0)


def _head_case(V=37, D=8):
    rng = np.random.default_rng(0)
    h = jnp.asarray(rng.standard_normal((4, 11, D)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((D, V)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, (4, 11)), jnp.int32)
    temperature = jnp.asarray(rng.uniform(0.5, 2.0, (4, 11)), jnp.float32)
    active = jnp.asarray(rng.random((4, 11)) < 0.6)
    cotangents = [jnp.asarray(rng.standard_normal((4, 11)), jnp.float32) for _ in range(2)]
    return h, w, targets, temperature, active, cotangents


@pytest.mark.parametrize(("chunk", "blocks"), [(1, 1), (7, 1), (44, 1), (None, 1), (10, 2), (1000, 2)])
def test_m01_values_and_gradients_equal_the_dense_path(chunk, blocks):
    """M01: also when the chunk does not divide the positions."""
    h, w, targets, temperature, active, (dp, de) = _head_case()

    def chunked(h, w):
        logprob, entropy = head_logprobs(
            h, w, targets, temperature, active, dtype="float32", entropy=True, chunk=chunk, blocks=blocks
        )
        return jnp.sum(logprob * dp + entropy * de), (logprob, entropy)

    def dense(h, w):
        logprob, entropy = _dense_head(h, w, targets, temperature, active)
        return jnp.sum(logprob * dp + entropy * de), (logprob, entropy)

    gradients, values = jax.jit(jax.grad(chunked, (0, 1), has_aux=True))(h, w)
    expected_gradients, expected = jax.jit(jax.grad(dense, (0, 1), has_aux=True))(h, w)
    for got, want in zip((*values, *gradients), (*expected, *expected_gradients), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6 * max(1.0, float(jnp.max(jnp.abs(want)))))


def test_detached_entropy_is_reported_and_has_no_gradient():
    h, w, targets, temperature, active, (_, de) = _head_case()

    @functools.partial(jax.jit, static_argnums=1)
    @jax.value_and_grad
    def total(h, entropy):
        args = (h, w, targets, temperature, active)
        return jnp.sum(head_logprobs(*args, dtype="float32", entropy=entropy)[1] * de)

    (reported, none), (trained, some) = total(h, "detached"), total(h, True)
    assert float(reported) == float(trained) != 0.0
    assert float(jnp.max(jnp.abs(none))) == 0.0 and float(jnp.max(jnp.abs(some))) > 0.0


def test_chunks_without_active_positions_are_not_computed():
    """NaN in the hidden states of inactive positions would reach the weight gradient through any computed chunk."""
    h, w, targets, temperature, _, _ = _head_case()
    active = jnp.zeros((4, 11), bool).at[1, 3:7].set(True).at[3, 2:6].set(True)  # exactly one chunk of 8
    h = jnp.where(active[..., None], h, jnp.nan)

    def total(h, w):
        return jnp.sum(head_logprobs(h, w, targets, temperature, active, dtype="float32", chunk=8)[0])

    value, (dh, dw) = jax.jit(jax.value_and_grad(total, (0, 1)))(h, w)
    assert np.isfinite(value) and value < 0
    assert np.all(np.isfinite(dw)) and np.all(np.isfinite(dh)) and np.any(np.asarray(dw) != 0)
    assert not np.any(np.asarray(dh)[~np.asarray(active)])


def test_nothing_active_gives_zero_and_zero_gradients():
    h, w, targets, temperature, active, _ = _head_case()
    none = jnp.zeros_like(active)

    def total(h, w):
        logprob, entropy = head_logprobs(h, w, targets, temperature, none, dtype="float32", entropy=True)
        return jnp.sum(logprob + entropy)

    value, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(h, w)
    assert float(value) == 0.0 and not any(np.any(np.asarray(g)) for g in gradients)


def test_bf16_operands_accumulate_in_f32():
    h, w, targets, temperature, active, (dp, _) = _head_case(V=512, D=32)
    h16, w16 = h.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    def chunked(h, w):
        logprob, _ = head_logprobs(h, w, targets, temperature, active, dtype="bfloat16", chunk=8)
        return jnp.sum(logprob * dp), logprob

    def dense(h, w):
        logprob, _ = _dense_head(h, w, targets, temperature, active)
        return jnp.sum(logprob * dp), logprob

    (dh, dw), value = jax.jit(jax.grad(chunked, (0, 1), has_aux=True))(h16, w)
    wide = [x.astype(jnp.float32) for x in (h16, w16)]
    (dh_exact, dw_exact), exact = jax.jit(jax.grad(dense, (0, 1), has_aux=True))(*wide)
    np.testing.assert_allclose(value, exact, atol=1e-4)  # the same rounded operands, f32 sums
    assert (value.dtype, dh.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)
    scale = float(jnp.max(jnp.abs(dw_exact)))
    np.testing.assert_allclose(dw, dw_exact, atol=1e-2 * scale)  # bf16 cotangents
    np.testing.assert_allclose(
        dh.astype(jnp.float32), dh_exact, atol=2e-2 * float(jnp.max(jnp.abs(dh_exact)))
    )


def _temporaries(B, T, V, D, chunk, *, entropy=False):
    """Bytes of temporaries of value and gradient of a head pass; compiled, not run."""

    def total(h, w, targets, active):
        ones = jnp.ones(targets.shape, jnp.float32)
        logprob, spread = head_logprobs(
            h, w, targets, ones, active, dtype="float32", chunk=chunk, entropy=entropy
        )
        return jnp.sum(logprob) if spread is None else jnp.sum(logprob + spread)

    shapes = [((B, T, D), jnp.float32), ((D, V), jnp.float32), ((B, T), jnp.int32), ((B, T), bool)]
    arguments = [jax.ShapeDtypeStruct(*s) for s in shapes]
    compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_m01_memory_grows_with_the_chunk_and_not_with_the_logits():
    """M01: B=16, T=1024, V=32768 in f32 would be 2.147 GB a copy; a chunk of 256 positions is 34 MB."""
    full, chunk = 16 * 1024 * 32768 * 4, 256 * 32768 * 4
    small = _temporaries(16, 1024, 32768, 16, 256)
    assert small < 4 * chunk < full / 8
    twice_as_long = _temporaries(16, 2048, 32768, 16, 256)
    assert twice_as_long - small < chunk / 2  # hidden states grow, logits do not
    assert _temporaries(16, 1024, 32768, 16, 512) - small > chunk / 2
    assert _temporaries(16, 1024, 32768, 16, 256, entropy=True) < 5 * chunk


def test_m01_long_context_and_large_vocabulary():
    """M01: T=65536, V=151936 would be 37.1 GiB; a chunk of 1,024 positions is 0.58 GiB."""
    assert _temporaries(1, 65536, 151936, 16, 1024) < 4 * 1024 * 151936 * 4
    chunk = default_chunk(151936)
    assert chunk * 151936 * 4 <= 2**27 and _temporaries(1, 65536, 151936, 16, None) < 4 * 2**27


# -------------------------------------------------------------------------------- whole model


@functools.partial(jax.jit, static_argnums=1)
def _last_logits(params, config, prefix, length):
    """Logits after the first `length` tokens of one row; the rest is padding."""
    columns = jnp.arange(prefix.shape[0])
    hidden = forward(params, config, prefix[None], columns[None], (columns < length)[None].astype(jnp.int32))
    return hidden[0, length - 1] @ head_weight(params, config)


def _stepwise(params, config, tokens, temperature=1.0):
    """log p(token t | tokens < t) from one forward pass per prefix, as a decoder would."""
    out = np.zeros(tokens.shape, np.float32)
    for row, t in np.ndindex(tokens.shape):
        if t:
            prefix = np.where(np.arange(tokens.shape[1]) < t, tokens[row], 0)
            logits = np.asarray(_last_logits(params, config, prefix, t), np.float64) / temperature
            out[row, t] = logits[tokens[row, t]] - np.log(np.sum(np.exp(logits)))
    return out


@pytest.fixture(scope="module")
def uneven_params():
    """Very uneven token probabilities, so that a shift by one is far off."""
    params = init_params(TINY, jax.random.key(0))
    return {**params, "embed": params["embed"] * 40}


def test_t10_entry_t_describes_token_t(uneven_params):
    """T10: the learner's number of each token is that of a teacher-forced decode of its own prefix."""
    tokens = _tokens((2, 6))
    expected = _stepwise(uneven_params, TINY, tokens)
    got = np.asarray(token_logprobs(uneven_params, TINY, tokens))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    shifted = np.roll(expected, 1, axis=1)[:, 2:]
    assert np.min(np.abs(got[:, 2:] - shifted).max(axis=1)) > 1.0  # the wrong alignment would show
    assert not got[:, 0].any()


def test_temperature_divides_the_logits(uneven_params):
    tokens = _tokens((2, 6))
    for temperature in (0.5, 1.5):
        expected = _stepwise(uneven_params, TINY, tokens, temperature)
        np.testing.assert_allclose(
            token_logprobs(uneven_params, TINY, tokens, temperature=temperature), expected, atol=1e-4
        )
    per_row = token_logprobs(uneven_params, TINY, tokens, temperature=np.array([0.5, 1.5], np.float32))
    np.testing.assert_allclose(per_row[1], expected[1], atol=1e-4)


def test_t08_packed_sequences_equal_single_ones(tiny_params):
    """T08: [1,2,3] and [4,5,6,7] in one row."""
    row = np.array([[1, 2, 3, 4, 5, 6, 7, 0]], np.int32)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0]], np.int32)
    packed = np.asarray(token_logprobs(tiny_params, TINY, row, segments))[0]
    first = np.asarray(token_logprobs(tiny_params, TINY, row[:, :3]))[0]
    second = np.asarray(token_logprobs(tiny_params, TINY, row[:, 3:7]))[0]
    np.testing.assert_allclose(packed[:3], first, atol=1e-5)
    np.testing.assert_allclose(packed[3:7], second, atol=1e-5)
    assert packed[3] == 0 and packed[7] == 0  # nothing predicts a first token; padding has no log-prob

    changed = row.copy()
    changed[0, 0] = 9
    after = np.asarray(token_logprobs(tiny_params, TINY, changed, segments))[0]
    assert np.array_equal(after[3:], packed[3:])  # bit-unchanged
    assert not np.array_equal(after[1:3], packed[1:3])


def test_t08_no_gradient_for_a_first_token_even_when_the_mask_asks_for_it(tiny_params):
    row = np.array([[1, 2, 3, 4, 5, 6, 7, 0]], np.int32)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2, 0]], jnp.int32)
    batch = TokenBatch.from_rows(row, np.ones((1, 8), bool))
    batch = dataclasses.replace(batch, segments=segments, positions=segment_positions(segments))
    logprob = output(tiny_params, TINY, batch).logprob
    np.testing.assert_array_equal(np.asarray(logprob)[0] == 0, [1, 0, 0, 1, 0, 0, 0, 1])


def test_policy_output_is_the_masked_part_of_token_logprobs(tiny_params):
    tokens = _tokens()
    mask = np.random.default_rng(3).random((B, T)) < 0.4
    batch = TokenBatch.from_rows(tokens, mask, lengths=np.full(B, T), temperature=0.7)
    out = output(tiny_params, TINY, batch, entropy=True, chunk=4)
    expected = np.where(batch.mask, token_logprobs(tiny_params, TINY, tokens, temperature=0.7), 0.0)
    np.testing.assert_allclose(out.logprob, expected, atol=1e-6)
    assert np.all(np.asarray(out.entropy)[np.asarray(batch.mask)] > 0)
    assert not np.any(np.asarray(out.entropy)[~np.asarray(batch.mask)])


@pytest.mark.parametrize("remat", [True, "dots"])
def test_rematerialisation_changes_no_gradient(tiny_params, remat):
    config = dataclasses.replace(TINY, tie_embeddings=False)
    params = init_params(config, jax.random.key(1))
    batch = TokenBatch.from_rows(_tokens(), np.ones((B, T), bool))

    @jax.jit
    def gradients(params):
        def total(params, remat):
            return jnp.sum(policy_output(params, config, batch, remat=remat).logprob)

        return jax.grad(total)(params, False), jax.grad(total)(params, remat)

    plain, again = gradients(params)
    assert float(jnp.max(jnp.abs(plain["head"]))) > 0
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5 * max(1.0, float(jnp.max(jnp.abs(a)))))


def test_whole_model_gradient_equals_finite_differences(tiny_params):
    """The hand-written backward passes (head, products, attention) together, along random directions."""
    batch = TokenBatch.from_rows(_tokens(), np.ones((B, T), bool), lengths=np.full(B, T), temperature=0.8)

    @jax.jit
    def total(params):
        out = policy_output(params, TINY, batch, entropy=True)
        return jnp.sum(out.logprob) + 0.5 * jnp.sum(out.entropy**2) / 10

    gradient = jax.jit(jax.grad(total))(tiny_params)
    for seed in range(3):
        leaves, tree = jax.tree.flatten(tiny_params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        direction = jax.tree.unflatten(
            tree, [jax.random.normal(k, x.shape) * 0.02 for k, x in zip(keys, leaves, strict=True)]
        )
        ahead, behind = (
            float(total(jax.tree.map(lambda p, d, s=step: p + s * d, tiny_params, direction)))
            for step in (0.02, -0.02)
        )
        analytic = sum(
            float(jnp.vdot(g, d))
            for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        )
        assert (ahead - behind) / 0.04 == pytest.approx(analytic, rel=2e-2, abs=2e-2)


def test_segment_positions():
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0, 0], [3, 3, 3, 3, 1, 1, 0]])
    expected = [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0, 1]]
    got = np.asarray(segment_positions(segments))
    np.testing.assert_array_equal(got[0, :5], expected[0])
    np.testing.assert_array_equal(got[1, :6], expected[1])


def test_default_chunk_bounds_the_logits():
    for vocab in (128, 32000, 49152, 151936, 262144):
        assert 16 <= default_chunk(vocab) <= 4096 and default_chunk(vocab) * vocab * 4 <= 2**27


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([[1, 128]])}, r"\[0, 128\)"),
        ({"tokens": np.array([[1, -1]])}, "vocabulary"),
        ({"tokens": np.array([1, 2])}, r"\[B, T\]"),
        ({"segments": np.ones((1, 3), int)}, "segments"),
        ({"positions": np.ones((2, 2), int)}, "positions"),
        ({"temperature": 0.0}, "positive"),
        ({"temperature": np.ones((3,))}, "temperature"),
    ],
)
def test_bad_input_is_named(tiny_params, change, message):
    arguments = {"tokens": np.array([[1, 2]]), **change}
    with pytest.raises(ValueError, match=message):
        token_logprobs(tiny_params, TINY, **arguments)


def test_blocks_must_divide_the_rows():
    h, w, targets, temperature, active, _ = _head_case()
    with pytest.raises(ValueError, match="3 blocks"):
        head_logprobs(h, w, targets, temperature, active, dtype="float32", blocks=3)
