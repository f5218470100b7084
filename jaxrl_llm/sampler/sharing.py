"""Which rows of a dispatch read the pages that they begin with together.

The samples of a prompt begin with the same pages, and so do prompts with a common beginning. A product of the
stacked queries of several such rows with a page reads it once and not once for each row. The plan is made on the host
before a dispatch, from the page tables alone; rows without a companion cost nothing more, since they go on as before.

It must not change what is sampled: a row gets the same bits in a tile and by itself, or else they would depend on its
neighbours. Whether a backend adds up the products of both shapes in the same order is never assumed.
`same_bits` computes both and compares them, once for each shape; where they differ, nothing is read together.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.quantize import Precision, quantize
from jaxrl_llm.sampler.paged_cache import PagedCache, Tiles, decode_sums

__all__ = ["TILE", "plan_tiles", "same_bits", "unused_tiles"]

TILE = 8  # rows: half as many read a third more for full groups, twice as many waste more where they are not full
_PRICE = 0.5  # of a page that all rows read in tiles, where 1 is a page that each of them reads by itself: measured
_CANDIDATES = 8  # depths that are compared, at most


def _sizes(slots: int) -> tuple[int, int, int]:
    """(most times that tiles are computed, tiles at a time, rows of a tile): all rows fit at a time."""
    rows = min(TILE, slots)
    return 2, slots // rows, rows


def unused_tiles(slots: int, width: int) -> Tiles:
    """Tiles of nobody, in the shapes of `plan_tiles`; `width` is that of the page table."""
    X, C, G = _sizes(slots)
    return Tiles(
        rows=np.zeros((X, C, G), np.int32),
        table=np.zeros((X, C, width), np.int32),
        pages=np.zeros((X, C), np.int32),
        used=np.int32(0),
        place=np.zeros(slots, np.int32),
        skip=np.zeros(slots, np.int32),
    )


def plan_tiles(table: np.ndarray, position: np.ndarray, active: np.ndarray, page_size: int) -> Tiles | None:
    """The tiles of the next dispatch; None where each row had better read its pages by itself.

    Args:
      table: i32[B, W], physical pages of each row.
      position: i32[B], tokens of the row in its pages. Only full pages are read together.
      active: bool[B].
    """
    slots = len(table)
    live = np.flatnonzero(active)
    if len(live) < 2:
        return None
    full = position[live] // page_size
    if full.max() == 0:
        return None
    pages = table[live, : full.max()].astype(np.int64)
    # What is no full page of a row is like nothing else.
    outside = np.arange(pages.shape[1]) >= full[:, None]
    pages = np.where(outside, -1 - np.arange(len(live))[:, None], pages)
    order = np.lexsort(pages.T[::-1])
    live, full, pages = live[order], full[order], pages[order]
    common = np.cumprod(pages[1:] == pages[:-1], axis=1).sum(axis=1)  # with the next row
    if not common.any():
        return None
    blocks = -(-(position[live] + 1) // page_size)
    shared = np.maximum(np.append(common, 0), np.insert(common, 0, 0))
    depths = np.unique(common[common > 0])
    depths = depths[np.unique(np.linspace(0, len(depths) - 1, _CANDIDATES).astype(int))]
    X, C, G = _sizes(slots)
    cheapest, best = float(blocks.max()), None
    for depth in depths:
        found = _tiles_of_depth(int(depth), G, common, shared, full, blocks)
        chosen = sorted(found, key=lambda tile: -tile[2])  # stable: (first row, after the last one, pages)
        if len(chosen) > X * C:
            continue
        skip = np.zeros(len(live), np.int64)
        for first, after, count in chosen:
            skip[first:after] = count
        turns = [chosen[i][2] for i in range(0, len(chosen), C)]
        cost = _PRICE * sum(turns) * C * G / slots + float(np.max(blocks - skip))
        if cost < cheapest:
            cheapest, best = cost, chosen
    return None if best is None else _filled(best, live, table, slots)


def _tiles_of_depth(
    depth: int,
    size: int,
    common: np.ndarray,
    shared: np.ndarray,
    full: np.ndarray,
    blocks: np.ndarray,
) -> list[tuple[int, int, int]]:
    """(first row, after the last one, pages) of the tiles of `size` rows that read at most `depth` pages, rows in
    page order."""
    wanted = np.minimum(depth, np.minimum(shared[:-1], shared[1:]))
    bounds = [0, *(np.flatnonzero((common < wanted) | (common == 0)) + 1).tolist(), len(full)]
    tiles, alone, left = [], [], 0
    for first, after in zip(bounds[:-1], bounds[1:], strict=True):
        if after - first == 1:
            alone.append(first)
            continue
        count = min(depth, int(common[first : after - 1].min()))
        left = max(left, int(blocks[first:after].max()) - count)
        tiles += [(i, min(i + size, after), count) for i in range(first, after, size)]
    # A row alone is in a tile of its own where it would otherwise hold up all others.
    for row in alone:
        count = min(int(blocks[row]) - left, int(full[row]))
        if count > 0:
            tiles.append((row, row + 1, count))
    return tiles


def _filled(tiles: list[tuple[int, int, int]], live: np.ndarray, table: np.ndarray, slots: int) -> Tiles:
    out = unused_tiles(slots, table.shape[1])
    X, C, G = out.rows.shape
    flat_rows, flat_table = out.rows.reshape(X * C, G), out.table.reshape(X * C, -1)
    for number, (first, after, count) in enumerate(tiles):
        members = live[first:after]
        flat_rows[number, : len(members)] = members
        flat_table[number, :count] = table[members[0], :count]
        out.pages.reshape(-1)[number] = count
        out.place[members] = number * G + np.arange(len(members))
        out.skip[members] = count
    return dataclasses.replace(out, used=np.int32(-(-len(tiles) // C)))


@functools.lru_cache(maxsize=64)
def same_bits(
    config: ModelConfig, slots: int, page_size: int, kv: Precision, device: jax.Device | None
) -> bool:
    """Whether a row gets the same bits in a tile and by itself, in the shapes of these rows and pages.

    Computes the attention of a layer both ways: which order a product adds in depends on its shape and not on its numbers.
    """
    size = _sizes(slots)[2]
    # Rows in groups of a tile; two pages in common and one, half full, of their own.
    groups = -(-slots // size)
    first = 1 + 2 * (np.arange(slots) // size)
    own = 1 + 2 * groups + np.arange(slots)
    table = np.stack([first, first + 1, own], axis=1).astype(np.int32)
    lengths = np.full(slots, 2 * page_size + (page_size + 1) // 2, np.int32)
    tiles = plan_tiles(table, lengths, np.ones(slots, bool), page_size)
    if tiles is None:
        return False
    N, K = config.num_kv_heads, config.head_dim
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32).astype(jnp.dtype(config.dtype))

    q = normal(slots, 1, config.num_heads, K)
    k, v = normal(slots, 1, N, K), normal(slots, 1, N, K)
    pages = 1 + 2 * groups + slots
    stored = normal(1, pages, N, page_size, K), normal(1, pages, N, page_size, K)
    numbers = jax.device_put((stored, q, k, v, table, lengths, tiles), device)
    return bool(jax.device_get(_compare(kv, *numbers)))


@functools.partial(jax.jit, static_argnames="kv")
def _compare(kv: Precision, stored, q, k, v, table, lengths, tiles: Tiles) -> jax.Array:
    k_pages, v_pages = stored
    S = k_pages.shape[3]
    cache = PagedCache(k=k_pages, v=v_pages)
    if kv != "compute":
        keys, values = quantize(k_pages, kv), quantize(v_pages, kv)
        cache = PagedCache(k=keys.values, v=values.values, k_scale=keys.scale, v_scale=values.scale)
    blocks = -(-lengths // S)
    layer = jnp.int32(0)
    alone = decode_sums(q, k, v, cache, layer, table, lengths, jnp.max(blocks))
    together = decode_sums(q, k, v, cache, layer, table, lengths, jnp.max(blocks - tiles.skip), tiles)
    # Equal numbers are equal bits: none is 0 but by chance.
    same = [jnp.all(a == b) for a, b in zip(alone, together, strict=True)]
    return jnp.logical_and(*same)
