"""Log-probs over the tokens that one was drawn from: hand numbers, the dense formula in f64, finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.divergences import Divergence
from jaxrl_llm.ops.logprobs import TeacherHead, head_output
from jaxrl_llm.ops.support import first_left_out, is_left_out, left_out, left_out_ids
from jaxrl_llm.testing import float64

V, S = 37, 6


def case(V=V, S=S):
    """Supports of every size from none (the vocabulary) to S, each with the target somewhere in it, and tokens left out."""
    rng = np.random.default_rng(0)
    shape = (4, 11)
    targets = rng.integers(0, V, shape)
    support = np.full((*shape, S), -1)
    for at in np.ndindex(shape):
        size = rng.integers(0, S + 1)
        if size:
            others = rng.permutation(np.delete(np.arange(V), targets[at]))[: size - 1]
            support[at][:size] = rng.permutation([targets[at], *others])
        if rng.random() < 0.3:  # single tokens, or the last ones too
            out = set(rng.permutation(np.delete(np.arange(V), targets[at]))[: S - 1].tolist())
            out |= set(range(targets[at] + 1, V)) if rng.random() < 0.5 else set()
            codes = left_out(out, V)
            support[at] = np.pad(codes[-S:], (0, S - len(codes[-S:])), constant_values=-1)
    normal = rng.standard_normal
    return {
        "h": normal((*shape, 8)),
        "w": normal((8, V)),
        "targets": targets.astype(np.int32),
        "support": support.astype(np.int32),
        "temperature": rng.uniform(0.5, 2.0, shape),
        "active": rng.random(shape) < 0.7,
        "ids": rng.permuted(np.tile(np.arange(V), (*shape, 1)), axis=-1)[..., :3].astype(np.int32),
        "teacher": normal((*shape, 5)),
        "teacher_w": normal((5, V)),
        "cotangents": (normal(shape), normal(shape), normal((*shape, 3)), normal(shape)),
    }


def dense(c, h, w):
    """(log-prob, entropy, log-probs of the lists, KL of a teacher) by masking the logits; 0 where not active."""
    logits = jnp.matmul(h, w, precision="highest") / c["temperature"][..., None]
    tokens, support = jnp.arange(w.shape[1]), c["support"][..., None]
    inside = (support == tokens).any(-2)
    left = (support == -2 - tokens) | ((support <= -2 - 2**30) & (tokens >= -2 - 2**30 - support))
    inside |= (c["support"] < 0).all(-1)[..., None] & ~left.any(-2)
    logp = jax.nn.log_softmax(jnp.where(inside, logits, -1e30))
    chosen = jnp.take_along_axis(logp, c["targets"][..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.where(inside, jnp.exp(logp) * logp, 0.0), axis=-1)
    whole = jax.nn.log_softmax(logits)  # lists and the divergence do not depend on how a token was drawn
    listed = jnp.take_along_axis(whole, c["ids"], axis=-1)
    teacher = jax.nn.log_softmax(
        jnp.matmul(c["teacher"], c["teacher_w"], precision="highest") / c["temperature"][..., None]
    )
    divergence = jnp.sum(jnp.exp(teacher) * (teacher - whole), axis=-1)
    where = c["active"]
    return tuple(
        jnp.where(where[..., None] if x.ndim == 3 else where, x, 0.0)
        for x in (chosen, entropy, listed, divergence)
    )


def chunked(c, h, w, *, dtype="float64", chunk=7, blocks=1, lists=True, taught=True):
    out = head_output(
        h,
        w,
        c["targets"],
        c["temperature"],
        c["active"],
        dtype=dtype,
        entropy=True,
        support=c["support"],
        listed=c["ids"] if lists else None,
        teacher=TeacherHead({"head": c["teacher_w"]}, dtype, Divergence("forward", 0.5)) if taught else None,
        hidden_teacher=c["teacher"] if taught else None,
        chunk=chunk,
        blocks=blocks,
    )
    return out.logprob, out.entropy, out.topk_logprob, out.divergence


def weighted(c, outputs):
    pairs = zip(outputs, c["cotangents"], strict=True)
    return sum(jnp.sum(x * d) for x, d in pairs if x is not None)


def test_hand_numbers():
    """Probabilities 1/2, 1/4, 1/8, 1/8; the second was drawn from the first two: 1/3, and not 1/4."""
    with float64():
        h = jnp.log(jnp.array([[[0.5, 0.25, 0.125, 0.125]] * 3]))
        target, one = jnp.array([[1, 1, 1]], jnp.int32), jnp.ones((1, 3))
        support = jnp.array([[[0, 1, -1], [-1, -1, -1], [1, -1, -1]]], jnp.int32)

        def run(h, entropy):
            out = head_output(
                h, jnp.eye(4), target, one, one > 0, dtype="float64", entropy=True, support=support
            )
            return jnp.sum(out.entropy if entropy else out.logprob), out

        slope, out = jax.jit(jax.grad(lambda h: run(h, False), has_aux=True))(h)
        spread = jax.jit(jax.grad(lambda h: run(h, True)[0]))(h)
        np.testing.assert_allclose(out.logprob, np.log([[1 / 3, 1 / 4, 1.0]]), atol=1e-14)
        two = -(2 * np.log(2 / 3) + np.log(1 / 3)) / 3
        np.testing.assert_allclose(out.entropy, [[two, 1.75 * np.log(2), 0.0]], atol=1e-14)
        np.testing.assert_allclose(
            slope, [[[-2 / 3, 2 / 3, 0, 0], [-0.5, 0.75, -0.125, -0.125], [0, 0, 0, 0]]], atol=1e-14
        )
        # dH / dz_j = -p_j (log p_j + H) = -(2/3) (1/3) log 2 and its opposite
        np.testing.assert_allclose(spread[0, 0], [-2 / 9 * np.log(2), 2 / 9 * np.log(2), 0, 0], atol=1e-14)
        np.testing.assert_allclose(spread[0, 2], 0.0, atol=1e-14)


@pytest.mark.parametrize(
    ("chunk", "blocks", "lists", "taught"),
    [(7, 1, False, False), (10, 2, True, True)],
)
def test_values_and_gradients_are_those_of_the_dense_formula(chunk, blocks, lists, taught):
    with float64():
        c = jax.tree.map(jnp.asarray, case())
        how = {"chunk": chunk, "blocks": blocks, "lists": lists, "taught": taught}

        def ours(weights):
            out = chunked(c, *weights, **how)
            return weighted(c, out), out

        def theirs(weights):
            out = dense(c, *weights)
            out = (*out[:2], out[2] if lists else None, out[3] if taught else None)
            return weighted(c, out), out

        got, out = jax.jit(jax.grad(ours, has_aux=True))((c["h"], c["w"]))
        want, expected = jax.jit(jax.grad(theirs, has_aux=True))((c["h"], c["w"]))
        for x, y in zip((*got, *out), (*want, *expected), strict=True):
            if y is not None:
                np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11)
        # No gradient reaches a token outside of the support.
        one = jnp.zeros(c["active"].shape).at[1, 2].set(1.0)
        of_one = c | {"cotangents": (one, 0 * one, None, None)}
        alone = jax.jit(
            jax.grad(lambda w: weighted(of_one, chunked(c, c["h"], w, lists=False, taught=False)))
        )(c["w"])
        inside = np.asarray(c["support"][1, 2])
        assert (inside >= 0).any() and bool(c["active"][1, 2])
        assert not np.any(np.asarray(alone)[:, np.setdiff1d(np.arange(V), inside)])


def test_the_gradient_is_the_slope_of_the_value():
    with float64():
        c = jax.tree.map(jnp.asarray, case())
        rng = np.random.default_rng(1)
        at = (c["h"], c["w"])
        along = tuple(jnp.asarray(rng.standard_normal(x.shape)) for x in at)

        @jax.jit
        def total(step):
            h, w = (x + step * d for x, d in zip(at, along, strict=True))
            return weighted(c, chunked(c, h, w))

        step = 1e-5
        slope = jax.jit(jax.grad(total))(0.0)
        assert abs(slope) > 0.1
        np.testing.assert_allclose((total(step) - total(-step)) / (2 * step), slope, rtol=1e-8)


def test_f32_bf16_and_logits_that_moved_far_away_stay_finite():
    """The drawn token is in its support, so that its log-prob is finite however improbable a policy makes it."""
    c = case()
    narrow = {k: v.astype(np.float32) if getattr(v, "dtype", None) == np.float64 else v for k, v in c.items()}
    with float64():
        exact = [np.asarray(x) for x in jax.jit(dense)(c, c["h"], c["w"])]
    got = jax.jit(functools.partial(chunked, dtype="float32"))(narrow, narrow["h"], narrow["w"])
    for x, y in zip(got, exact, strict=True):
        np.testing.assert_allclose(x, y, atol=3e-5)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1), has_aux=True)
    def slopes(h, w):
        logprob, entropy, _, _ = chunked(narrow, h, w, dtype="bfloat16", lists=False, taught=False)
        return jnp.sum(logprob + entropy), logprob

    for scale in (1.0, 1e4):
        grads, logprob = slopes(narrow["h"] * scale, narrow["w"])
        assert np.all(np.isfinite(logprob)) and np.all(np.asarray(logprob) <= 0)
        assert all(np.all(np.isfinite(g)) for g in grads)


def test_memory_and_the_program_without_support():
    c = case(V=512)

    def total(h, w, support):
        out = head_output(
            h, w, c["targets"], c["temperature"], c["active"], dtype="float32", chunk=4, support=support
        )
        return jnp.sum(out.logprob)

    h, w = jnp.asarray(c["h"], jnp.float32), jnp.asarray(c["w"], jnp.float32)
    text = jax.jit(jax.grad(total, (0, 1))).lower(h, w, c["support"]).as_text()
    assert "4x512" in text and "44x512" not in text and "11x512" not in text  # logits of a chunk only
    assert "scatter" not in str(jax.make_jaxpr(jax.grad(lambda h, w: total(h, w, None), (0, 1)))(h, w))


def test_supports_that_are_none():
    h, w, ones = jnp.ones((1, 2, 3)), jnp.ones((3, 4)), jnp.ones((1, 2))
    target = jnp.zeros((1, 2), jnp.int32)

    def head(support):
        return head_output(h, w, target, ones, ones > 0, dtype="float32", support=support).logprob

    np.testing.assert_array_equal(head(jnp.zeros((1, 2, 0), jnp.int32)), head(None))
    assert first_left_out(jnp.zeros((1, 2, 0), jnp.int32), 4).tolist() == [[4, 4]]
    for wrong in (jnp.zeros((1, 2, 3)), jnp.zeros((1, 2), jnp.int32), jnp.zeros((2, 1, 3), jnp.int32)):
        with pytest.raises(ValueError, match="support must be integers"):
            head(wrong)


def test_codes_of_what_is_left_out():
    codes = left_out([9, 3, 8, 0], 10)
    assert codes.tolist() == [-2, -5, -2 - 2**30 - 8]  # 0 and 3, and all from 8 on
    assert left_out([], 10).size == 0 and left_out([2], 10).tolist() == [-4]
    support = np.stack([np.pad(codes, (0, 1), constant_values=-1), [-1] * 4, [7, 8, -1, -1]])
    assert left_out_ids(support, 10).tolist() == [[0, 3, 10, 10], [10] * 4, [10] * 4]
    assert first_left_out(support, 10).tolist() == [8, 10, 10]
    found = [[is_left_out(row, np.int32(token)) for token in range(10)] for row in support]
    assert np.flatnonzero(found[0]).tolist() == [0, 3, 8, 9] and not np.any(found[1:])
    with pytest.raises(ValueError, match=r"token ids must lie in \[0, 10\), got \[10\]"):
        left_out([10], 10)
    with pytest.raises(ValueError, match="at least one must be left"):
        left_out(range(10), 10)


def test_a_token_that_is_left_out_has_no_probability_and_no_gradient():
    """Hand numbers: of four equal logits one is left out."""
    h, w = jnp.zeros((1, 1, 2)), jnp.ones((2, 4))
    one, target = jnp.ones((1, 1)), jnp.array([[1]], jnp.int32)
    support = jnp.asarray(left_out([2], 4))[None, None]

    def total(w):
        h = jnp.ones((1, 1, 2))
        out = head_output(h, w, target, one, one > 0, dtype="float32", entropy=True, support=support)
        return out.logprob.sum() + 0.0 * out.entropy.sum()

    out = head_output(h, w, target, one, one > 0, dtype="float32", entropy=True, support=support)
    assert out.logprob[0, 0] == pytest.approx(-np.log(3)) and out.entropy[0, 0] == pytest.approx(np.log(3))
    np.testing.assert_allclose(jax.grad(total)(w)[0], [-1 / 3, 2 / 3, 0, -1 / 3], atol=1e-6)
