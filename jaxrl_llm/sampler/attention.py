"""Attention of new tokens over pages: the one function that the programs of `decode` call, and what it runs.

On a TPU that is the Pallas kernel `ragged_paged_attention`, which reads a `RaggedCache`; elsewhere, and where the
kernel does not apply, the blockwise code of `paged_cache` on a `PagedCache`. Which one a cache is for is said by its
type, which one a machine gets by `attention_path`.

The two differ in when a token is written. The kernel reads all keys and values from pages, so each layer writes its
own before it attends, and the cache is carried from layer to layer in place. The blockwise code attends to new tokens
beside the pages and writes all layers at once in the end, which is what XLA:CPU does without copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.ops.quantize import Precision
from jaxrl_llm.parallel.host import everywhere
from jaxrl_llm.parallel.rules import DEFAULT_RULES
from jaxrl_llm.sampler.paged_cache import (
    NOBODY,
    PagedCache,
    RaggedCache,
    Tiles,
    as_stored,
    chunk_attention,
    decode_attention,
    init_cache,
    init_ragged_cache,
    pack_heads,
    write_chunk,
    write_tokens,
)

__all__ = [
    "AttentionPath",
    "PageAttention",
    "attention_of",
    "attention_path",
    "decode_step",
    "home_of",
    "init_pages",
    "page_sharding",
    "prefill_step",
]

Array = jax.Array

_BLOCK_TOKENS = 512  # keys and values that the kernel has in fast memory at once, for each of its two buffers
_BLOCK_QUERIES = 32


class AttentionPath(NamedTuple):
    """What runs, and why."""

    name: str  # "ragged_paged_attention" or "blockwise"
    reason: str


class PageAttention(NamedTuple):
    """How the layers of one step attend to pages and leave their keys and values there."""

    carried: Any  # what goes from layer to layer
    attend: Callable[[Array, Array, Array, Array, Any], tuple[Array, Any, Any]]  # (q, k, v, layer, carried)
    written: Callable[
        [Any, Any], Any
    ]  # the cache, from what was carried and what the layers returned, stacked


def ragged_kernel() -> Callable[..., Array]:
    """The kernel that comes with JAX. Raises ImportError where it does not."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return ragged_paged_attention


def attention_path(
    config: ModelConfig, backend: str, devices: int = 1, *, kv: str = "compute"
) -> AttentionPath:
    """What attends to pages on a machine.

    Args:
      backend: of the devices, as `jax.default_backend()` names it.
      devices: on which the program runs; the pages are replicated over them.
      kv: the precision of the pages.
    """
    why_not = None
    if backend != "tpu":
        why_not = f"the backend is {backend}, the kernel is for TPUs"
    elif devices > 1:
        why_not = f"the program is partitioned over {devices} devices, the kernel runs on one"
    elif kv != "compute":
        why_not = f"{kv} pages have a scale for each token and head, the kernel takes one for all"
    elif config.dtype not in ("float32", "bfloat16"):
        why_not = f"the kernel computes in float32 or bfloat16, not in {config.dtype}"
    else:
        try:
            ragged_kernel()
        except ImportError as error:
            why_not = f"this version of JAX ({jax.__version__}) comes without the kernel: {error}"
    if why_not is None:
        return AttentionPath("ragged_paged_attention", f"one TPU, {config.dtype} pages")
    return AttentionPath("blockwise", why_not)


def init_pages(
    config: ModelConfig, pages: int, page_size: int, kv: str = "compute", path: str = "blockwise"
) -> PagedCache | RaggedCache:
    """Zeroed pages in the layout of a path."""
    if path == "blockwise":
        return init_cache(config, pages, page_size, kv)
    return init_ragged_cache(config, pages, page_size)


