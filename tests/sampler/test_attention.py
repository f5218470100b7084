"""Attention over pages: both paths against a dense softmax, the kernel replaced by what its own reference equals."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.quantize import restore
from jaxrl_llm.sampler import Sampler, SamplingParams, attention
from jaxrl_llm.sampler.attention import attention_path, decode_step, init_pages, prefill_step
from jaxrl_llm.sampler.paged_cache import Stored, copy_pages, read_pages, write_pages

PATHS = ("blockwise", "ragged_paged_attention")


def shape(heads, kv_heads, head_dim, layers=2, dtype="float32"):
    return dataclasses.replace(
        TINY, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, num_layers=layers, dtype=dtype
    )


SHAPES = [  # config, page size; the last two are padded for the kernel: 3 heads of 64, 5 of 24
    (shape(4, 2, 16), 8),
    (shape(8, 8, 128), 4),
    (shape(6, 1, 128), 16),
    (shape(9, 3, 64), 16),
    (shape(10, 5, 24), 8),
]


def stand_in(q, kv_pages, lengths, table, ends, rows, *, sm_scale, **blocks):
    """What the kernel computes, for rows with equally many queries; compiled on any machine."""
    B, W = table.shape
    T, (H, Z) = q.shape[0] // B, q.shape[1:]
    S, C = kv_pages.shape[1:3]
    pages = kv_pages[table]
    k, v = (pages[..., i::2, :].reshape(B, W * S, C // 2, Z) for i in (0, 1))
    q = q.reshape(B, T, C // 2, H * 2 // C, Z)
    scores = jnp.einsum("btngz,bsnz->bngts", q, k, preferred_element_type=jnp.float32) * sm_scale
    visible = jnp.arange(W * S) <= (lengths[:, None] - T + jnp.arange(T))[..., None]
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf))
    return jnp.einsum("bngts,bsnz->btngz", weights.astype(v.dtype), v).reshape(B * T, H, Z)


@pytest.fixture
def kernel(monkeypatch):
    """The stand-in in place of the kernel; shapes that the kernel cannot tile are refused as it does."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    def run(q, kv_pages, *arguments, **given):
        kernel.get_min_heads_per_blk(q.shape[1], kv_pages.shape[2], q.dtype, kv_pages.dtype)
        assert kv_pages.shape[-1] % 128 == 0 and given["num_kv_pages_per_block"] >= 1
        return stand_in(q, kv_pages, *arguments, **given)

    monkeypatch.setattr(attention, "ragged_kernel", lambda: run)


