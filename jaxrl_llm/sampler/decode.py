"""The compiled programs of the sampler: prefill, insert, generate, free_resource.

JetStream's four verbs as pure functions of a state; the weights are an argument of each call that
computes with them, so a policy swap is passing another tree.

The decode program always runs all `slots` rows and prefill always runs chunks of one fixed shape: a
matrix product gives a row the same bits whatever the other rows hold, but not at another row count.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import decoder_layer, embed, head_weight, rms_norm, rope_tables
from jaxrl_llm.models.experts import EXACT
from jaxrl_llm.ops.quantize import Precision, QuantizedMatrix, Stored, quantize_matrix, weight_product
from jaxrl_llm.parallel.host import place, read
from jaxrl_llm.sampler.attention import PageAttention, decode_step, init_pages, prefill_step
from jaxrl_llm.sampler.paged_cache import (
    NOBODY,
    PagedCache,
    RaggedCache,
    Tiles,
    copy_pages,
    read_pages,
    write_pages,
)
from jaxrl_llm.sampler.rules import Tables
from jaxrl_llm.sampler.sampling import RowSampling, draw

__all__ = [
    "DecodeState",
    "Dispatch",
    "ResultTokens",
    "SamplingWeights",
    "TargetScores",
    "collect",
    "duplicate_pages",
    "forbidden_tokens",
    "free_resource",
    "generate",
    "init_state",
    "insert",
    "launch",
    "load_pages",
    "next_logits",
    "owned",
    "prefill",
    "prepare_for_sampling",
    "store_pages",
]

Array = jax.Array


@flax.struct.dataclass(kw_only=True)
class SamplingWeights:
    """Weights in the form that decoding reads fastest; made by `prepare_for_sampling`."""

    embed: Array  # [V, D], as in the source tree
    layers: dict[str, Array | QuantizedMatrix]  # stacked, compute dtype; matrices may be in 8 bits
    final_norm: Array  # [D]
    head: Array  # [D, V], head dtype, x @ W orientation


@flax.struct.dataclass(kw_only=True)
class DecodeState:
    """Everything that decoding carries from one dispatch to the next.

    `cache` lives on the device and is donated from call to call. All other fields are small and are kept
    as NumPy arrays on the host between dispatches, where the scheduler edits them.
    """

    cache: PagedCache | RaggedCache
    table: Any  # i32[slots, W], physical pages of each row
    token: Any  # i32[slots], newest token, whose K/V are not yet in the pages
    position: Any  # i32[slots], its position = tokens of the row in its pages
    limit: Any  # i32[slots], tokens (prompt and sampled) at which the row must end
    floor: Any  # i32[slots], tokens below which stop ids are suppressed
    rule: Any  # i32[slots], see `rules.Tables`
    active: Any  # bool[slots]
    keys: Any  # u32[slots, 2]
    sampling: RowSampling

    @property
    def slots(self) -> int:
        """Rows of the decode program."""
        return self.token.shape[0]


@flax.struct.dataclass(kw_only=True)
class ResultTokens:
    """What one dispatch sampled; entry [t, s] is meaningful where `valid`."""

    tokens: Any  # i32[steps, slots]
    logprobs: Any  # f32[steps, slots]
    raw_logprobs: Any  # f32[steps, slots] or None
    top_ids: Any  # i32[steps, slots, K] or None
    top_logprobs: Any  # f32[steps, slots, K] or None
    support_ids: Any = None  # i32[steps, slots, K] or None
    support_cut: Any = None  # bool[steps, slots] or None
    routing_ids: Any = (
        None  # i16[steps, slots, layers, K], experts of the token that was fed; None of a dense model
    )
    valid: Any  # bool[steps, slots]
    steps: Any  # i32[], decode steps that ran


class TargetScores(NamedTuple):
    """What the policy makes of given tokens; arrays of the device or of the host."""

    logprobs: Any  # f32[R, C], raw
    ranks: Any  # i32[R, C], tokens that are likelier, and 1
    top_ids: Any  # i32[R, C, K], the likeliest tokens in their places, best first
    top_logprobs: Any  # f32[R, C, K]


@functools.partial(jax.jit, static_argnames="config")
def _head(params: Any, config: ModelConfig) -> Array:
    return head_weight(params, config)


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(layers: Any, dtype: str) -> Any:
    return {name: x if name in EXACT else x.astype(dtype) for name, x in layers.items()}


@functools.partial(jax.jit, static_argnames=("dtype", "kind"))
def _quantize(layers: Any, dtype: str, kind: str) -> Any:
    return {
        name: x.astype(dtype) if x.ndim < 3 else quantize_matrix(x, kind)  # norms have one number a channel
        for name, x in layers.items()
        if name not in EXACT
    }


def prepare_for_sampling(params: Any, config: ModelConfig, weights: Precision = "compute") -> SamplingWeights:
    """Copies of the weights for decoding: compute dtype, and the tied head in x @ W orientation.

    Pure, once per swap. The source tree is neither kept nor changed; what needs no change is not copied.

    Args:
      weights: "int8" and "fp8" round the matrices of the layers to 8 bits with a scale for each output channel, so
        that the policy that is sampled from is another one. Norms, the embedding and the head are left as they are: an
        error of a logit is an error of a log-prob at once, and no layer comes after it to average it out.
    """
    layers = params["layers"]
    if weights != "compute":
        exact = {name: x for name, x in layers.items() if name in EXACT}
        layers = _quantize(layers, config.dtype, weights) | exact
    elif any(x.dtype != jnp.dtype(config.dtype) for name, x in layers.items() if name not in EXACT):
        layers = _cast(layers, config.dtype)
    head = params.get("head")
    if head is None or head.dtype != jnp.dtype(config.logits_dtype):
        head = _head({name: params[name] for name in ("embed", "head") if name in params}, config)
    return SamplingWeights(embed=params["embed"], layers=layers, final_norm=params["final_norm"], head=head)


def owned(weights: SamplingWeights, params: Any) -> SamplingWeights:
    """`prepare_for_sampling`'s result with copies of what it shares with the source tree, which may then be consumed."""
    source = {id(x) for x in jax.tree.leaves(params)}
    return jax.tree.map(lambda x: jnp.copy(x) if id(x) in source else x, weights)


