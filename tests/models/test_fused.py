"""The kernels of a TPU, interpreted on the CPU, against all scores at once: values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import segment_attention, split_attention, visible_tokens
from jaxrl_llm.models.blockwise import Sight, sight_of
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward
from jaxrl_llm.models.fused import _Plan, _where, fused_attention
from jaxrl_llm.models.params import init_params
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.parallel.rules import layout_of

fused = functools.partial(fused_attention, interpret=True, block=(128, 128))


def rows_of(tokens, *, families=True, rows=2, seed=0):
    """Segments i32[rows, tokens]: sequences and families of three with padding between some; the last row is shorter."""
    rng = np.random.default_rng(seed)
    out = []
    for b in range(rows):
        row, n = [], 1
        while len(row) < tokens:
            if families and rng.random() < 0.5:
                row += [-n] * int(rng.integers(1, 150))
                for _ in range(3):
                    row += [n] * int(rng.integers(1, 60))
                    n += 1
            else:
                row += [n] * int(rng.integers(1, 150))
                n += 1
            if rng.random() < 0.2:
                row += [0] * int(rng.integers(1, 40))
        out.append(row[: tokens - 150 * (b == rows - 1)] + [0] * (150 * (b == rows - 1)))
    return jnp.asarray(np.array(out, np.int32))


def results(attend, segments, heads, dtype="float32", seed=0):
    """[values, gradients of q, k and v], of attend(q, k, v), with weights for the sum that padding has none of."""
    rng = np.random.default_rng(seed)
    H, N, K = heads
    live = (segments != 0)[..., None, None]
    q, k, v, weight = (
        jnp.asarray(rng.standard_normal((*segments.shape, n, K)), jnp.float32).astype(dtype)
        for n in (H, N, N, H)
    )

    def loss(q, k, v):
        out = jnp.where(live, attend(q, k, v), 0)
        return jnp.sum((weight * out).astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return [out, *gradients]


def check(segments, heads, dtype="float32", attend=None, tolerances=(2e-6, 2e-5)):
    visible, sight = visible_tokens(segments), sight_of(segments)
    attend = attend or (lambda q, k, v: fused(q, k, v, sight))
    wanted = results(lambda q, k, v: segment_attention(q, k, v, visible), segments, heads, dtype)
    found = results(attend, segments, heads, dtype)
    for name, one, other in zip("out q k v".split(), wanted, found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        atol = tolerances[name != "out"]
        np.testing.assert_allclose(one.astype("float32"), other.astype("float32"), atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("heads", "dtype", "families", "tolerances"),
    [
        pytest.param((2, 1, 16), "float32", True, (2e-6, 2e-5), id="families"),
        pytest.param((3, 3, 64), "float32", False, (2e-6, 2e-5), id="sequences", marks=pytest.mark.slow),
        pytest.param((8, 1, 128), "bfloat16", True, (0.03, 0.06), id="bfloat16", marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compute_what_all_scores_at_once_give(heads, dtype, families, tolerances):
    """400 tokens do not divide into blocks of 128, and no sequence begins with one."""
    check(rows_of(400, families=families), heads, dtype, tolerances=tolerances)


def test_padding_gives_zeros_and_a_token_that_is_not_seen_moves_nothing():
    """A row of padding only; and one whose first block, of NaN, no other sees: it is not even read."""
    segments = jnp.asarray([[0] * 256, [1] * 128 + [2] * 100 + [0] * 28], jnp.int32)
    sight = sight_of(segments)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 256, 1, 16)), jnp.float32) for _ in range(3))
    k, v = (x.at[1, :128].set(jnp.nan) for x in (k, v))
    weight = jnp.ones_like(q).at[1, :128].set(0)

    @jax.jit
    def run(q, k, v):
        out, back = jax.vjp(lambda q, k, v: fused(q, k, v, sight), q, k, v)
        return out, *back(weight)

    for x in run(q, k, v):
        assert not np.any(x[0]) and not np.any(x[1, 228:])
        assert np.all(np.isfinite(x[1, 128:])) and np.any(x[1, 128:228])


@pytest.mark.parametrize("seed", range(4))
def test_no_block_is_missed_and_few_are_visited_in_vain(seed):
    """Blocks of 16 tokens of rows of 1,000; what a block visits is told twice, from the side of the keys too."""
    size, segments = 16, rows_of(1000, seed=seed, rows=3)
    sight, visible = sight_of(segments), np.asarray(visible_tokens(segments) & (segments != 0)[:, :, None])
    where = _where(_Plan(size, size, None, True), sight, sight, jnp.int32(0), 1)
    blocks = -(-1000 // size)
    pad = blocks * size - 1000
    needed = np.pad(visible, ((0, 0), (0, pad), (0, pad))).reshape(3, blocks, size, blocks, size).any((2, 4))

    def listed(visits):
        out = np.zeros((3, blocks, blocks), bool)
        for b, block in np.ndindex(3, blocks):
            count, first, length, after = np.asarray(visits)[b, block]
            out[b, block, [first + t if t < length else after + t - length for t in range(count)]] = True
            assert out[b, block].sum() == count  # none twice
        return out

    for found, wanted in ((listed(where.visits), needed), (listed(where.visitors), needed.swapaxes(1, 2))):
        assert not np.any(wanted & ~found)
        assert found.sum() <= 1.3 * wanted.sum()


@pytest.mark.slow
def test_directions_are_pushed_forward_as_through_all_scores():
    """The Jacobian times a direction, made of two transposes as trust regions make it."""
    segments = rows_of(256)
    visible, sight = visible_tokens(segments), sight_of(segments)
    rng = np.random.default_rng(1)
    at, direction = (
        tuple(jnp.asarray(rng.standard_normal((2, 256, n, 16)), jnp.float32) for n in (4, 2, 2))
        for _ in range(2)
    )

    def pushed(attend):
        out, pull = jax.vjp(attend, *at)
        return jax.vjp(pull, jnp.zeros_like(out))[1](direction)[0]

    wanted = jax.jit(lambda: pushed(lambda q, k, v: segment_attention(q, k, v, visible)))()
    found = jax.jit(lambda: pushed(lambda q, k, v: fused(q, k, v, sight)))()
    live = np.asarray(segments != 0)
    np.testing.assert_allclose(found[live], wanted[live], atol=2e-5)


def as_on_a_tpu(monkeypatch):
    monkeypatch.setattr(attention, "is_fused", lambda layout=None: True)
    monkeypatch.setattr("jaxrl_llm.models.fused.fused_attention", fused)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"context": 2, "tensor": 2, "fsdp": 2}, id="context2xtensor2xfsdp2"),
        # 2 key/value heads do not divide over 4 devices.
        pytest.param({"context": 2, "tensor": 4}, id="tensor4", marks=pytest.mark.slow),
    ],
)
def test_rows_that_are_split_over_devices_and_heads_over_others(sizes):
    """600 tokens, 300 on each shard: in no shard do tokens fill their blocks, and families lie across the border."""
    segments = rows_of(600)
    layout, sight = layout_of(make_mesh(**sizes)), sight_of(segments)
    check(segments, (4, 2, 16), attend=lambda q, k, v: split_attention(layout, q, k, v, sight, fused))


def forwards(monkeypatch, layout):
    """(segments, two functions of parameters that give hidden states: by all scores at once, and by the kernels)."""
    segments = rows_of(256)
    tokens = jax.random.randint(jax.random.key(0), segments.shape, 3, TINY.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(256), segments.shape)

    def by_all(params, layout=layout):
        return forward(params, TINY, tokens, positions, segments, remat=True, layout=layout)

    def by_kernels(params):
        with monkeypatch.context() as patch:
            as_on_a_tpu(patch)
            assert type(attention.sight_for(segments)) is Sight
            return by_all(params)

    return segments, by_all, by_kernels


def test_a_model_takes_the_kernels_where_they_run_and_nowhere_else(monkeypatch):
    """Traced for rows that are short and not split over devices."""
    params = jax.eval_shape(lambda: init_params(TINY, jax.random.key(1)))

    def kernels(f):
        return str(jax.make_jaxpr(f)(params)).count("attention_forward")

    for layout in (None, layout_of(make_mesh(fsdp=2))):
        _, by_all, by_kernels = forwards(monkeypatch, layout)
        assert kernels(by_all) == 0 and kernels(by_kernels) > 0


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [None, {"context": 2, "fsdp": 2}])
def test_parameters_have_the_gradient_of_one_device_without_kernels(monkeypatch, sizes):
    """Rematerialised as in training, the tokens of a row on one device and on two."""
    layout = layout_of(None if sizes is None else make_mesh(**sizes))
    segments, by_all, by_kernels = forwards(monkeypatch, layout)
    params = init_params(TINY, jax.random.key(1))

    def gradient(f):
        return jax.jit(jax.grad(lambda p: jnp.sum(jnp.where((segments != 0)[..., None], f(p), 0) ** 3)))(
            params
        )

    wanted, found = gradient(functools.partial(by_all, layout=None)), gradient(by_kernels)
    for one, other in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4 * float(jnp.max(jnp.abs(one))) + 1e-5)


def test_a_dtype_that_no_kernel_has_is_refused():
    q = jnp.zeros((1, 128, 2, 16), jnp.float16)
    with pytest.raises(ValueError, match=r"float32 or bfloat16, got float16"):
        fused(q, q, q, sight_of(jnp.ones((1, 128), jnp.int32)))


def test_it_lowers_for_a_tpu_on_any_machine():
    """What Pallas refuses (shapes of blocks, operations) shows without the compiler of TPUs, see test_fused_on_tpus."""
    q, k = (jax.ShapeDtypeStruct((1, 640, n, 64), jnp.bfloat16) for n in (9, 3))

    def gradients(q, k, v, segments):
        out, back = jax.vjp(lambda *x: fused_attention(*x, sight_of(segments)), q, k, v)
        return back(out)

    traced = jax.jit(gradients).trace(q, k, k, jax.ShapeDtypeStruct((1, 640), jnp.int32))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 3
