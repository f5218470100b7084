"""Divergences from a teacher over the whole vocabulary: equal to the dense formula, and never [B, T, V] in memory."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.losses.divergences import Divergence
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import TeacherHead, head_output, hidden_states, policy_output
from jaxrl_llm.types import TokenBatch

KINDS = [Divergence("forward"), Divergence("reverse"), Divergence("jsd", 0.1)]


def head_case(V=37, D=8, E=5, scale=1.0):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape) * scale, jnp.float32)  # noqa: E731
    return (
        (normal(4, 11, D), normal(D, V)),
        (normal(4, 11, E), normal(E, V)),
        jnp.asarray(rng.integers(0, V, (4, 11)), jnp.int32),
        jnp.asarray(rng.uniform(0.5, 2.0, (4, 11)), jnp.float32),
        jnp.asarray(rng.random((4, 11)) < 0.6),
        (normal(4, 11), normal(4, 11), normal(4, 11)),
    )


def head(weights, teacher, targets, temperature, active, divergence, **options):
    options = {"dtype": "float32", **options}
    return head_output(
        *weights,
        targets,
        temperature,
        active,
        teacher=TeacherHead({"head": teacher[1]}, options["dtype"], divergence),
        hidden_teacher=teacher[0],
        **options,
    )


def dense_divergence(kind, weights, teacher, temperature):
    """Textbook sums with all logits in memory."""
    s, t = (
        jax.nn.log_softmax(jnp.matmul(h, w, precision="highest") / temperature[..., None])
        for h, w in (weights, teacher)
    )
    kl = lambda p, q: jnp.sum(jnp.exp(p) * (p - q), axis=-1)  # noqa: E731
    if kind.kind == "jsd":
        m = jnp.log((1 - kind.beta) * jnp.exp(s) + kind.beta * jnp.exp(t))
        return kind.beta * kl(t, m) + (1 - kind.beta) * kl(s, m)
    return kl(t, s) if kind.kind == "forward" else kl(s, t)


@pytest.mark.parametrize(
    ("kind", "chunk", "blocks"), [*((kind, 7, 1) for kind in KINDS), (Divergence("jsd"), 10, 2)], ids=str
)
def test_values_and_gradients_equal_the_dense_path(kind, chunk, blocks):
    """Beside log-prob and entropy, whose gradients must be what they are without a teacher."""
    weights, teacher, targets, temperature, active, (dp, de, dd) = head_case()

    def chunked(weights, teacher):
        out = head(
            weights, teacher, targets, temperature, active, kind, entropy=True, chunk=chunk, blocks=blocks
        )
        return jnp.sum(out.logprob * dp + out.entropy * de + out.divergence * dd), out

    def dense(weights):
        logp = jax.nn.log_softmax(jnp.matmul(*weights, precision="highest") / temperature[..., None])
        chosen = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        divergence = dense_divergence(kind, weights, teacher, temperature)
        total = jnp.sum(jnp.where(active, chosen * dp + entropy * de + divergence * dd, 0.0))
        return total, jnp.where(active, divergence, 0.0)

    (gradients, of_teacher), out = jax.jit(jax.grad(chunked, (0, 1), has_aux=True))(weights, teacher)
    expected_gradients, expected = jax.jit(jax.grad(dense, has_aux=True))(weights)
    np.testing.assert_allclose(out.divergence, expected, rtol=1e-5, atol=1e-6)
    assert np.all(np.asarray(out.divergence)[np.asarray(active)] > 0)
    for got, want in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(want))))
    assert not any(np.any(np.asarray(g)) for g in of_teacher)  # frozen


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_policy_that_is_its_teacher_has_no_divergence_and_no_slope(kind):
    weights, _, targets, temperature, active, _ = head_case()

    def total(weights):
        out = head(weights, jax.lax.stop_gradient(weights), targets, temperature, active, kind)
        return jnp.sum(out.divergence)

    value, gradients = jax.jit(jax.value_and_grad(total))(weights)
    assert abs(float(value)) < 1e-5 and all(float(jnp.max(jnp.abs(g))) < 1e-5 for g in gradients)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_distributions_without_overlap_and_nan_under_the_mask_stay_finite(kind):
    """Logits of ±800, with probabilities of exactly 0 on both sides, and a teacher that is NaN where nobody asks."""
    weights, (y, v), targets, _, active, _ = head_case(scale=16.0)
    y = jnp.where(active[..., None], y, jnp.nan)

    def total(weights):
        return jnp.sum(head(weights, (y, v), targets, jnp.ones((4, 11)), active, kind, chunk=8).divergence)

    value, gradients = jax.jit(jax.value_and_grad(total))(weights)
    assert np.isfinite(value) and value > 0 and all(np.all(np.isfinite(g)) for g in gradients)


def test_bf16_operands_of_policy_and_teacher():
    weights, teacher, targets, temperature, active, _ = head_case()
    narrow = lambda pair: tuple(x.astype(jnp.bfloat16) for x in pair)  # noqa: E731
    kind = Divergence("jsd")

    @jax.jit
    def narrow_head(weights, teacher):
        return head(weights, teacher, targets, temperature, active, kind, dtype="bfloat16")

    out = narrow_head(narrow(weights), narrow(teacher))
    wide = [tuple(x.astype(jnp.float32) for x in narrow(pair)) for pair in (weights, teacher)]
    expected = dense_divergence(kind, *wide, temperature)
    assert out.divergence.dtype == jnp.float32
    np.testing.assert_allclose(out.divergence, jnp.where(active, expected, 0.0), atol=1e-4)


def test_bad_input_is_named():
    weights, (y, v), *rest = head_case()
    with pytest.raises(ValueError, match="without its hidden states"):
        head(weights, (None, v), *rest[:3], Divergence("forward"))
    with pytest.raises(ValueError, match="36 tokens, the policy one of 37"):
        head(weights, (y, v[:, 1:]), *rest[:3], Divergence("forward"))


# ------------------------------------------------------------------------------------- memory


def sizes(jaxpr):
    """Elements of every value that a jaxpr computes, those of its inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield from (math.prod(v.aval.shape) for v in equation.outvars)
        for parameter in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from sizes(inner)