_init_pages = jax.jit(init_pages, static_argnums=(0, 1, 2, 3, 4))


def init_state(
    config: ModelConfig,
    slots: int,
    pages: int,
    page_size: int,
    width: int,
    *,
    kv: Precision = "compute",
    path: str = "blockwise",
) -> DecodeState:
    """No live rows, zeroed pages; `width` is the number of pages that a row can have.

    Args:
      kv: the precision of the pages.
      path: the name of an `attention.AttentionPath`, whose layout the pages have.
    """
    if slots < 2:
        # A product with one row takes another, in bf16 very slow, code path.
        raise ValueError(f"sampler: slots must be at least 2, got {slots}.")
    return DecodeState(
        cache=_init_pages(config, pages, page_size, kv, path),
        table=np.full((slots, width), NOBODY, np.int32),
        token=np.zeros(slots, np.int32),
        position=np.zeros(slots, np.int32),
        limit=np.zeros(slots, np.int32),
        floor=np.zeros(slots, np.int32),
        rule=np.zeros(slots, np.int32),
        active=np.zeros(slots, bool),
        keys=np.zeros((slots, 2), np.uint32),
        sampling=RowSampling.uniform(slots),
    )


def _run_layers(
    weights: SamplingWeights,
    config: ModelConfig,
    tokens: Array,
    positions: Array,
    pages: PageAttention,
    live: Array,
) -> tuple[Array, Any, Array | None]:
    """(hidden [B, T, D], the cache with the keys and values of these tokens, their experts i16[B, T, layers, K]).

    `live` bool[B, T]: what is computed of other tokens is not used.
    """
    rope = rope_tables(config, positions)

    def body(carry, layer):
        x, carried = carry
        weights_of_layer, index = layer

        def attend(q, k, v):
            attended, after, new = pages.attend(q, k, v, index, carried)
            return attended, (after, new)

        x, (carried, new), routed = decoder_layer(
            weights_of_layer, config, x, rope, attend, weight_product, live=live
        )
        return (x, carried), (new, None if routed is None else routed.ids.astype(jnp.int16))

    x = embed({"embed": weights.embed}, config, tokens)
    (x, carried), (new, ids) = jax.lax.scan(
        body, (x, pages.carried), (weights.layers, jnp.arange(config.num_layers))
    )
    return x, pages.written(carried, new), None if ids is None else jnp.moveaxis(ids, 0, 2)


