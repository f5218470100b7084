"""The paged key/value cache: device pages as a pytree, host bookkeeping, and attention over pages.

A page holds the keys and values of `page_size` consecutive tokens of one sequence, in all layers. A table
i32[slots, width] maps the pages of each slot's sequence, in order, to physical pages. Page 0 belongs to
nobody: rows that are not live write there, and unused table entries point there; it is read only
under a mask.

Attention visits the pages of a row one after the other with an online softmax (Milakov & Gimelshein
2018, algorithm 3). A page that is masked out altogether multiplies by exp(0) = 1 and adds 0, so the
result of a row is bit for bit the same however many pages its neighbours have, and the work is
proportional to the longest live row, not to capacity.

Local names: B rows, C tokens of a chunk, H query heads, N key/value heads, G = H / N, K head dim,
S page size, L layers, P pages.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig

__all__ = [
    "PageAllocator",
    "PagedCache",
    "chunk_attention",
    "copy_pages",
    "decode_attention",
    "init_cache",
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
    """Device memory of the pages, in the compute dtype."""

    k: Array  # [L, P, N, S, K], after the rotary embedding
    v: Array  # [L, P, N, S, K]

    @property
    def pages(self) -> int:
        """P, the unused page 0 included."""
        return self.k.shape[1]

    @property
    def page_size(self) -> int:
        """S, tokens."""
        return self.k.shape[3]


def init_cache(config: ModelConfig, pages: int, page_size: int) -> PagedCache:
    """Zeroed pages."""
    shape = (config.num_layers, pages, config.num_kv_heads, page_size, config.head_dim)
    return PagedCache(k=jnp.zeros(shape, config.dtype), v=jnp.zeros(shape, config.dtype))


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


# ------------------------------------------------------------------------------ moving keys and values


def write_tokens(cache: PagedCache, k: Array, v: Array, pages: Array, offsets: Array) -> PagedCache:
    """Writes one token a row: k, v [L, B, N, K] go to (pages[b], offsets[b])."""

    def write(store, new):
        # One in-place update a row: a scatter over [L, B] would be expanded into a slower loop.
        def body(b, store):
            update = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=1)[:, :, :, None]
            return jax.lax.dynamic_update_slice(store, update, (0, pages[b], 0, offsets[b], 0))

        return jax.lax.fori_loop(0, pages.shape[0], body, store)

    return PagedCache(k=write(cache.k, k), v=write(cache.v, v))


def write_pages(cache: PagedCache, k: Array, v: Array, pages: Array) -> PagedCache:
    """Writes whole pages: k, v [L, M, N, S, K] go to pages i32[M] (NOBODY = discard)."""

    def write(store, new):
        def body(i, store):
            update = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(store, update, pages[i], axis=1)

        return jax.lax.fori_loop(0, pages.shape[0], body, store)

    return PagedCache(k=write(cache.k, k), v=write(cache.v, v))


def write_chunk(cache: PagedCache, k: Array, v: Array, pages: Array) -> PagedCache:
    """Writes prefilled chunks: k, v [L, R, C, N, K] go to pages i32[R, C / S] (NOBODY = discard)."""
    L, R, C, N, K = k.shape
    S = cache.page_size

    def paged(x):
        return x.reshape(L, R, C // S, S, N, K).swapaxes(3, 4).reshape(L, R * C // S, N, S, K)

    return write_pages(cache, paged(k), paged(v), pages.reshape(-1))


def read_pages(cache: PagedCache, pages: Array) -> tuple[Array, Array]:
    """(k, v), each [L, M, N, S, K], of pages i32[M]."""
    return jnp.take(cache.k, pages, axis=1), jnp.take(cache.v, pages, axis=1)


def copy_pages(cache: PagedCache, source: Array, target: Array) -> PagedCache:
    """Copies page source[i] to page target[i], i32[M]; (NOBODY, NOBODY) is a no-op."""
    return write_pages(cache, *read_pages(cache, source), target)


# ---------------------------------------------------------------------------------------- attention


def _visit_pages(
    cache: PagedCache, layer: Array, table: Array, lengths: Array, blocks: Array, q: Array, carry
) -> tuple[Array, Array, Array]:
    """Folds the pages of each row into an online softmax.

    Args:
      layer: i32[], which layer of the cache.
      table: i32[B, W]; lengths: i32[B], tokens of the row in its pages; blocks: i32[], pages to visit.
      q: [B, N, Q, K], already scaled, Q queries that share a key/value head.
      carry: (highest score f32[B, N, Q], sum of weights f32[B, N, Q], weighted values f32[B, N, Q, K]);
        must already contain one visible token, so that the highest score is finite.
    """
    S = cache.page_size
    wide = carry[0].dtype

    def body(j, carry):
        high, mass, mixed = carry
        page = jax.lax.dynamic_index_in_dim(table, j, axis=1, keepdims=False)
        k, v = cache.k[layer, page], cache.v[layer, page]  # [B, N, S, K]
        scores = jnp.einsum("bnqk,bnsk->bnqs", q, k, preferred_element_type=wide)
        visible = j * S + jnp.arange(S) < lengths[:, None]
        scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
        new_high = jnp.maximum(high, jnp.max(scores, axis=-1))
        rescale = jnp.exp(high - new_high)
        weights = jnp.exp(scores - new_high[..., None])
        mass = mass * rescale + jnp.sum(weights, axis=-1)
        mixed = mixed * rescale[..., None] + jnp.einsum(
            "bnqs,bnsk->bnqk", weights.astype(v.dtype), v, preferred_element_type=wide
        )
        return new_high, mass, mixed

    return jax.lax.fori_loop(0, blocks, body, carry)


def decode_attention(
    q: Array, k: Array, v: Array, cache: PagedCache, layer: Array, table: Array, lengths: Array, blocks: Array
) -> Array:
    """Attention of one new token a row to itself and to the tokens in its pages; [B, 1, H, K].

    Args:
      q: [B, 1, H, K]; k, v: [B, 1, N, K] of the new token (not yet in the pages).
      table, lengths, blocks: as in `_visit_pages`.
    """
    B, _, H, K = q.shape
    N = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q_BNGK = (q * K**-0.5).astype(q.dtype).reshape(B, N, H // N, K)
    own = jnp.sum(q_BNGK.astype(wide) * k.reshape(B, N, 1, K).astype(wide), axis=-1)
    mixed = jnp.broadcast_to(v.reshape(B, N, 1, K).astype(wide), q_BNGK.shape)
    _, mass, mixed = _visit_pages(
        cache, layer, table, lengths, blocks, q_BNGK, (own, jnp.ones_like(own), mixed)
    )
    return (mixed / mass[..., None]).astype(q.dtype).reshape(B, 1, H, K)


def chunk_attention(
    q: Array, k: Array, v: Array, cache: PagedCache, layer: Array, table: Array, starts: Array, blocks: Array
) -> Array:
    """Causal attention of a chunk of each row to itself and to the row's earlier pages; [B, C, H, K].

    Args:
      q: [B, C, H, K]; k, v: [B, C, N, K] of the chunk (not yet in the pages).
      starts: i32[B], tokens before the chunk, a multiple of the page size.
    """
    B, C, H, K = q.shape
    N = k.shape[2]
    G = H // N
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = (q * K**-0.5).astype(q.dtype)
    q_BNQK = q.reshape(B, C, N, G, K).transpose(0, 2, 3, 1, 4).reshape(B, N, G * C, K)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)  # [B, N, C, K]
    scores = jnp.einsum("bnqk,bnsk->bnqs", q_BNQK, k, preferred_element_type=wide)
    visible = jnp.tile(jnp.tril(jnp.ones((C, C), bool)), (G, 1))
    scores = jnp.where(visible, scores, -jnp.inf)
    high = jnp.max(scores, axis=-1)
    weights = jnp.exp(scores - high[..., None])
    mixed = jnp.einsum("bnqs,bnsk->bnqk", weights.astype(v.dtype), v, preferred_element_type=wide)
    carry = (high, jnp.sum(weights, axis=-1), mixed)
    _, mass, mixed = _visit_pages(cache, layer, table, starts, blocks, q_BNQK, carry)
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