def step_of(B, T, V, D, E, chunk, kind):
    def total(weights, y, v, targets):
        ones = jnp.ones(targets.shape, jnp.float32)
        out = head(weights, (y, v), targets, ones, targets > 0, kind, entropy="detached", chunk=chunk)
        return jnp.sum(out.divergence)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    arguments = (f32(B, T, D), f32(D, V)), f32(B, T, E), f32(E, V), jax.ShapeDtypeStruct((B, T), jnp.int32)
    return jax.value_and_grad(total), arguments


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_value_is_as_large_as_the_logits_of_the_batch(kind):
    """In the whole program of value and gradient: the largest are the logits of one chunk."""
    B, T, V, chunk = 4, 64, 512, 16
    function, arguments = step_of(B, T, V, 8, 12, chunk, kind)
    assert max(sizes(jax.make_jaxpr(function)(*arguments).jaxpr)) == chunk * V == B * T * V / 16


def test_memory_grows_with_the_chunk_and_not_with_the_logits():
    """16 x 1024 positions of 32768 tokens are 2.1 GB of logits, twice; a chunk of 256 of both is 67 MB."""

    def temporaries(T, chunk):
        function, arguments = step_of(16, T, 32768, 16, 16, chunk, Divergence("jsd"))
        compiled = jax.jit(function).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 256 * 32768 * 4  # bytes of a chunk
    small = temporaries(1024, 256)
    assert small < 8 * logits < 16 * 1024 * 32768 * 4 / 7
    assert temporaries(2048, 256) - small < logits / 2  # hidden states grow, logits do not


# ------------------------------------------------------------------------------- with whole models

TEACHER = type(TINY)(**{**vars(TINY), "hidden_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1})


@pytest.mark.slow
def test_a_teacher_of_another_width_and_depth(tiny_params):
    """Entry t of divergence and hidden states describes token t, in packed rows too."""
    params = init_params(TEACHER, jax.random.key(3))
    rng = np.random.default_rng(0)
    tokens = rng.integers(3, TINY.vocab_size, (2, 9))
    batch = TokenBatch.from_rows(tokens, rng.random((2, 9)) < 0.7, temperature=np.array([0.7, 1.3]))
    batch = batch.replace(
        segments=jnp.asarray([[1] * 4 + [2] * 5, [1] * 9]),
        positions=jnp.asarray([[*range(4), *range(5)], range(9)]),
    )
    hidden = jax.jit(hidden_states, static_argnums=1)(params, TEACHER, batch)
    head = TeacherHead(params, "float32", Divergence("reverse"))
    filled = batch.replace(hidden_teacher=hidden)
    found = jax.jit(lambda b: policy_output(tiny_params, TINY, b, teacher=head, chunk=5).divergence)(filled)

    @functools.partial(jax.jit, static_argnums=1)
    def state_and_head(params, config):
        return forward(params, config, batch.tokens, batch.positions, batch.segments), head_weight(
            params, config
        )

    pairs = [state_and_head(tiny_params, TINY), state_and_head(params, TEACHER)]
    expected = dense_divergence(Divergence("reverse"), *pairs, batch.temperature)
    expected = jnp.pad(expected[:, :-1], ((0, 0), (1, 0)))
    first = jnp.asarray([[0, 4], [0, 0]])
    wanted = batch.mask.at[jnp.arange(2)[:, None], first].set(False)
    np.testing.assert_allclose(found, jnp.where(wanted, expected, 0.0), rtol=1e-4, atol=1e-6)
    assert hidden.shape == (2, 9, 32) and not np.any(np.asarray(hidden)[~np.asarray(wanted)])
    with pytest.raises(ValueError, match=r"batch\.hidden_teacher is None"):
        policy_output(tiny_params, TINY, batch, teacher=head)