def next_logits(weights: SamplingWeights, config: ModelConfig, x: Array) -> Array:
    """[N, V] in f32 (f64 stays f64) of hidden states [N, D]."""
    h = rms_norm(x, weights.final_norm, config.rms_norm_eps).astype(config.logits_dtype)
    wide = jnp.promote_types(h.dtype, jnp.float32)
    return jnp.einsum("bd,dv->bv", h, weights.head, preferred_element_type=wide)


def forbidden_tokens(suppressed: Array, stop: Array, position: Array, floor: Array) -> Array:
    """bool[B, V]: what must not follow the token at `position` i32[B].

    Args:
      suppressed, stop: bool[B, V] or [V], never sampled, and not sampled below the floor.
      floor: i32[B], tokens below which stop ids are suppressed.
    """
    return suppressed | (stop & (position + 1 < floor)[:, None])


@functools.partial(jax.jit, static_argnames=("config", "top"), donate_argnames="cache")
def prefill(
    weights: SamplingWeights,
    config: ModelConfig,
    cache: PagedCache | RaggedCache,
    tokens,
    starts,
    lengths,
    table,
    targets=None,
    top: int = 0,
) -> tuple[PagedCache | RaggedCache, TargetScores | None, Array | None]:
    """Computes one chunk of several prompts and writes its keys and values to their pages.

    Args:
      tokens: i32[R, C], C a multiple of the page size; row r holds tokens starts[r] … of its prompt.
      starts: i32[R], multiples of the page size; the pages before must hold the earlier tokens.
      lengths: i32[R], valid tokens in each row, 0 for an unused row.
      table: i32[R, W], pages of each prompt.
      targets: i32[R, C], the token after each, to be scored; None: none is, which spares the head.
      top: static; also list the so many likeliest tokens in the place of each target.

    Returns:
      The cache; the scores of the targets, or None; the experts of each token, i16[R, C, layers, K], or None of a dense
      model.
    """
    C = tokens.shape[1]
    positions = starts[:, None] + jnp.arange(C)
    pages = prefill_step(cache, table, starts, lengths, C)
    live = jnp.arange(C) < lengths[:, None]
    x, cache, routing = _run_layers(weights, config, tokens, positions, pages, live)
    if targets is None:
        return cache, None, routing

    def score(row):  # one prompt's logits at a time
        x, target = row
        logp = jax.nn.log_softmax(next_logits(weights, config, x), axis=-1)
        own = jnp.take_along_axis(logp, target[:, None], axis=1)
        listed, ids = (
            jax.lax.top_k(logp, top) if top else (logp[:, :0], jnp.zeros((logp.shape[0], 0), jnp.int32))
        )
        return TargetScores(
            own[:, 0].astype(jnp.float32),
            1 + jnp.sum(logp > own, axis=1, dtype=jnp.int32),
            ids.astype(jnp.int32),
            listed.astype(jnp.float32),
        )

    return cache, jax.lax.map(score, (x, targets)), routing


