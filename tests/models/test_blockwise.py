"""Attention of long rows, block by block: the results and gradients of all scores at once, in less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.attention import segment_attention, sight_for, visible_tokens
from jaxrl_llm.models.blockwise import Sight, blockwise_attention, seen, sight_of
from jaxrl_llm.models.config import TINY, KeyBlocks
from jaxrl_llm.models.decoder import forward
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import segment_positions
from jaxrl_llm.parallel.mesh import make_mesh
from jaxrl_llm.parallel.rules import layout_of

H, N, K = 4, 2, 8

# Two rows of 40 tokens: sequences, two families (the first of three members) that padding divides, a sequence that comes
# back; and one sequence with padding.
SEGMENTS = np.array(
    [
        [1] * 5 + [-2] * 7 + [2] * 3 + [3] * 4 + [4] * 2 + [0] * 2 + [-5] * 4 + [5] * 6 + [-6] * 2 + [6] * 5,
        [1] * 29 + [0] * 11,
    ],
    np.int32,
)


def inputs(tokens, dtype="float32", rows=2):
    rng = np.random.default_rng(0)
    shapes = [(rows, tokens, heads, K) for heads in (H, N, N, H)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) for shape in shapes]


def value_and_gradients(attend, q, k, v, weight):
    def loss(q, k, v):
        out = attend(q, k, v)
        return jnp.sum((weight * out).astype(jnp.float32)), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return [out, *gradients]


def test_three_numbers_a_token_say_what_t_booleans_said():
    """Against the sentence in `TokenBatch.segments`, token by token."""
    expected = np.zeros((2, 40, 40), bool)
    for b, row in enumerate(SEGMENTS):
        for t in range(40):
            prefix = t
            while prefix > 0 and row[prefix] > 0:
                prefix -= 1
            for s in range(t + 1):
                run = row[s:prefix] if s <= prefix else row[:0]
                shared = row[t] > 0 and row[s] < 0 and row[prefix] < 0 and bool(np.all(run == row[prefix]))
                expected[b, t, s] = row[s] == row[t] or shared
    np.testing.assert_array_equal(visible_tokens(jnp.asarray(SEGMENTS)), expected)


@pytest.mark.parametrize(("dtype", "block", "atol"), [("float32", 8, 2e-6), ("bfloat16", 16, 0.03)])
def test_blocks_change_neither_values_nor_gradients(dtype, block, atol):
    """Blocks that 40 tokens divide into, and that they do not."""
    q, k, v, weight = inputs(40, dtype)
    segments = jnp.asarray(SEGMENTS)
    sight, visible = sight_of(segments), visible_tokens(segments)
    whole = value_and_gradients(lambda q, k, v: segment_attention(q, k, v, visible), q, k, v, weight)
    blocks = value_and_gradients(
        lambda q, k, v: blockwise_attention(q, k, v, sight, block=block), q, k, v, weight
    )
    for one, other in zip(whole, blocks, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype("float32"), other.astype("float32"), atol=atol)


def test_a_token_that_is_not_seen_moves_nothing():
    """NaN would reach a sum that multiplies it by 0: keys in blocks that are skipped are not read at all."""
    q, k, v, weight = inputs(40)
    sight = sight_of(jnp.asarray([[1] * 16 + [2] * 24] * 2))
    k, v = (x.at[:, :16].set(jnp.nan) for x in (k, v))
    found = value_and_gradients(
        lambda q, k, v: blockwise_attention(q, k, v, sight, block=8), q, k, v, weight.at[:, :16].set(0)
    )
    assert all(bool(jnp.all(jnp.isfinite(x[:, 16:]))) for x in found)


def test_long_rows_are_computed_in_blocks_and_short_ones_are_not():
    def kind(tokens, **more):
        return type(
            jax.eval_shape(lambda s: sight_for(s, **more), jax.ShapeDtypeStruct((1, tokens), "int32"))
        )

    assert kind(2048) is jax.ShapeDtypeStruct and kind(2064) is Sight
    assert kind(2064, blocks=KeyBlocks(16)) is jax.ShapeDtypeStruct  # an order that was asked for is kept
    layout = layout_of(make_mesh(context=2))
    assert kind(64, layout=layout) is Sight and kind(64, layout=layout_of(make_mesh(2))) is not Sight


def test_a_long_row_has_the_hidden_states_of_its_sequences():
    """2,240 tokens, packed: each sequence as if it were alone; positions are counted the same way."""
    params = init_params(TINY, jax.random.key(0))
    lengths = [900, 700, 640]
    tokens = jax.random.randint(jax.random.key(1), (1, sum(lengths)), 3, TINY.vocab_size)
    segments = jnp.asarray(np.repeat([1, 2, 3], lengths))[None]
    positions = segment_positions(segments)
    np.testing.assert_array_equal(positions[0], np.concatenate([np.arange(n) for n in lengths]))
    starts = np.cumsum([0, *lengths[:-1]])
    apart = jnp.stack([jnp.roll(tokens[0], -start)[:900] for start in starts])
    run = jax.jit(forward, static_argnums=1)
    packed = run(params, TINY, tokens, positions, segments)[0]
    places = jnp.broadcast_to(jnp.arange(900), apart.shape)
    alone = run(params, TINY, apart, places, jnp.ones_like(apart))
    expected = jnp.concatenate([alone[i, :n] for i, n in enumerate(lengths)])
    np.testing.assert_allclose(packed, expected, atol=2e-5)


def test_no_array_has_an_entry_for_each_pair_of_tokens():
    """Temporaries of a forward and backward pass through the layers, as compiled, are less than T² bytes."""
    T = 16_384
    given = jax.ShapeDtypeStruct((1, T), "int32")
    params = jax.eval_shape(lambda: init_params(TINY, jax.random.key(0)))

    def loss(params, tokens, positions, segments):
        return jnp.sum(forward(params, TINY, tokens, positions, segments, remat=True))

    compiled = jax.jit(jax.grad(loss)).lower(params, given, given, given).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * T * 0.75


def test_seen_of_parts_is_the_part_of_what_is_seen():
    segments = jnp.asarray(SEGMENTS)
    sight, columns = sight_of(segments), jnp.arange(40)
    part = jax.tree.map(lambda x: x[:, 24:32], sight)
    np.testing.assert_array_equal(
        seen(part, sight, columns[24:32], columns), visible_tokens(segments)[:, 24:32]
    )
