"""The paged key/value cache: device pages as a pytree, host bookkeeping, and attention over pages.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in all layers. A table
i32[slots, width] maps the pages of each slot's sequence, in order, to physical pages. Page 0 belongs to
nobody: rows that are not live write there, and unused table entries point there; it is read only
under a mask.

Attention visits the pages of a row one after the other with an online softmax (Milakov & Gimelshein
2018, algorithm 3). A page that is masked out altogether multiplies by exp(0) = 1 and adds 0, so the
result of a row is bit for bit the same however many pages its neighbours have, and the work is
proportional to the longest live row, not to capacity.

Rows that begin with the same pages can read those together: their queries are stacked to a tile, one product of
which reads a page once for all of them (`Tiles`, made by `sharing`). The softmax of each row goes through its pages
in the same order as without.

Pages may hold 8-bit numbers with a scale for each token and head. Whoever attends then sees what the pages hold, also
of tokens that are not there yet, so that it does not matter which of them were computed together.

`RaggedCache` is the same memory in the layout of a TPU kernel, see `attention`.

Local names: B rows, C tokens of a chunk, H query heads, N key/value heads, G = H / N, K head dim,
S page size, L layers, P pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models.attention import fold_keys, own_key, scaled_queries, sum_of_weights
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.quantize import DTYPES, Stored, quantize, restore

__all__ = [
    "PageAllocator",
    "PagedCache",
    "RaggedCache",
    "Stored",
    "Tiles",
    "as_stored",
    "chunk_attention",
    "copy_pages",
    "decode_attention",
    "decode_sums",
    "init_cache",
    "init_ragged_cache",
    "pages_for",
    "read_pages",
    "write_chunk",
    "write_pages",
    "write_tokens",
]

Array = jax.Array

NOBODY = 0  # the page that is never allocated


@flax.struct.dataclass(kw_only=True)
class PagedCache:
    """Device memory of the pages, in the compute dtype or in 8 bits with scales beside them."""

    k: Array  # [L, P, N, S, K], after the rotary embedding
    v: Array  # [L, P, N, S, K]
    k_scale: Array | None = None  # f32[L, P, N, S] with 8-bit pages: what a number of k is multiplied by
    v_scale: Array | None = None  # likewise

    @property
    def pages(self) -> int:
        """P, the unused page 0 included."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """S, tokens."""
        return self.k.shape[3]


@flax.struct.dataclass(kw_only=True)
class RaggedCache:
    """Device memory of the pages as `ragged_paged_attention` reads them: keys and values of a head side by side.

    C ≥ 2 N and Z ≥ K: heads and their width are padded with zeros to what the kernel can tile. A TPU pads them in its
    memory anyway.
    """

    kv: Array  # [L, P, S, C, Z], in the compute dtype
    kv_heads: int = flax.struct.field(pytree_node=False)  # N
    head_dim: int = flax.struct.field(pytree_node=False)  # K

    @property
    def pages(self) -> int:
        """P, the unused page 0 included."""
        return self.kv.shape[1]

    @property
    def page_size(self) -> int:
        """S, tokens."""
        return self.kv.shape[2]


@flax.struct.dataclass(kw_only=True)
class Tiles:
    """Rows that begin with the same pages, which are then read once for each tile and not for each row.

    Up to G rows make a tile, C tiles are computed at once, X times C is the most that there can be.
    """

    rows: (
        Any  # i32[X, C, G], the row at each place; unused places hold any row, and nobody reads their result
    )
    table: Any  # i32[X, C, W], the pages that all rows of a tile begin with
    pages: Any  # i32[X, C], how many those are; 0 in an unused tile
    used: Any  # i32[], so many of the X are computed
    place: Any  # i32[B], where a row is among the X C G places; any, where its `skip` is 0
    skip: Any  # i32[B], pages that a row reads in its tile, and not by itself


def init_cache(config: ModelConfig, pages: int, page_size: int, kv: str = "compute") -> PagedCache:
    """Zeroed pages; `kv` is the `Precision` that they hold."""
    shape = (config.num_layers, pages, config.num_kv_heads, page_size, config.head_dim)
    dtype = config.dtype if kv == "compute" else DTYPES[kv]
    scales: dict[str, Array] = {}
    if kv != "compute":
        scales = {name: jnp.zeros(shape[:-1], jnp.float32) for name in ("k_scale", "v_scale")}
    return PagedCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype), **scales)


def init_ragged_cache(config: ModelConfig, pages: int, page_size: int) -> RaggedCache:
    """Zeroed pages in the layout of the kernel."""
    N, K = config.num_kv_heads, config.head_dim
    packing = 4 // jnp.dtype(config.dtype).itemsize  # numbers of one 32-bit sublane
    heads = next(n for n in range(N, 8 * N + 8) if _tiles(2 * n, packing))
    shape = (config.num_layers, pages, page_size, 2 * heads, -(-K // 128) * 128)
    return RaggedCache(kv=jnp.zeros(shape, config.dtype), kv_heads=N, head_dim=K)


def _tiles(rows: int, packing: int) -> bool:
    """Whether the kernel can read so many rows of 128 numbers, `packing` of them in a sublane."""
    sublanes, rest = divmod(rows, packing)
    return not rest and (sublanes in (1, 2, 4) or sublanes % 8 == 0)


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


# ------------------------------------------------------------------------------ moving keys and values


def as_stored(cache: PagedCache, x: Array | Stored) -> Array | Stored:
    """Keys or values [..., K] in the form in which the pages of this cache hold them."""
    if cache.k_scale is None or isinstance(x, Stored):
        return x
    return quantize(x, next(kind for kind, dtype in DTYPES.items() if cache.k.dtype == dtype))


def _seen(x: Array | Stored, dtype: Any) -> Array:
    """The numbers that pages hold, or will hold."""
    return restore(x, dtype) if isinstance(x, Stored) else x


def _parts(k: Any, v: Any) -> PagedCache:
    """Keys and values in the form of a cache, so that they fit onto one leaf by leaf."""
    if not isinstance(k, Stored):
        return PagedCache(k=k, v=v)
    return PagedCache(k=k.values, v=v.values, k_scale=k.scale, v_scale=v.scale)


def write_tokens(
    cache: PagedCache, k: Array | Stored, v: Array | Stored, pages: Array, offsets: Array
) -> PagedCache:
    """Writes one token a row: k, v [L, B, N, K] go to (pages[b], offsets[b])."""

    def write(store, new):
        # One in-place update a row: a scatter over [L, B] would be expanded into a slower loop.
        def body(b, store):
            update = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=1)[:, :, :, None]
            place = (0, pages[b], 0, offsets[b], 0)[: store.ndim]
            return jax.lax.dynamic_update_slice(store, update, place)

        return jax.lax.fori_loop(0, pages.shape[0], body, store)

    return jax.tree.map(write, cache, _parts(as_stored(cache, k), as_stored(cache, v)))


def _write_whole(store: Array, new: Array, pages: Array) -> Array:
    """Puts new[:, i] into store[:, pages[i]]."""

    def body(i, store):
        update = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(store, update, pages[i], axis=1)

    return jax.lax.fori_loop(0, pages.shape[0], body, store)


def write_pages(
    cache: PagedCache | RaggedCache, k: Array | Stored, v: Array | Stored, pages: Array
) -> PagedCache | RaggedCache:
    """Writes whole pages: k, v [L, M, N, S, K] go to pages i32[M] (NOBODY = discard)."""
    if isinstance(cache, RaggedCache):
        if isinstance(k, Stored) or isinstance(v, Stored):
            raise ValueError("pages of the kernel are in the compute dtype, got 8-bit ones.")
        new = pack_heads(cache, k.swapaxes(2, 3), v.swapaxes(2, 3))
        return dataclasses.replace(cache, kv=_write_whole(cache.kv, new, pages))
    parts = _parts(as_stored(cache, k), as_stored(cache, v))
    return jax.tree.map(lambda store, new: _write_whole(store, new, pages), cache, parts)


def write_chunk(cache: PagedCache, k: Array | Stored, v: Array | Stored, pages: Array) -> PagedCache:
    """Writes prefilled chunks: k, v [L, R, C, N, K] go to pages i32[R, C / S] (NOBODY = discard)."""
    S = cache.page_size

    def paged(x):  # of values [L, R, C, N, K] and of scales [L, R, C, N]
        L, R, C, N = x.shape[:4]
        return x.reshape(L, R * C // S, S, N, *x.shape[4:]).swapaxes(2, 3)

    k, v = jax.tree.map(paged, (as_stored(cache, k), as_stored(cache, v)))
    flat = pages.reshape(-1)
    return jax.tree.map(lambda store, new: _write_whole(store, new, flat), cache, _parts(k, v))


def read_pages(cache: PagedCache | RaggedCache, pages: Array) -> tuple[Array | Stored, Array | Stored]:
    """(k, v), each [L, M, N, S, K], of pages i32[M]; `Stored`, with the scales, of 8-bit pages."""
    if isinstance(cache, RaggedCache):
        kv = jnp.take(cache.kv, pages, axis=1)[..., : 2 * cache.kv_heads, : cache.head_dim].swapaxes(2, 3)
        return kv[:, :, 0::2], kv[:, :, 1::2]
    found = jax.tree.map(lambda store: jnp.take(store, pages, axis=1), cache)
    if found.k_scale is None:
        return found.k, found.v
    return Stored(found.k, found.k_scale), Stored(found.v, found.v_scale)


def copy_pages(cache: PagedCache | RaggedCache, source: Array, target: Array) -> PagedCache | RaggedCache:
    """Copies page source[i] to page target[i], i32[M]; (NOBODY, NOBODY) is a no-op."""
    return jax.tree.map(lambda store: _write_whole(store, jnp.take(store, source, axis=1), target), cache)


def pack_heads(cache: RaggedCache, k: Array, v: Array) -> Array:
    """[..., C, Z] of k, v [..., N, K]: the heads in turn key and value, padded with zeros."""
    N, K = k.shape[-2:]
    kv = jnp.stack([k, v], axis=-2).reshape(*k.shape[:-2], 2 * N, K)
    C, Z = cache.kv.shape[-2:]
    return jnp.pad(kv, [(0, 0)] * (kv.ndim - 2) + [(0, C - 2 * N), (0, Z - K)])


# ---------------------------------------------------------------------------------------- attention


def _page_of_rows(store: Array, layer: Array, page: Array) -> Array:
    """store[layer, page], [B, N, S, ...]: one page of each row, page i32[B]."""

    def gather(store, layer, page):
        return store[layer, page]

    def whole_pages(store, layer, page):
        # XLA:CPU copies element by element where a gather has more than one window dimension, and computes a gather
        # again in every product that it fuses it into. (A TPU would change the tiling of the whole cache for this.)
        L, P, *window = store.shape
        found = jnp.take(store.reshape(L * P, -1), layer * P + page, axis=0, mode="clip")
        return jax.lax.optimization_barrier(found).reshape(page.shape[0], *window)

    return jax.lax.platform_dependent(store, layer, page, cpu=whole_pages, default=gather)


def _visit_pages(
    cache: PagedCache,
    layer: Array,
    table: Array,
    lengths: Array,
    blocks: Array,
    q: Array,
    carry,
    skip: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Folds the pages of each row into an online softmax.

    Args:
      layer: i32[], which layer of the cache.
      table: i32[B, W]; lengths: i32[B], tokens of the row in its pages; blocks: i32[], pages to visit.
      q: [B, N, Q, K], already scaled, Q queries that share a key/value head.
      carry: (highest score f32[B, N, Q], sum of weights f32[B, N, Q], weighted values f32[B, N, Q, K]);
        must already contain one visible token, so that the highest score is finite.
      skip: i32[B], pages at the beginning of each row that are not visited; None: none.
    """
    S = cache.page_size
    wide = carry[0].dtype

    def body(j, carry):
        high, mass, mixed = carry
        if skip is None:
            page = jax.lax.dynamic_index_in_dim(table, j, axis=1, keepdims=False)
            visible = j * S + jnp.arange(S) < lengths[:, None]
        else:
            page = jnp.take_along_axis(table, (skip + j)[:, None], axis=1, mode="clip")[:, 0]
            visible = (skip + j)[:, None] * S + jnp.arange(S) < lengths[:, None]
        k, v = (_page_of_rows(x, layer, page).astype(q.dtype) for x in (cache.k, cache.v))  # [B, N, S, K]
        scores = jnp.einsum("bnqk,bnsk->bnqs", q, k, preferred_element_type=wide)
        if cache.k_scale is not None:
            scores = scores * _page_of_rows(cache.k_scale, layer, page)[:, :, None].astype(wide)
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        new_high = jnp.maximum(high, jnp.max(scores, axis=-1))
        rescale = jnp.exp(high - new_high)
        weights = jnp.exp(scores - new_high[..., None])
        mass = mass * rescale + sum_of_weights(weights.astype(v.dtype))
        if cache.v_scale is not None:
            weights = weights * _page_of_rows(cache.v_scale, layer, page)[:, :, None].astype(wide)
        mixed = mixed * rescale[..., None] + jnp.einsum(
            "bnqs,bnsk->bnqk", weights.astype(v.dtype), v, preferred_element_type=wide
        )
        return new_high, mass, mixed

    return jax.lax.fori_loop(0, blocks, body, carry)