def page_sharding(config: ModelConfig, mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
    """How blockwise pages lie on a mesh: key/value heads split as the weights that make them, where they divide."""
    axis = DEFAULT_RULES["kv_heads"]
    divides = isinstance(axis, str) and config.num_kv_heads % mesh.shape[axis] == 0
    spec = PartitionSpec(None, None, axis) if divides else PartitionSpec()
    return jax.sharding.NamedSharding(mesh, spec)


def decode_step(
    cache: PagedCache | RaggedCache,
    table: Array,
    position: Array,
    active: Array,
    tiles: Tiles | None = None,
) -> PageAttention:
    """One new token a row, at `position`, i32[B]; those of rows that are not `active` go to NOBODY's page.

    `attend` takes q [B, 1, H, K] and k, v [B, 1, N, K]. The kernel reads no `tiles`.
    """
    S = cache.page_size
    pages = jnp.where(active, table[jnp.arange(table.shape[0]), position // S], NOBODY)
    offsets = position % S

    if isinstance(cache, RaggedCache):
        # A row that is not active reads one token of NOBODY, or of a page that it had, and nobody reads the result.
        lengths = jnp.where(active, position + 1, 1)

        def write_and_attend(q, k, v, layer, cache):
            new = pack_heads(cache, k[:, 0], v[:, 0])

            def body(b, kv):
                update = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=0)[None, :, None]
                return jax.lax.dynamic_update_slice(kv, update, (layer, pages[b], offsets[b], 0, 0))

            cache = dataclasses.replace(cache, kv=jax.lax.fori_loop(0, new.shape[0], body, cache.kv))
            return _ragged(q, cache, layer, table, lengths), cache, None

        return PageAttention(cache, write_and_attend, lambda cache, _: cache)

    skipped = 0 if tiles is None else tiles.skip
    blocks = jnp.max(jnp.where(active, -(-position // S) - skipped, 0))

    def attend(q, k, v, layer, carried):
        k, v = as_stored(cache, k), as_stored(cache, v)
        out = decode_attention(q, k, v, cache, layer, table, position, blocks, tiles)
        return out, carried, (k, v)

    def written(_, new):
        k, v = jax.tree.map(lambda x: x[:, :, 0], new)
        return write_tokens(cache, k, v, pages, offsets)

    return PageAttention(None, attend, written)


def prefill_step(
    cache: PagedCache | RaggedCache, table: Array, starts: Array, lengths: Array, chunk: int
) -> PageAttention:
    """A chunk of `chunk` tokens, a multiple of the page size, of each row, after its first `starts` tokens, i32[R].

    `attend` takes q [R, chunk, H, K] and k, v [R, chunk, N, K]; of them lengths, i32[R], are meant, and pages that
    hold none of those are NOBODY's.
    """
    S = cache.page_size
    columns = jnp.arange(chunk // S)
    pages = jnp.take_along_axis(table, starts[:, None] // S + columns, axis=1, mode="clip")
    pages = jnp.where(columns * S < lengths[:, None], pages, NOBODY)

    if isinstance(cache, RaggedCache):
        # Every row computes its whole chunk; a query beyond `lengths` may read any page and is not meant.
        wide = jnp.pad(table, ((0, 0), (0, chunk // S)), constant_values=NOBODY)

        def write_and_attend(q, k, v, layer, cache):
            new = pack_heads(cache, k, v)
            new = new.reshape(-1, S, *new.shape[2:])
            flat = pages.reshape(-1)

            def body(i, kv):
                update = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=0)[None]
                return jax.lax.dynamic_update_slice(kv, update, (layer, flat[i], 0, 0, 0))

            cache = dataclasses.replace(cache, kv=jax.lax.fori_loop(0, flat.shape[0], body, cache.kv))
            return _ragged(q, cache, layer, wide, starts + chunk), cache, None

        return PageAttention(cache, write_and_attend, lambda cache, _: cache)

    blocks = jnp.max(jnp.where(lengths > 0, starts, 0)) // S

    def attend(q, k, v, layer, carried):
        k, v = as_stored(cache, k), as_stored(cache, v)
        return chunk_attention(q, k, v, cache, layer, table, starts, blocks), carried, (k, v)

    return PageAttention(None, attend, lambda _, new: write_chunk(cache, new[0], new[1], pages))


def _ragged(q: Array, cache: RaggedCache, layer: Array, table: Array, lengths: Array) -> Array:
    """[B, T, H, K] = causal attention of the last T of `lengths` tokens of each row, all of them in pages.

    Args:
      q: [B, T, H, K]; table: i32[B, W]; lengths: i32[B], at least T.
    """
    B, T, H, K = q.shape
    L, P, S, C, Z = cache.kv.shape
    N = cache.kv_heads
    G, W = H // N, table.shape[1]
    q = q.reshape(B * T, N, G, K)
    q = jnp.pad(q, ((0, 0), (0, C // 2 - N), (0, 0), (0, Z - K))).reshape(B * T, C // 2 * G, Z)
    out = ragged_kernel()(
        q,
        cache.kv.reshape(L * P, S, C, Z),
        lengths.astype(jnp.int32),
        (layer * P + table).astype(jnp.int32),
        jnp.arange(0, B * T + 1, T, dtype=jnp.int32),
        jnp.array([B], jnp.int32),
        sm_scale=K**-0.5,
        # Its own choice asks the default device, which need not be the one that it is compiled for.
        num_kv_pages_per_block=max(1, min(W, _BLOCK_TOKENS // S)),
        num_queries_per_block=min(B * T, _BLOCK_QUERIES),
    )
    return out.reshape(B, T, C // 2, G, Z)[:, :, :N, :, :K].reshape(B, T, H, K)


def home_of(
    config: ModelConfig, weights: Any, mesh: jax.sharding.Mesh | None
) -> jax.sharding.Sharding | None:
    """Where the pages live: on the mesh, that of the weights if none is given, else on the one device of the weights."""
    if mesh is not None:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    spread = everywhere(weights)
    if spread is not None and isinstance(spread.mesh, jax.sharding.Mesh):
        return page_sharding(config, spread.mesh)
    shardings = {leaf.sharding for leaf in jax.tree.leaves(weights) if isinstance(leaf, jax.Array)}
    # Committed there from the start, as the pages that a program returns are: it is compiled once.
    return shardings.pop() if len(shardings) == 1 else None


def attention_of(
    config: ModelConfig, weights: Any, mesh: jax.sharding.Mesh | None, kv: Precision
) -> AttentionPath:
    """What attends to the pages of a sampler whose weights are these, and why."""
    devices = set() if mesh is None else set(mesh.devices.flat)
    if mesh is None:
        devices.update(*(x.devices() for x in jax.tree.leaves(weights) if isinstance(x, jax.Array)))
    platform = next((device.platform for device in devices), jax.default_backend())
    return attention_path(config, platform, max(1, len(devices)), kv=kv)