def insert(
    state: DecodeState,
    slot: int,
    *,
    pages: list[int],
    token: int,
    position: int,
    limit: int,
    floor: int,
    key: np.ndarray,
    sampling: RowSampling,
    rule: int = 0,
) -> DecodeState:
    """Puts a row into a slot. Its pages must hold the tokens before `position`.

    Args:
      pages: physical pages of the row in order; may grow later (`DecodeState.table`).
      token: the newest token, at `position`; the first decode step feeds it to the model.
      limit: number of tokens, prompt included, at which the row ends.
      floor: number of tokens, prompt included, before which stop ids are suppressed.
      key: u32[2] of `row_key`.
      sampling: parameters of this one row, arrays [1].
      rule: its entry of the tables that `generate` gets.
    """

    def put(array, value):
        array = np.array(array)
        array[slot] = value
        return array

    row = np.full(state.table.shape[1], NOBODY, np.int32)
    row[: len(pages)] = pages
    return dataclasses.replace(
        state,
        table=put(state.table, row),
        token=put(state.token, token),
        position=put(state.position, position),
        limit=put(state.limit, limit),
        floor=put(state.floor, floor),
        rule=put(state.rule, rule),
        active=put(state.active, True),
        keys=put(state.keys, key),
        sampling=jax.tree.map(lambda all_rows, one: put(all_rows, one[0]), state.sampling, sampling),
    )


def free_resource(state: DecodeState, slot: int) -> DecodeState:
    """Takes a row out of its slot; its pages are the allocator's business."""
    table, active, position = np.array(state.table), np.array(state.active), np.array(state.position)
    table[slot], active[slot], position[slot] = NOBODY, False, 0
    return dataclasses.replace(state, table=table, active=active, position=position)


@functools.partial(
    jax.jit, static_argnames=("config", "steps", "truncate", "raw", "top", "support"), donate_argnames="cache"
)
def _generate(weights, config, cache, rows, tables, least, tiles, *, steps, truncate, raw, top, support):
    slots = rows["token"].shape[0]
    table, limit, floor, rule = rows["table"], rows["limit"], rows["floor"], rows["rule"]

    def of_rows(entries):  # [R, V] -> [slots, V], or [V] where there is one rule only
        return entries[0] if entries.shape[0] == 1 else entries[rule]

    def step(carry):
        t, cache, token, position, active, out = carry
        pages = decode_step(cache, table, position, active, tiles)
        x, cache, routing = _run_layers(
            weights, config, token[:, None], position[:, None], pages, active[:, None]
        )
        forbidden = None
        if tables.suppressed is not None:
            forbidden = forbidden_tokens(of_rows(tables.suppressed), of_rows(tables.stop), position, floor)
        drawn = draw(
            next_logits(weights, config, x[:, 0]),
            rows["keys"],
            position + 1,
            rows["sampling"],
            forbidden=forbidden,
            bias=None if tables.bias is None else of_rows(tables.bias),
            truncate=truncate,
            raw=raw,
            top=top,
            support=support,
        )
        new = {"tokens": drawn.token, "logprobs": drawn.logprob, "valid": active}
        if raw:
            new["raw_logprobs"] = drawn.raw_logprob
        if top:
            new |= {"top_ids": drawn.top_ids, "top_logprobs": drawn.top_logprob}
        if support:
            new |= {"support_ids": drawn.support_ids, "support_cut": drawn.support_cut}
        if routing is not None:
            new["routing_ids"] = routing[:, 0]
        out = jax.tree.map(lambda all_steps, one: all_steps.at[t].set(one), out, new)
        token = jnp.where(active, drawn.token, token)
        position = jnp.where(active, position + 1, position)
        ended = (tables.halt[rule, drawn.token] & (position >= floor)) | (position + 1 >= limit)
        return t + 1, cache, token, position, active & ~ended, out

    out = {
        "tokens": jnp.zeros((steps, slots), jnp.int32),
        "logprobs": jnp.zeros((steps, slots), jnp.float32),
        "valid": jnp.zeros((steps, slots), bool),
    }
    if raw:
        out["raw_logprobs"] = jnp.zeros((steps, slots), jnp.float32)
    if top:
        out["top_ids"] = jnp.zeros((steps, slots, top), jnp.int32)
        out["top_logprobs"] = jnp.zeros((steps, slots, top), jnp.float32)
    if support:
        out["support_ids"] = jnp.zeros((steps, slots, support), jnp.int32)
        out["support_cut"] = jnp.zeros((steps, slots), bool)
    if config.num_experts:
        chosen = (config.num_layers, config.experts_per_token)
        out["routing_ids"] = jnp.zeros((steps, slots, *chosen), jnp.int16)
    start = (jnp.int32(0), cache, rows["token"], rows["position"], rows["active"], out)
    ran, cache, token, position, active, out = jax.lax.while_loop(
        lambda carry: (carry[0] < steps) & (jnp.sum(carry[4]) >= least), step, start
    )
    return cache, (token, position, active), (out, ran)