@pytest.mark.parametrize("queries", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_the_stand_in_is_the_reference_that_comes_with_the_kernel(queries):
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    rng = np.random.default_rng(0)
    q = rng.standard_normal((2 * queries, 8, 128), np.float32)
    kv_pages = rng.standard_normal((7, 8, 8, 128), np.float32)
    arguments = (
        jnp.asarray(q),
        jnp.asarray(kv_pages),
        jnp.array([19, 8], jnp.int32),
        jnp.array([[3, 1, 6], [2, 0, 0]], jnp.int32),
        jnp.array([0, queries, 2 * queries], jnp.int32),
        jnp.array([2], jnp.int32),
    )
    wanted = kernel.ref_ragged_paged_attention(*arguments, sm_scale=0.1)
    np.testing.assert_allclose(stand_in(*arguments, sm_scale=0.1), wanted, atol=2e-6)


def numbers(config, pages, page_size, kv="compute", path="blockwise"):
    """A cache full of random numbers."""
    cache = init_pages(config, pages, page_size, kv, path)
    where = (config.num_layers, pages, config.num_kv_heads, page_size, config.head_dim)
    k, v = (jax.random.normal(jax.random.key(i), where, config.dtype) for i in (0, 1))
    return write_pages(cache, k, v, jnp.arange(pages))


def dense(q, k, v):
    """[T, H, K]: q [T, H, K] are the last T of the tokens of k, v [S, N, K]; in f64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    T, H, K = q.shape
    group = H // k.shape[1]
    out = np.zeros_like(q)
    for t in range(T):
        seen = len(k) - T + t + 1
        for h in range(H):
            scores = k[:seen, h // group] @ q[t, h] * K**-0.5
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[:seen, h // group] / weights.sum()
    return out


def tokens_of(cache, layer, table, count):
    """(k, v), each [count, N, K], of the first tokens of a row, as the pages hold them."""
    found = []
    for x in read_pages(cache, jnp.asarray(table)):
        x = restore(x, jnp.float32) if isinstance(x, Stored) else x
        found.append(np.asarray(x[layer].swapaxes(1, 2).reshape(-1, *x[layer].shape[1::2])[:count]))
    return found


def layer_by_layer(plan, q, k, v, layers):
    """([layers, ...] outputs, the cache after) of one step, the same q, k and v in each layer."""
    carried, new, out = plan.carried, [], []
    for layer in range(layers):
        attended, carried, made = plan.attend(q, k, v, jnp.int32(layer), carried)
        out.append(attended)
        new.append(made)
    return jnp.stack(out), plan.written(carried, jax.tree.map(lambda *x: jnp.stack(x), *new))


def check(config, page, path="blockwise", kv="compute", atol=3e-6):
    """One decode step and one chunk of prefill against a dense softmax over what the pages hold afterwards."""
    rng = np.random.default_rng(5)
    H, N, K = config.num_heads, config.num_kv_heads, config.head_dim
    cache = numbers(config, 10, page, kv=kv, path=path)

    def normal(*where):
        return jnp.asarray(rng.standard_normal(where), config.dtype)

    table = np.array([[3, 1, 8, 0], [2, 0, 0, 0], [4, 5, 6, 7]], np.int32)
    position, active = np.array([2 * page + 1, 0, 4 * page - 1], np.int32), np.array([True, True, True])
    q, k, v = normal(3, 1, H, K), normal(3, 1, N, K), normal(3, 1, N, K)
    decode = jax.jit(lambda *x: layer_by_layer(decode_step(cache, *x[:3]), *x[3:], config.num_layers))
    got, after = decode(table, position, active, q, k, v)
    for layer in range(config.num_layers):
        for b in range(3):
            wanted = dense(q[b], *tokens_of(after, layer, table[b], position[b] + 1))
            np.testing.assert_allclose(np.asarray(got[layer, b], np.float64), wanted, atol=atol, rtol=0)

    chunk, starts, lengths = 2 * page, np.array([page, 0, 0], np.int32), np.array([page + 1, 3, 0], np.int32)
    table[2] = 0
    q, k, v = normal(3, chunk, H, K), normal(3, chunk, N, K), normal(3, chunk, N, K)
    prefill = jax.jit(
        lambda *x: layer_by_layer(prefill_step(cache, *x[:3], chunk), *x[3:], config.num_layers)
    )
    got, after = prefill(table, starts, lengths, q, k, v)
    for b in (0, 1):
        count = lengths[b]
        wanted = dense(q[b, :count], *tokens_of(after, 1, table[b], starts[b] + count))
        np.testing.assert_allclose(np.asarray(got[1, b, :count], np.float64), wanted, atol=atol, rtol=0)
    others = np.array([4, 5, 6, 7, 9])
    jax.tree.map(np.testing.assert_array_equal, read_pages(after, others), read_pages(cache, others))


@pytest.mark.parametrize("path", PATHS)
def test_both_paths_equal_a_dense_softmax(kernel, path):
    check(*SHAPES[0], path)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("config", "page"), SHAPES[1:])
def test_both_paths_at_other_shapes(kernel, config, page, path):
    check(config, page, path)


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_attention_sees_exactly_what_8_bit_pages_hold(kv):
    check(*SHAPES[0], kv=kv)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_bfloat16_on_both_paths(kernel, path):
    check(shape(9, 3, 64, dtype="bfloat16"), 16, path, atol=3e-2)


@pytest.mark.parametrize("path", PATHS)
def test_rows_that_ended_write_to_nobody(kernel, path):
    config, page = SHAPES[0]
    cache = numbers(config, 10, page, path=path)
    given = (jnp.array([[3, 1], [2, 4]]), jnp.array([9, 9]), jnp.array([False, True]))
    one = jnp.ones((2, 1, config.num_kv_heads, config.head_dim))
    q = jnp.ones((2, 1, config.num_heads, config.head_dim))
    step = jax.jit(lambda *x: layer_by_layer(decode_step(cache, *given), *x, config.num_layers)[1])
    after = step(q, one, one)
    every = np.arange(10)
    for x, y in zip(read_pages(after, every), read_pages(cache, every), strict=True):
        changed = np.argwhere(np.any(np.asarray(x) != np.asarray(y), axis=(0, 2, 4)))  # (page, offset)
        assert {tuple(place) for place in changed} == {(0, 1), (4, 1)}


def test_pages_move_between_the_layouts():
    config, page = SHAPES[3]
    plain, ragged = (numbers(config, 10, page, path=path) for path in PATHS)
    ids = jnp.array([4, 2, 9])
    for x, y in zip(read_pages(plain, ids), read_pages(ragged, ids), strict=True):
        np.testing.assert_array_equal(x, y)
    copied = copy_pages(ragged, jnp.array([4, 0]), jnp.array([6, 0]))
    np.testing.assert_array_equal(copied.kv[:, 6], ragged.kv[:, 4])
    assert ragged.kv.shape[-2:] == (8, 128) and not ragged.kv[..., 6:, :].any()
    assert not ragged.kv[..., 64:].any()


@pytest.mark.slow
def test_a_whole_generation_is_the_same_on_both_paths(kernel, monkeypatch):
    params = init_params(TINY, jax.random.key(0))
    params["embed"] = params["embed"] * 6
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [20, 21]]
    sampling = SamplingParams(max_tokens=9, n=2, stop_ids=())
    want = Sampler(TINY, slots=4, page_size=8, pages=24).generate(params, prompts, sampling)
    sampler = Sampler(TINY, slots=4, page_size=8, pages=24)
    path = attention_path(TINY, "tpu")
    monkeypatch.setattr(sampler, "attention", lambda weights: path)
    got = sampler.generate(params, prompts, sampling)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x.tokens, y.tokens)
        np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)


def test_the_path_has_a_reason(monkeypatch, tiny_params):
    path = attention_path(TINY, "tpu")
    assert path == ("ragged_paged_attention", "one TPU, float32 pages")
    for given, reason in (
        ({"backend": "cpu"}, "the backend is cpu"),
        ({"backend": "tpu", "devices": 4}, "partitioned over 4 devices"),
        ({"backend": "tpu", "kv": "int8"}, "int8 pages have a scale for each token and head"),
    ):
        path = attention_path(TINY, **given)
        assert path.name == "blockwise" and reason in path.reason
    wide = dataclasses.replace(TINY, dtype="float64")
    assert "not in float64" in attention_path(wide, "tpu").reason
    assert "the backend is cpu" in Sampler(TINY, slots=2).attention(tiny_params).reason
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.tpu.ragged_paged_attention", None)
    assert "comes without the kernel" in attention_path(TINY, "tpu").reason