def _visit_tiles(
    cache: PagedCache, layer: Array, tiles: Tiles, q: Array, carry
) -> tuple[Array, Array, Array]:
    """`_visit_pages` for the pages that rows read in tiles: the carry of each row after its first `tiles.skip`."""
    B, N, Q, _ = q.shape
    X, C, G = tiles.rows.shape

    def tiled(x):  # [B, N, Q, ...] -> [X, C, N, G Q, ...]
        x = jnp.swapaxes(x[tiles.rows], 2, 3)
        return x.reshape(X, C, N, G * Q, *x.shape[5:])

    def of_rows(x, before):
        x = jnp.swapaxes(x.reshape(X, C, N, G, Q, *x.shape[4:]), 2, 3)
        x = x.reshape(X * C * G, N, Q, *x.shape[5:])[tiles.place]
        return jnp.where((tiles.skip > 0).reshape(B, *[1] * (x.ndim - 1)), x, before)

    def body(i, carry):
        queries, table, pages, now = jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False),
            (q_tiled, tiles.table, tiles.pages, carry),
        )
        now = _visit_pages(cache, layer, table, pages * cache.page_size, jnp.max(pages), queries, now)
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, i, 0), carry, now)

    q_tiled = tiled(q)
    after = jax.lax.fori_loop(0, tiles.used, body, jax.tree.map(tiled, carry))
    return jax.tree.map(of_rows, after, carry)


