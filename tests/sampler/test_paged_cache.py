"""Pages: bookkeeping on the host, moving on the device, attention against a dense softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import TINY
from jaxrl_llm.sampler.paged_cache import (
    PageAllocator,
    copy_pages,
    decode_attention,
    init_cache,
    read_pages,
    write_chunk,
    write_pages,
    write_tokens,
)

S = 8


def filled(pages=12):
    cache = init_cache(TINY, pages, S)
    k, v = (jax.random.normal(jax.random.key(i), cache.k.shape) for i in (0, 1))
    return cache.replace(k=k, v=v)


def test_allocator_counts_references_and_refuses_nonsense():
    pool = PageAllocator(4)
    a = pool.allocate(2)
    assert 0 not in a and pool.free == 1 and pool.capacity == 3
    pool.retain(a[:1])
    pool.release(a)
    assert pool.references(a[0]) == 1 and pool.references(a[1]) == 0 and pool.used == 1
    with pytest.raises(ValueError, match="3 pages asked for, 2 free"):
        pool.allocate(3)
    pool.release(a[:1])
    assert pool.used == 0
    for bad in (a[0], 0, 99):
        with pytest.raises(ValueError, match="is not allocated"):
            pool.release([bad])


def test_write_tokens_changes_only_its_places():
    cache = filled()
    shape = (TINY.num_layers, 3, TINY.num_kv_heads, TINY.head_dim)
    k, v = jnp.full(shape, 7.0), jnp.full(shape, 9.0)
    pages, offsets = jnp.array([3, 5, 3]), jnp.array([0, 7, 2])
    out = jax.jit(write_tokens)(cache, k, v, pages, offsets)
    for new, old, value in ((out.k, cache.k, 7.0), (out.v, cache.v, 9.0)):
        want = np.array(old)
        want[:, [3, 5, 3], :, [0, 7, 2]] = value
        assert np.array_equal(new, want)


def test_pages_survive_a_round_trip_and_copies():
    cache = filled()
    k, v = read_pages(cache, jnp.array([4, 2, 9]))
    moved = write_pages(cache, k, v, jnp.array([1, 7, 0]))
    assert np.array_equal(moved.k[:, 1], cache.k[:, 4]) and np.array_equal(moved.v[:, 7], cache.v[:, 2])
    copied = copy_pages(cache, jnp.array([4, 0]), jnp.array([6, 0]))
    assert np.array_equal(copied.k[:, 6], cache.k[:, 4]) and np.array_equal(copied.k[:, 4], cache.k[:, 4])


def test_write_chunk_puts_tokens_in_order():
    cache = init_cache(TINY, 6, S)
    L, N, K = TINY.num_layers, TINY.num_kv_heads, TINY.head_dim
    k = jax.random.normal(jax.random.key(2), (L, 2, 2 * S, N, K))
    out = write_chunk(cache, k, k, jnp.array([[3, 1], [5, 0]]))
    assert np.array_equal(out.k[:, 3], k[:, 0, :S].swapaxes(1, 2))
    assert np.array_equal(out.k[:, 1], k[:, 0, S:].swapaxes(1, 2))
    assert np.array_equal(out.v[:, 5], k[:, 1, :S].swapaxes(1, 2))


def test_decode_attention_equals_a_dense_softmax_and_ignores_neighbours():
    cache = filled()
    B, H, N, K = 3, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim
    q, k, v = (jax.random.normal(jax.random.key(i), (B, 1, h, K)) for i, h in ((3, H), (4, N), (5, N)))
    table = jnp.array([[3, 1, 8, 0], [2, 0, 0, 0], [4, 5, 6, 7]])
    lengths = jnp.array([17, 0, 32])
    attend = jax.jit(decode_attention)
    for layer in range(TINY.num_layers):
        out = attend(q, k, v, cache, layer, table, lengths, 4)
        for b in range(B):
            keys = cache.k[layer, table[b]].swapaxes(1, 2).reshape(-1, N, K)[: lengths[b]]
            values = cache.v[layer, table[b]].swapaxes(1, 2).reshape(-1, N, K)[: lengths[b]]
            keys, values = jnp.concatenate([keys, k[b]]), jnp.concatenate([values, v[b]])
            for h in range(H):
                w = jax.nn.softmax(keys[:, h // (H // N)] @ q[b, 0, h] * K**-0.5)
                np.testing.assert_allclose(out[b, 0, h], w @ values[:, h // (H // N)], atol=2e-6)
        few = attend(q, k, v, cache, layer, table.at[2].set(0), jnp.array([17, 0, 0]), 3)
        assert np.array_equal(out[:2], few[:2])
