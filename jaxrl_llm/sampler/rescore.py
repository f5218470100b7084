"""Log-probs of sampled tokens that are those of the sampler bit for bit.

A product of matrices adds in an order that depends on the number of rows, attention in one that depends on
the blocks in which it visits keys. So the same weights give the same token log-probs that differ in the last
bits between decoding (a few rows, page after page) and one dense forward pass. What is here computes what
decoding computes, in its shapes, and still avoids its price:

- Prompts go through the prefill program of the sampler itself, in the same chunks, once per distinct prompt.
- Sampled tokens are computed layer by layer. All of them are known, so that nothing in a layer waits for
  the step before: the keys and values of every token are computed first, then every token attends to its
  pages in the order in which decoding visits them. A layer's weights are read once for many steps.
- Tokens of any sequences and positions fill the rows of a product; there are no idle slots.
- A product may have more rows than the sampler has slots where the backend gives a row the same bits at
  both row counts. This is never assumed: both ways are run on the first large enough wave of tokens, with
  its weights and shapes, and must agree in every bit of the last hidden states and log-probs. Which order a
  product adds in depends on its shape and not on its numbers, so that one comparison decides.

Exactness needs the backend and the slots of the sampler, its page size and prefill shapes, pages that are
moved and not recomputed when a row is preempted, one device, and one set of weights for the whole sequence.
Truncated distributions (top-k, top-p, min-p) are refused.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import decoder_layer, embed, rope_tables
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.base import Completion, SamplingParams
from jaxrl_llm.sampler.paged_cache import NOBODY, PagedCache, decode_attention, init_cache, pages_for
from jaxrl_llm.sampler.sampler import Sampler
from jaxrl_llm.sampler.sampling import RowSampling, draw

__all__ = ["ExactScorer", "exact_logprobs"]

Array = jax.Array

ROWS = (1024, 512, 256)  # of a product, tried from the left: larger ones use the processor better
ENOUGH = 4  # tokens per slot, with which two row counts are compared


@dataclasses.dataclass(frozen=True)
class _Sequence:
    prompt: np.ndarray  # i32[P], P >= 1
    tokens: np.ndarray  # i32[N], sampled
    temperature: float


class _Layout(NamedTuple):
    """Where everything of one wave of sequences lies. G groups of R tokens, P pages, S tokens a page."""

    # Items, in order of position; entries beyond the last one are of no sequence.
    token: Any  # i32[G, R], fed
    position: Any  # i32[G, R]
    given: Any  # i32[G, R], the token sampled next
    sequence: Any  # i32[G, R]
    valid: Any  # bool[G, R]
    temperature: Any  # f32[G, R]
    floor: Any  # i32[G, R]
    # Pages.
    table: Any  # i32[sequences, W]
    source: Any  # i32[P], the page of the prefilled cache that a page begins as
    item: Any  # i32[P, S], which item a place in a page belongs to; -1: to the prompt, or to nobody


class ExactScorer:
    """Computes the log-probs that a sampler records, without sampling. Holds no weights.

    A scorer is made for one sampler, see `of`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        page_size: int,
        prefill_rows: int = 8,
        prefill_chunk: int = 32,
        suppressed: np.ndarray | None = None,
        rows: int | None = None,
    ):
        """
        Args:
          config: of the model.
          slots, page_size, prefill_rows, prefill_chunk: those of the sampler.
          suppressed: bool[V], ids that the sampler never samples (padding of the vocabulary).
          rows: of a product, a multiple of `slots`; None: the largest that proves to be exact.
        """
        if slots < 2 or page_size < 1:
            raise InputError(
                f"exact scoring: needs at least 2 slots and pages of a token, got {slots}, {page_size}."
            )
        if rows is not None and (rows < slots or rows % slots):
            raise InputError(f"exact scoring: rows must be a multiple of the {slots} slots, got {rows}.")
        self.config = config
        self.slots = slots
        self._page_size = page_size
        self._prefill_shape = (prefill_rows, pages_for(prefill_chunk, page_size) * page_size)
        self._suppressed = None if suppressed is None or not np.any(suppressed) else np.asarray(suppressed)
        self._rows = rows
        self._largest = (0, 0, 0, 0)  # groups of `slots`, table width, prefilled pages and own pages so far

    @classmethod
    def of(cls, sampler: Sampler) -> ExactScorer:
        """The scorer of a sampler.

        Raises:
          InputError: what that sampler records cannot be computed again bit for bit.
        """
        options = sampler.options
        if options["preemption"] != "move":
            raise InputError(
                'exact scoring: the sampler recomputes the pages of preempted rows (preemption="recompute"), which '
                'changes last bits; use preemption="move".'
            )
        if (options["weights"], options["kv"]) != ("compute", "compute"):
            raise InputError(
                "exact scoring: the sampler keeps weights or pages in 8 bits, which is another policy than the learner's; "
                'use weights="compute" and kv="compute".'
            )
        mesh = options["mesh"]
        if mesh is not None and mesh.size > 1:
            raise InputError(
                f"exact scoring: the sampler runs on a mesh of {mesh.size} devices, where sums are split in "
                "other ways; use one device."
            )
        suppressed = np.zeros(sampler.config.vocab_size, bool)
        if options["tokenizer"] is not None:
            suppressed[options["tokenizer"].vocab_size :] = True
        return cls(
            sampler.config,
            slots=options["slots"],
            page_size=options["page_size"],
            prefill_rows=options["prefill_rows"],
            prefill_chunk=options["prefill_chunk"],
            suppressed=suppressed,
        )

    @property
    def rows(self) -> int | None:
        """Rows of a product; None while no large enough wave has decided it."""
        return self._rows

    def completions(
        self, params: Any, completions: Sequence[Completion], sampling: SamplingParams
    ) -> list[np.ndarray]:
        """f32[N] of each completion: what the sampler would record for these tokens with these weights.

        Args:
          params: the learner's tree, or the result of `decode.prepare_for_sampling`.
          sampling: how they were sampled.

        Raises:
          InputError: the distribution is truncated.
        """
        temperature = [
            0.0 if sampling.greedy_too and c.index == sampling.n else float(sampling.temperature)
            for c in completions
        ]
        sequences = [(np.asarray(c.prompt.tokens, np.int32), c.tokens) for c in completions]
        return self.of_sampling(sampling)(params, sequences, temperature)

    def of_sampling(self, sampling: SamplingParams) -> Callable[..., list[np.ndarray]]:
        """`logprobs` with what `sampling` suppresses.

        Raises:
          InputError: the distribution is truncated.
        """
        if sampling.truncated_support:
            raise InputError(
                "exact scoring: top_k, top_p and min_p truncate the distribution, which is not computed again here; "
                "turn them off."
            )
        suppressed = np.zeros(self.config.vocab_size, bool)
        suppressed[list(sampling.suppress_ids)] = True
        return functools.partial(
            self.logprobs,
            suppressed=suppressed,
            min_tokens=sampling.min_tokens,
            stop_ids=self.config.eos_ids if sampling.stop_ids is None else sampling.stop_ids,
        )

    def logprobs(
        self,
        params: Any,
        sequences: Sequence[tuple[np.ndarray, np.ndarray]],
        temperature: Sequence[float],
        *,
        suppressed: np.ndarray | None = None,
        min_tokens: int = 0,
        stop_ids: Sequence[int] = (),
    ) -> list[np.ndarray]:
        """f32[N] of each sequence.

        Args:
          params: the learner's tree, or the result of `decode.prepare_for_sampling`.
          sequences: (prompt i32[P], sampled tokens i32[N]), P >= 1.
          temperature: of each; 0 = greedy, raw log-probs.
          suppressed: bool[V], ids that are never sampled, besides those of the scorer.
          min_tokens, stop_ids: stop ids are suppressed before so many sampled tokens.
        """
        weights = params
        if not isinstance(params, decode.SamplingWeights):
            weights = decode.prepare_for_sampling(params, self.config)
        wanted = [
            _Sequence(np.asarray(prompt, np.int32), np.asarray(tokens, np.int32), float(t))
            for (prompt, tokens), t in zip(sequences, temperature, strict=True)
        ]
        if any(not len(sequence.prompt) for sequence in wanted):
            raise InputError("exact scoring: a sequence without a prompt has no first distribution.")
        stop = np.zeros(self.config.vocab_size, bool)
        stop[list(stop_ids)] = True
        forbidden = np.zeros(self.config.vocab_size, bool)
        for table in (self._suppressed, suppressed):
            forbidden |= False if table is None else table
        # As in the sampler: another program computes the log-probs where something may be suppressed.
        rules = (forbidden, stop) if forbidden.any() or min_tokens else None
        out: list[np.ndarray] = [np.zeros(0, np.float32) for _ in wanted]
        order = [i for i, sequence in enumerate(wanted) if len(sequence.tokens)]
        cache: PagedCache | None = None
        for start in range(0, len(order), self.slots):
            wave = order[start : start + self.slots]
            values, cache = self._wave(weights, [wanted[i] for i in wave], rules, min_tokens, cache)
            for i, value in zip(wave, values, strict=True):
                out[i] = value
        return out

    # ------------------------------------------------------------------------------------- internals

    def _wave(
        self,
        weights: decode.SamplingWeights,
        wave: list[_Sequence],
        rules: tuple[np.ndarray, np.ndarray] | None,
        min_tokens: int,
        cache: PagedCache | None,
    ) -> tuple[list[np.ndarray], PagedCache]:
        """(log-probs of each sequence, the cache of prompts for the next wave) of at most `slots` sequences."""
        S = self._page_size
        prefixes = dict.fromkeys(sequence.prompt[:-1].tobytes() for sequence in wave)
        first = 1  # page 0 belongs to nobody
        pages_of: dict[bytes, list[int]] = {}
        for prefix in prefixes:
            count = pages_for(len(prefix) // 4, S)
            pages_of[prefix], first = list(range(first, first + count)), first + count
        own = [pages_for(len(s.prompt) - 1 + len(s.tokens), S) - (len(s.prompt) - 1) // S for s in wave]
        width = max(pages_for(len(s.prompt) + len(s.tokens), S) for s in wave)
        groups = pages_for(sum(len(s.tokens) for s in wave), self.slots)
        sizes = (_round_up(groups), _round_up(width), _round_up(first), _round_up(sum(own)))
        self._largest = tuple(map(max, self._largest, sizes))  # type: ignore[assignment]
        _, W, prefilled, _ = self._largest
        if cache is None or cache.pages < prefilled:
            cache = init_cache(self.config, prefilled, S)
        fills = [(np.frombuffer(prefix, np.int32), 0, pages) for prefix, pages in pages_of.items()]
        for arguments in _prefill_calls(fills, *self._prefill_shape, width=W):
            cache, *_ = decode.prefill(weights, self.config, cache, *jax.device_put(arguments))
        run = functools.partial(self._run, weights, wave, pages_of, rules, min_tokens, cache)
        if self._rows is None and sum(len(s.tokens) for s in wave) >= ENOUGH * self.slots:
            self._rows, values = self._compare(run, sum(len(s.tokens) for s in wave))
        else:
            values, _ = run(self._rows or self.slots)
        return values, cache

    def _compare(
        self, run: Callable[[int], tuple[list[np.ndarray], np.ndarray]], items: int
    ) -> tuple[int, list[np.ndarray]]:
        """(the most rows of a product that give the bits of `slots` rows, log-probs)."""
        values, hidden = run(self.slots)
        for rows in ROWS:
            if self.slots < rows <= items and rows % self.slots == 0:
                others, other_hidden = run(rows)
                if np.array_equal(_bits(hidden), _bits(other_hidden)) and all(
                    np.array_equal(_bits(a), _bits(b)) for a, b in zip(values, others, strict=True)
                ):
                    return rows, values
        return self.slots, values

    def _run(self, weights, wave, pages_of, rules, min_tokens, cache, rows):
        """(log-probs of each sequence, last hidden states of all items) with `rows` rows in a product."""
        layout, places = self._lay_out(wave, pages_of, min_tokens, rows, cache.pages)
        items = sum(len(s.tokens) for s in wave)
        values, hidden = _rescore(
            weights, self.config, cache, *jax.device_put((layout, rules, np.int32(pages_for(items, rows))))
        )
        flat = np.asarray(values).reshape(-1)
        hidden = np.asarray(hidden).reshape(layout.token.size, -1)[:items]
        return [flat[place] for place in places], hidden

    def _lay_out(self, wave, pages_of, min_tokens, rows, prefilled) -> tuple[_Layout, list[np.ndarray]]:
        """The layout of a wave, and where the items of each sequence are."""
        S = self._page_size
        groups, W, _, own = self._largest
        G, R = pages_for(groups * self.slots, rows), rows
        P = prefilled + own
        table = np.full((self.slots, W), NOBODY, np.int32)
        source = np.where(np.arange(P) < prefilled, np.arange(P), NOBODY).astype(np.int32)
        item = np.full((P, S), -1, np.int32)
        columns = []
        next_page = prefilled
        for index, sequence in enumerate(wave):
            P0, N = len(sequence.prompt) - 1, len(sequence.tokens)
            shared = P0 // S
            pages = pages_of[sequence.prompt[:-1].tobytes()]
            mine = list(range(next_page, next_page + pages_for(P0 + N, S) - shared))
            next_page += len(mine)
            if P0 % S:
                source[mine[0]] = pages[shared]
            table[index, : shared + len(mine)] = pages[:shared] + mine
            columns.append(
                np.stack(
                    [
                        np.concatenate([sequence.prompt[-1:], sequence.tokens[:-1]]),
                        np.arange(P0, P0 + N),
                        sequence.tokens,
                        np.full(N, index),
                        np.full(N, P0 + 1 + min_tokens),
                    ]
                )
            )
        bounds = np.cumsum([0, *(column.shape[1] for column in columns)])
        items = np.concatenate(columns, axis=1).astype(np.int32)
        # Tokens that attend to about as many pages share a group.
        order = np.argsort(items[1], kind="stable")
        items = items[:, order]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        token, position, given, owner, floor = items
        item[table[owner, position // S], position % S] = np.arange(len(order))

        def groups_of(values: np.ndarray, fill: Any, dtype: Any) -> np.ndarray:
            out = np.full(G * R, fill, dtype)
            out[: len(values)] = values
            return out.reshape(G, R)

        temperature = np.array([sequence.temperature for sequence in wave], np.float32)
        layout = _Layout(
            token=groups_of(token, 0, np.int32),
            position=groups_of(position, 0, np.int32),
            given=groups_of(given, 0, np.int32),
            sequence=groups_of(owner, 0, np.int32),
            valid=groups_of(np.ones(len(order), bool), False, bool),
            temperature=groups_of(temperature[owner], 1.0, np.float32),
            floor=groups_of(floor, 0, np.int32),
            table=table,
            source=source,
            item=item,
        )
        return layout, [place[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def exact_logprobs(
    params: Any, completions: Sequence[Completion], sampling: SamplingParams, *, sampler: Sampler
) -> list[np.ndarray]:
    """f32[N] of each completion: the log-probs that `sampler` records for these tokens with these weights.

    See the module. Keep an `ExactScorer.of(sampler)` to score more than once.
    """
    return ExactScorer.of(sampler).completions(params, completions, sampling)


def _prefill_calls(
    fills: Sequence[tuple[np.ndarray, int, Sequence[int]]], rows: int, chunk: int, *, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """The arguments (tokens, starts, lengths, table) of the calls of `prefill` that compute several sequences.

    Args:
      fills: (tokens, start, pages of the whole sequence) of each; start is a multiple of the page size.
      rows, chunk: shape of a call.
      width: of the table.
    """
    queue = [(tokens, start, pages, 0) for tokens, start, pages in fills if len(tokens)]
    while queue:
        now, queue = queue[:rows], queue[rows:]
        tokens = np.zeros((rows, chunk), np.int32)
        starts, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        table = np.full((rows, width), NOBODY, np.int32)
        rest = []
        for r, (sequence, start, pages, done) in enumerate(now):
            piece = sequence[done : done + chunk]
            tokens[r, : len(piece)] = piece
            starts[r], lengths[r] = start + done, len(piece)
            table[r, : len(pages)] = pages
            if done + chunk < len(sequence):
                rest.append((sequence, start, pages, done + chunk))
        queue = rest + queue
        yield tokens, starts, lengths, table


def _round_up(count: int) -> int:
    """To 1, 2, 3, 4, 6, 8, 12, 16, …, so that nearby sizes share a compiled program."""
    power = 1 << max(0, count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


def _bits(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def _over_groups(groups: Array, one: Callable[[Array], Any], like: Any) -> Any:
    """The results of one(0), …, one(groups - 1), stacked into arrays of the shapes of `like`."""

    def body(g, out):
        return jax.tree.map(
            lambda all_groups, new: jax.lax.dynamic_update_index_in_dim(all_groups, new, g, 0), out, one(g)
        )

    return jax.lax.fori_loop(0, groups, body, like)


@functools.partial(jax.jit, static_argnames="config")
def _rescore(
    weights: decode.SamplingWeights,
    config: ModelConfig,
    prefilled: PagedCache,
    layout: _Layout,
    rules: tuple[Array, Array] | None,
    groups: Array,
) -> tuple[Array, Array]:
    """(log-probs f32[G, R] of the given tokens, hidden states [G, R, 1, D] after the last layer)."""
    G, R = layout.token.shape
    N, K, S = config.num_kv_heads, config.head_dim, prefilled.page_size
    rope = rope_tables(config, layout.position[:, :, None])
    held = (layout.item >= 0)[:, None, :, None]

    def rows_of(x, g):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, g, keepdims=False), x)

    def layer_step(x, layer):
        matrices, *before = layer

        def keys_and_values(g):
            # What the layer does with them is not used, and therefore not computed.
            return decoder_layer(
                matrices, config, rows_of(x, g), rows_of(rope, g), lambda q, k, v: (q, (k, v))
            )[1]

        empty = jnp.zeros((G, R, 1, N, K), x.dtype)
        new = _over_groups(groups, keys_and_values, (empty, empty))
        pages = [
            jnp.where(
                held,
                new_tokens.reshape(G * R, N, K)[jnp.maximum(layout.item, 0)].swapaxes(1, 2),
                prompt[layout.source],
            )[None]
            for prompt, new_tokens in zip(before, new, strict=True)
        ]
        cache = PagedCache(k=pages[0], v=pages[1])

        def hidden(g):
            position, sequence, valid = rows_of((layout.position, layout.sequence, layout.valid), g)
            blocks = jnp.max(jnp.where(valid, -(-position // S), 0))

            def attend(q, k, v):
                table = layout.table[sequence]
                attended = decode_attention(q, k, v, cache, jnp.int32(0), table, position, blocks)
                return attended, (k, v)

            # As in decoding, keys and values are results too: where they exist in memory they are rounded.
            out = decoder_layer(matrices, config, rows_of(x, g), rows_of(rope, g), attend)[:2]
            return jax.lax.optimization_barrier(out)[0]

        return _over_groups(groups, hidden, x), None

    x = embed({"embed": weights.embed}, config, layout.token[:, :, None])
    x, _ = jax.lax.scan(layer_step, x, (weights.layers, prefilled.k, prefilled.v))

    def logprob(g):
        position, floor, given, temperature = rows_of(
            (layout.position, layout.floor, layout.given, layout.temperature), g
        )
        forbidden = None
        if rules is not None:
            forbidden = decode.forbidden_tokens(*rules, position, floor)
        sampling = RowSampling(
            temperature=temperature,
            top_k=jnp.zeros(R, jnp.int32),
            top_p=jnp.ones(R, jnp.float32),
            min_p=jnp.zeros(R, jnp.float32),
            limit=jnp.zeros(R, jnp.int32),
        )
        logits = decode.next_logits(weights, config, rows_of(x, g)[:, 0])
        return draw(logits, None, None, sampling, forbidden=forbidden, truncate=False, given=given).logprob

    return _over_groups(groups, logprob, jnp.zeros((G, R), jnp.float32)), x