def decode_sums(
    q: Array,
    k: Array | Stored,
    v: Array | Stored,
    cache: PagedCache,
    layer: Array,
    table: Array,
    lengths: Array,
    blocks: Array,
    tiles: Tiles | None = None,
) -> tuple[Array, Array]:
    """(sum of weights f32[B, N, G], weighted values f32[B, N, G, K]), whose ratio is `decode_attention`."""
    B, _, H, K = q.shape
    k, v = (_seen(as_stored(cache, x), q.dtype) for x in (k, v))
    N = k.shape[2]
    q_BNGK = scaled_queries(q).reshape(B, N, H // N, K)
    carry = own_key(q_BNGK, k.reshape(B, N, 1, K), v.reshape(B, N, 1, K))
    skip = None
    if tiles is not None:
        carry, skip = _visit_tiles(cache, layer, tiles, q_BNGK, carry), tiles.skip
    _, mass, mixed = _visit_pages(cache, layer, table, lengths, blocks, q_BNGK, carry, skip)
    return mass, mixed


def decode_attention(
    q: Array,
    k: Array | Stored,
    v: Array | Stored,
    cache: PagedCache,
    layer: Array,
    table: Array,
    lengths: Array,
    blocks: Array,
    tiles: Tiles | None = None,
) -> Array:
    """Attention of one new token a row to itself and to the tokens in its pages; [B, 1, H, K].

    Args:
      q: [B, 1, H, K]; k, v: [B, 1, N, K] of the new token (not yet in the pages).
      table, lengths: as in `_visit_pages`.
      blocks: i32[], pages that a row visits by itself.
      tiles: what rows read together; None: nothing.
    """
    B, _, H, K = q.shape
    mass, mixed = decode_sums(q, k, v, cache, layer, table, lengths, blocks, tiles)
    return (mixed / mass[..., None]).astype(q.dtype).reshape(B, 1, H, K)


def chunk_attention(
    q: Array,
    k: Array | Stored,
    v: Array | Stored,
    cache: PagedCache,
    layer: Array,
    table: Array,
    starts: Array,
    blocks: Array,
) -> Array:
    """Causal attention of a chunk of each row to itself and to the row's earlier pages; [B, C, H, K].

    Args:
      q: [B, C, H, K]; k, v: [B, C, N, K] of the chunk (not yet in the pages).
      starts: i32[B], tokens before the chunk, a multiple of the page size.
    """
    B, C, H, K = q.shape
    k, v = (_seen(as_stored(cache, x), q.dtype) for x in (k, v))
    N = k.shape[2]
    G = H // N
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = scaled_queries(q)
    q_BNQK = q.reshape(B, C, N, G, K).transpose(0, 2, 3, 1, 4).reshape(B, N, G * C, K)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, N, C, K]
    own = own_key(q_BNQK, jnp.tile(k, (1, 1, G, 1)), jnp.tile(v, (1, 1, G, 1)))
    carry = _visit_pages(cache, layer, table, starts, blocks, q_BNQK, own)
    S = cache.page_size
    k_pages, v_pages = (x.reshape(B, N, C // S, S, K).transpose(2, 0, 1, 3, 4) for x in (k, v))
    place = jnp.tile(jnp.arange(C), G)[:, None]

    def body(j, carry):
        k, v = k_pages[j], v_pages[j]
        scores = jnp.einsum("bnqk,bnsk->bnqs", q_BNQK, k, preferred_element_type=wide)
        return fold_keys(carry, jnp.where(j * S + jnp.arange(S) < place, scores, -jnp.inf), v)

    # As pages that are in the cache already, and by a loop that stays one, so that the products are those of decoding.
    pages = jax.lax.optimization_barrier(jnp.int32(C // S))
    _, mass, mixed = jax.lax.fori_loop(0, pages, body, carry)
    out = (mixed / mass[..., None]).astype(q.dtype)
    return out.reshape(B, N, G, C, K).transpose(0, 3, 1, 2, 4).reshape(B, C, H, K)


# ------------------------------------------------------------------------------------ host bookkeeping


class PageAllocator:
    """Free list and reference counts of the pages, on the host. Page 0 is never handed out."""

    def __init__(self, pages: int):
        if pages < 2:
            raise ValueError(f"page allocator: needs at least 2 pages (page 0 is never used), got {pages}.")
        self._free = list(range(pages - 1, 0, -1))
        self._references = [0] * pages

    @property
    def capacity(self) -> int:
        """Pages that can be allocated at once."""
        return len(self._references) - 1

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.capacity - self.free

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one reference each; ValueError when there are not so many."""
        if count > self.free:
            raise ValueError(f"page allocator: {count} pages asked for, {self.free} free of {self.capacity}.")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more reference to each page."""
        for page in pages:
            self._check(page)
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less; a page without references is free again."""
        for page in pages:
            self._check(page)
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def references(self, page: int) -> int:
        """Holders of a page."""
        return self._references[page]

    def _check(self, page: int) -> None:
        if not 0 < page < len(self._references) or not self._references[page]:
            raise ValueError(f"page allocator: page {page} is not allocated.")
