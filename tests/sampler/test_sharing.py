"""Rows that begin with the same pages: what they read together, and that it changes no bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.sampler import Sampler, SamplingParams, engine, sharing
from jaxrl_llm.sampler.attention import init_pages
from jaxrl_llm.sampler.paged_cache import decode_attention, write_pages
from jaxrl_llm.sampler.sharing import plan_tiles, same_bits
from jaxrl_llm.types import Prompt

S = 8
SMALL = dataclasses.replace(TINY, num_heads=8)  # in a shape in which a tile gives the bits of single rows
SLOTS = 8


def rows(*groups):
    """(table, position) of groups of (rows, pages in common, tokens of each): the rest is each row's own."""
    width = 12
    table, position, free = np.zeros((SLOTS, width), np.int32), np.zeros(SLOTS, np.int32), 1
    row = 0
    for count, common, tokens in groups:
        shared, free = np.arange(free, free + common), free + common
        for _ in range(count):
            own = tokens // S + 1 - common
            table[row, : common + own] = np.concatenate([shared, np.arange(free, free + own)])
            position[row], free, row = tokens, free + own, row + 1
    return table, position, np.arange(SLOTS) < row


def read(tiles, table):
    """The pages that each row reads in its tile."""
    X, C, G = tiles.rows.shape
    assert (np.diff(tiles.pages.reshape(-1)) <= 0).all() and not tiles.pages[int(tiles.used) :].any()
    found = []
    for row in range(SLOTS):
        count, (tile, place) = int(tiles.skip[row]), divmod(int(tiles.place[row]), G)
        if count:
            assert tiles.rows.reshape(X * C, G)[tile, place] == row
            assert tiles.pages.reshape(-1)[tile] == count
            assert np.array_equal(tiles.table.reshape(X * C, -1)[tile, :count], table[row, :count])
        found.append(count)
    return found


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ([(8, 3, 30)], [3] * 8),
        ([(4, 2, 30), (4, 5, 45)], [2] * 4 + [5] * 4),
        ([(3, 5, 47), (2, 2, 23)], [5] * 3 + [2] * 2 + [0] * 3),
        # A row alone is read in a tile as far as it would hold up the others, and no further.
        ([(4, 4, 35), (1, 0, 31)], [4] * 4 + [3] + [0] * 3),
        ([(4, 4, 35), (1, 0, 6)], [4] * 4 + [0] * 4),
        ([(8, 0, 30)], None),
        ([(8, 0, 7)], None),
        ([(1, 3, 30)], None),
        # Tiles with a few rows each would take longer than what they save.
        ([(2, 6, 52)] * 4, None),
    ],
)
def test_what_is_read_together(groups, wanted):
    table, position, active = rows(*groups)
    tiles = plan_tiles(table, position, active, S)
    assert wanted is None if tiles is None else read(tiles, table) == wanted


def test_prompts_that_begin_alike_and_go_on_differently():
    """All begin with 6 pages and then each has 3 full ones of its own."""
    table, position, active = rows((8, 6, 75))
    tiles = plan_tiles(table, position, active, S)
    assert tiles is not None and read(tiles, table) == [6] * 8
    table[4:, 5] = 60  # or with 5 of them: one tile of 5 pages is cheaper than two of 6
    tiles = plan_tiles(table, position, active, S)
    assert tiles is not None and read(tiles, table) == [5] * 8
    gone = active & (np.arange(SLOTS) != 2)
    tiles = plan_tiles(table, position, gone, S)
    assert tiles is not None and read(tiles, table) == [5, 5, 0, 5, 5, 5, 5, 5]


@pytest.mark.parametrize("groups", [[(8, 3, 30)], [(5, 4, 39), (2, 5, 44)]])
def test_attention_in_tiles_is_that_of_single_rows_and_of_a_dense_softmax(groups):
    table, position, active = rows(*groups)
    tiles = plan_tiles(table, position, active, S)
    assert tiles is not None
    H, N, K = SMALL.num_heads, SMALL.num_kv_heads, SMALL.head_dim
    rng = np.random.default_rng(0)
    pages = int(table.max()) + 1
    k_pages, v_pages = rng.standard_normal((2, SMALL.num_layers, pages, N, S, K), np.float32)
    cache = write_pages(init_pages(SMALL, pages, S), k_pages, v_pages, jnp.arange(pages))
    q, k, v = (rng.standard_normal((SLOTS, 1, heads, K), np.float32) for heads in (H, N, N))
    attend = jax.jit(decode_attention)
    blocks = -(-position // S)
    alone = attend(q, k, v, cache, 1, table, position, blocks.max())
    together = attend(q, k, v, cache, 1, table, position, (blocks - tiles.skip).max(), tiles)
    assert np.array_equal(alone, together)
    for row in range(SLOTS):
        keys, values = (
            np.concatenate([x[1, table[row]].swapaxes(1, 2).reshape(-1, N, K)[: position[row]], new[row]])
            for x, new in ((k_pages, k), (v_pages, v))
        )
        for head in range(H):
            scores = keys[:, head * N // H] @ q[row, 0, head] * K**-0.5
            weights = np.exp(scores - scores.max())
            wanted = weights @ values[:, head * N // H] / weights.sum()
            np.testing.assert_allclose(together[row, 0, head], wanted, atol=2e-6)


def test_a_tile_that_would_change_bits_is_not_used(monkeypatch):
    """What decides is a comparison: it finds a tile that multiplies in another order, and the engine then reads rows."""
    device = jax.devices()[0]
    assert same_bits(SMALL, SLOTS, S, "compute", device)
    original = sharing.decode_sums

    def one_ulp(*arguments):
        mass, mixed = original(*arguments)
        return mass, mixed if len(arguments) < 9 else mixed.at[3, 1, 2, 5].multiply(1 + 2**-23)

    monkeypatch.setattr(sharing, "decode_sums", one_ulp)
    other = dataclasses.replace(SMALL, num_layers=3)  # has not been compared
    assert not same_bits(other, SLOTS, S, "compute", device)
    monkeypatch.setattr(engine, "same_bits", lambda *_: False)
    sampler, _ = sampled(3)
    assert sampler.stats.shared_reads == 0 and sampler.stats.prefix_hits


def sampled(n, **options):
    params = init_params(SMALL, jax.random.key(0))
    params = {**params, "embed": params["embed"] * 6}
    rng = np.random.default_rng(0)
    lengths = (33, 5, 50, 17, 2)  # several pages; less than a page
    prompts = [
        Prompt(uid=f"p{i}", tokens=rng.integers(3, 128, c).astype(np.int32)) for i, c in enumerate(lengths)
    ]
    sampler = Sampler(SMALL, slots=SLOTS, page_size=S, **options)
    sampling = SamplingParams(max_tokens=14, n=n, seed=1, stop_ids=())
    return sampler, [
        {
            (c.prompt.uid, c.index): (c.tokens.tolist(), c.logprobs.tolist())
            for c in sampler.generate(params, part, sampling)
        }
        for part in ([prompts] if n > 1 else [prompts, prompts[::-1]])
    ]


def test_samples_of_a_group_are_those_of_single_requests():
    sampler, (group,) = sampled(5)
    assert sampler.stats.shared_reads > 0
    _, singles = sampled(1)
    assert singles[0] == singles[1]
    assert singles[0] == {key: value for key, value in group.items() if key[1] == 0}
    sampler, (tight,) = sampled(5, pages=24)
    assert sampler.stats.preemptions > 0 and sampler.stats.shared_reads > 0
    assert tight == group
