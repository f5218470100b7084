"""Attention of the learner: keys in blocks give the same results, and in bfloat16 the bits of the sampler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import segment_attention, visible_tokens
from jaxrl_llm.models.config import KeyBlocks
from jaxrl_llm.sampler.paged_cache import PagedCache, chunk_attention, decode_attention

H, N, K = 6, 2, 32


def inputs(rows, tokens, dtype, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(rng.standard_normal((rows, tokens, heads, K)), jnp.float32).astype(dtype)
        for heads in (H, N, N)
    )


PADDED = (np.array([[1] * 40, [1] * 23 + [0] * 17]), np.arange(40)[None].repeat(2, 0))
# Two sequences of 20 and 26 tokens that share 14, after one of 10.
PACKED = (
    np.array([[1] * 10 + [-2] * 14 + [2] * 6 + [3] * 12]),
    np.concatenate([np.arange(10), np.arange(14), np.arange(14, 20), np.arange(14, 26)])[None],
)


@pytest.mark.parametrize(
    ("layout", "blocks"), [(PADDED, KeyBlocks(16)), (PADDED, KeyBlocks(16, 3)), (PACKED, KeyBlocks(16, 2))]
)
def test_the_order_of_keys_changes_neither_values_nor_gradients(layout, blocks):
    segments, positions = layout
    q, k, v = inputs(*segments.shape, "float32")
    visible = visible_tokens(jnp.asarray(segments))
    weight = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape) * (segments != 0)[..., None, None])

    def value_and_gradients(order):
        def loss(q, k, v):
            out = segment_attention(q, k, v, visible, order, jnp.asarray(positions))
            return jnp.sum(weight * out), out

        gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        return [jnp.where((segments != 0)[..., None, None], out, 0), *gradients]

    for one, other in zip(value_and_gradients(None), value_and_gradients(blocks), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_blocks_by_position_need_positions():
    q, k, v = inputs(1, 4, "float32")
    with pytest.raises(ValueError, match="need the positions"):
        segment_attention(q, k, v, visible_tokens(jnp.ones((1, 4), jnp.int32)), KeyBlocks(16, 1))


def bits(x):
    return np.asarray(x).view(np.uint16)


def test_in_bfloat16_padded_rows_packed_rows_prefill_and_decoding_have_the_same_bits():
    S, T = 16, 48
    q, k, v = inputs(2, T, "bfloat16")
    positions = jnp.arange(T)[None].repeat(2, 0)
    attend = jax.jit(segment_attention, static_argnums=4)
    whole = attend(q, k, v, visible_tokens(jnp.ones((2, T), jnp.int32)), KeyBlocks(S), positions)

    # Both sequences in one row, after a sequence of 10 tokens that they do not see.
    q_row, k_row, v_row = (jnp.concatenate([x[:1, 7:17], x[:1], x[1:]], axis=1) for x in (q, k, v))
    segments = jnp.asarray([[1] * 10 + [2] * T + [3] * T])
    places = jnp.concatenate([jnp.arange(10), jnp.arange(T), jnp.arange(T)])[None]
    packed = attend(q_row, k_row, v_row, visible_tokens(segments), KeyBlocks(S, 3), places)
    np.testing.assert_array_equal(bits(packed[0, 10:]), bits(whole.reshape(2 * T, H, K)))

    def pages(x):
        x = x.reshape(2 * T // S, S, N, K).swapaxes(1, 2)[None]
        return jnp.concatenate([jnp.zeros_like(x[:, :1]), x], axis=1)

    cache, table = PagedCache(k=pages(k), v=pages(v)), jnp.arange(1, 7).reshape(2, 3)
    layer = jnp.int32(0)
    prefill = jax.jit(chunk_attention)(
        *(x[:, S:] for x in (q, k, v)), cache, layer, table, jnp.full(2, S), jnp.int32(1)
    )
    np.testing.assert_array_equal(bits(prefill), bits(whole[:, S:]))
    decode = jax.jit(decode_attention)
    for t in (0, 1, 15, 16, 37, 47):
        lengths = jnp.full(2, t)
        one = decode(*(x[:, t : t + 1] for x in (q, k, v)), cache, layer, table, lengths, jnp.int32(3))
        np.testing.assert_array_equal(bits(one), bits(whole[:, t : t + 1]))