class Dispatch(NamedTuple):
    """A dispatch that was launched: arrays that the device may still be computing."""

    cache: PagedCache
    carried: Any  # token, position, active of each slot
    results: Any


def launch(
    weights: SamplingWeights,
    config: ModelConfig,
    state: DecodeState,
    *,
    tables: Tables,
    tiles: Tiles | None = None,
    steps: int = 8,
    least: int = 1,
    truncate: bool = False,
    raw: bool = False,
    top: int = 0,
    support: int = 0,
    device: jax.Device | jax.sharding.Sharding | None = None,
) -> Dispatch:
    """Starts one dispatch, up to `steps` tokens of every live row, and does not wait. `state.cache` is donated.

    Args:
      tables: what rows may sample and what ends them.
      tiles: which rows read the pages that they begin with together; None: none. Changes no bit, see `sharing`.
      steps: most decode steps.
      least: the dispatch ends as soon as fewer rows than this are live: 1 = when all have ended, the number
        of live rows = when the first one has ended (so that another can take its slot).
      truncate, raw, top, support: see `sampling.draw`; `support` only with `truncate`.
      device: where the weights and the pages are: a device, or a copy on each of several.
    """
    rows = {
        name: getattr(state, name)
        for name in ("table", "token", "position", "limit", "floor", "rule", "active", "keys", "sampling")
    }
    arguments = place((rows, tables, np.int32(max(1, least)), tiles), device)
    return Dispatch(
        *_generate(
            weights,
            config,
            state.cache,
            *arguments,
            steps=steps,
            truncate=truncate,
            raw=raw,
            top=top,
            support=support,
        )
    )


def collect(state: DecodeState, dispatch: Dispatch) -> tuple[DecodeState, ResultTokens]:
    """Waits for a dispatch: the state after it and what it sampled."""
    (token, position, active), (out, ran) = read((dispatch.carried, dispatch.results))
    state = dataclasses.replace(state, cache=dispatch.cache, token=token, position=position, active=active)
    return state, ResultTokens(
        tokens=out["tokens"],
        logprobs=out["logprobs"],
        raw_logprobs=out.get("raw_logprobs"),
        top_ids=out.get("top_ids"),
        top_logprobs=out.get("top_logprobs"),
        support_ids=out.get("support_ids"),
        support_cut=out.get("support_cut"),
        routing_ids=out.get("routing_ids"),
        valid=out["valid"],
        steps=int(ran),
    )


def generate(
    weights: SamplingWeights, config: ModelConfig, state: DecodeState, **options: Any
) -> tuple[DecodeState, ResultTokens]:
    """One dispatch, waited for; the options are those of `launch`."""
    return collect(state, launch(weights, config, state, **options))


@functools.partial(jax.jit, donate_argnames="cache")
def duplicate_pages(cache: PagedCache | RaggedCache, source, target) -> PagedCache | RaggedCache:
    """Copy on write: page source[i] is copied to page target[i], i32[M]."""
    return copy_pages(cache, source, target)


@jax.jit
def store_pages(cache: PagedCache | RaggedCache, pages) -> tuple[Array | Stored, Array | Stored]:
    """Pages i32[M] as (k, v), [L, M, N, S, K] each, to be kept in host memory.

    Of 8-bit pages each is `Stored`, with scales [L, M, N, S]: map over the leaves, whose axis 1 is the pages.
    """
    return read_pages(cache, pages)


@functools.partial(jax.jit, donate_argnames="cache")
def load_pages(cache: PagedCache | RaggedCache, k, v, pages) -> PagedCache | RaggedCache:
    """The inverse of `store_pages`, to possibly other pages."""
    return write_pages(cache, k, v, pages)
