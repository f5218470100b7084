"""A sampler that lives on: requests come and go, weights are swapped while rows are being sampled.

One call of `step` places rows, fills prompts and makes one dispatch. What is sampled depends on (seed, prompt uid,
sample index, position) and on the history of weights the row was sampled under; slots, neighbours, the queue, the
size of the cache, found prefixes, cancellations and preemption change nothing, bit for bit, as long as `slots` and
the shape of prefill are the same.

Not thread-safe: one thread owns an engine.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrl_llm import memory
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import dropless, on_mesh
from jaxrl_llm.ops.quantize import Precision
from jaxrl_llm.parallel.host import everywhere, place, read
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.attention import attention_of, home_of
from jaxrl_llm.sampler.base import (
    Completion,
    SamplerStats,
    SamplingParams,
    as_prompts,
)
from jaxrl_llm.sampler.checks import check_options, check_params
from jaxrl_llm.sampler.paged_cache import NOBODY, PageAllocator, PagedCache, Tiles, pages_for
from jaxrl_llm.sampler.requests import (
    Carried,
    Event,
    Request,
    as_it_was,
    completion_of,
    prompt_scores_of,
    row_sampling,
    take,
)
from jaxrl_llm.sampler.rules import RuleTable
from jaxrl_llm.sampler.sampling import row_key
from jaxrl_llm.sampler.scheduler import Plan, Row, Scheduler
from jaxrl_llm.sampler.sharing import plan_tiles, same_bits, unused_tiles
from jaxrl_llm.snapshots.digest import fingerprint
from jaxrl_llm.types import Prompt, StopReason

__all__ = ["Engine", "Pages", "Staged"]

Pages = Literal["keep", "recompute"]

_TOP_SIZES = (0, 1, 2, 4, 8, 16, 32, 64, 128)


class Staged(NamedTuple):
    """Weights that are where an engine computes, and not served yet."""

    weights: decode.SamplingWeights
    version: int
    fingerprint: str
    prefill_weights: decode.SamplingWeights | None  # on `prefill_on`
    state: decode.DecodeState | None  # of an engine that has served none before
    prefill_cache: Any  # likewise


class Engine:
    """Continuous batching with per-request parameters, prefix reuse, cancellation and in-flight weight swaps."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int = 64,
        pages: int,
        page_size: int = 64,
        max_context: int | None = None,
        tokenizer: Any = None,
        steps_per_dispatch: int = 8,
        prefill_rows: int = 8,
        prefill_chunk: int = 32,
        prefill_calls: int | None = None,
        preemption: str = "move",
        keep_prefixes: bool = True,
        reuse_generated: bool = False,
        weights: Precision = "compute",
        kv: Precision = "compute",
        mesh: jax.sharding.Mesh | None = None,
        device: jax.Device | None = None,
        prefill_on: jax.Device | None = None,
        table_width: int | None = None,
    ):
        """
        Args:
          config: of the model whose weights will be served.
          slots: rows that are decoded together, at least 2.
          pages: pages of the cache, page 0 (never used) included; bounds the memory.
          page_size: tokens of a page.
          max_context: tokens of prompt and completion; None: `config.max_positions`.
          tokenizer: needed for stop strings and `Completion.text`; ids beyond its vocabulary (padding of the
            embedding) are then never sampled.
          steps_per_dispatch: most decode steps of one `step`; while rows wait, it ends as soon as a row has ended.
          prefill_rows, prefill_chunk: shape of the prefill program, rows and tokens.
          prefill_calls: most calls of the prefill program in one `step` while rows decode, so that long prompts do
            not hold them up; None: all that is needed.
          preemption: "move" = pages of a preempted row go to host memory and come back, exact; "recompute" = they are
            computed again by prefill, which costs no host memory and may differ from decoding in the last bits.
          keep_prefixes: prompts that begin alike share full pages, also after their rows have ended. Exact.
          reuse_generated: pages of a completion are kept for prompts that continue it, too (the next turn of a
            conversation). They were computed by decoding and not by prefill: the last bits may differ.
          weights, kv: "int8" or "fp8" keep the weights of the layers, or the pages, in 8 bits. What is sampled from,
            and what log-probs are of, is then the rounded policy, which is not the learner's.
          mesh: devices to run on; the pages are replicated over it. None: where the weights are.
          device: the weights are copied there when they are swapped in; None: they stay where they are.
          prefill_on: another device, which computes prompts while this one decodes; the pages are moved over when
            a prompt is complete. It holds a copy of the weights and as many pages. None: prompts are computed here.
          table_width: most pages of a row; None: those of `max_context`.
        """
        check_options(
            config,
            slots=slots,
            pages=pages,
            page_size=page_size,
            max_context=max_context,
            steps_per_dispatch=steps_per_dispatch,
            prefill_rows=prefill_rows,
            prefill_chunk=prefill_chunk,
            prefill_calls=prefill_calls,
            preemption=preemption,
            weights=weights,
            kv=kv,
        )
        if prefill_on is not None and reuse_generated:
            raise InputError(
                "sampler: reuse_generated needs prompts to be computed where rows decode; leave out prefill_on."
            )
        if device is not None and mesh is not None:
            raise InputError("sampler: give device or mesh, not both.")
        chunk = pages_for(prefill_chunk, page_size) * page_size
        memory.refuse_too_large(
            [
                memory.cache_parts(
                    config,
                    slots=slots,
                    pages=pages * (1 if prefill_on is None else 2),
                    page_size=page_size,
                    steps_per_dispatch=steps_per_dispatch,
                    prefill=(prefill_rows, chunk),
                    kv=kv,
                )
            ]
        )
        self.config = on_mesh(dropless(config), mesh)
        self.stats = SamplerStats(slots=slots, pages=pages)
        self.max_context = max_context or config.max_positions
        self.version = 0
        self.fingerprint: str | None = None
        self._tokenizer = tokenizer
        self._page_size = page_size
        self._steps = steps_per_dispatch
        self._prefill_shape = (prefill_rows, chunk)
        self._prefill_calls = prefill_calls
        self._preemption = preemption
        self._precision: tuple[Precision, Precision] = (weights, kv)
        self._reuse_generated = reuse_generated
        self._mesh = mesh
        self._device = device
        self._prefill_on = prefill_on
        self._where: Any = device  # what the host gives to the programs: a device, a sharding, or None
        self._rules = RuleTable(config.vocab_size, tuple(config.eos_ids), tokenizer)
        self._width = table_width or pages_for(self.max_context, page_size)
        self._allocator = PageAllocator(pages)
        self._scheduler = Scheduler(
            slots=slots,
            allocator=self._allocator,
            page_size=page_size,
            steps=steps_per_dispatch,
            prefill_rows=prefill_rows,
            chunk_pages=self._prefill_shape[1] // page_size,
            keep_prefixes=keep_prefixes,
        )
        self._weights: Any = None  # SamplingWeights from the first swap on
        self._state: Any = None  # DecodeState, likewise
        self._prefill_weights: Any = None
        self._prefill_cache: Any = None  # PagedCache of `prefill_on`, the same pages by the same numbers
        # Of each place of each page the experts that its token was sent through, as the page holds its keys and values.
        self._routing: np.ndarray | None = None
        if config.num_experts:
            chosen = (config.num_layers, config.experts_per_token)
            self._routing = np.full((pages, page_size, *chosen), -1, np.int16)
        self._arrived: list[int] = []  # pages that prefill has written since `_move_over`
        self._tiled = False  # a dispatch has read pages in tiles
        self._pending: tuple[list[Row], decode.Dispatch, float] | None = None
        self._rows: dict[int, Row] = {}
        self._next_id = 0
        self._began = time.perf_counter()

    # ------------------------------------------------------------------------------------- weights

    def swap(
        self,
        params: Any,
        *,
        version: int = 0,
        pages: Pages = "keep",
        expect: str | None = None,
        own: bool = False,
    ) -> str:
        """Serves other weights from the next dispatch on; the first call loads them.

        Args:
          params: the learner's tree, or the result of `decode.prepare_for_sampling`.
          version: stamped on every token that they sample.
          pages: what becomes of the keys and values of rows that have begun. "keep": they stay, and `kv_versions`
            of later tokens says how old they are. "recompute": they are computed again under the new weights.
            Nothing that the old weights computed is used for a row that begins later.
          expect: fingerprint that the tree must have; it is refused otherwise, and the old weights stay.
          own: copy what would be shared with the tree, so that it may be consumed while they are served.

        Returns:
          The fingerprint of the source tree (`snapshots.digest.fingerprint`); "" of prepared weights without `expect`.

        Raises:
          InputError: another model's tree, or another fingerprint than `expect`; the old weights stay.
        """
        weights, print_ = self.accept(params, version=version, pages=pages, expect=expect)
        if own and self._device is None:  # on another device they are copies
            weights = decode.owned(weights, params)
        self.commit(self.stage(weights, version=version, fingerprint=print_), pages=pages)
        return print_

    def accept(
        self, params: Any, *, version: int, pages: Pages, expect: str | None
    ) -> tuple[decode.SamplingWeights, str]:
        """What `swap` would serve and its fingerprint; changes nothing, and raises what `swap` raises."""
        if pages not in ("keep", "recompute"):
            raise InputError(f'sampler: pages must be "keep" or "recompute", got {pages!r}.')
        prepared = isinstance(params, decode.SamplingWeights)
        if not prepared:
            check_params(params, self.config)
        print_ = "" if prepared and expect is None else fingerprint(params)
        if expect is not None and print_ != expect:
            raise InputError(
                f"sampler: the weights of version {version} have the fingerprint {print_}, expected {expect}: they were "
                "damaged or mixed up on the way. The weights served so far stay; send them again."
            )
        weights = params if prepared else decode.prepare_for_sampling(params, self.config, self._precision[0])
        return weights, print_

    def stage(self, weights: decode.SamplingWeights, *, version: int, fingerprint: str) -> Staged:
        """Brings accepted weights to where the engine computes; what it serves is not changed.

        Raises:
          RuntimeError: a step has begun and not finished.
        """
        if self._pending is not None:
            raise RuntimeError("sampler: weights are swapped between steps, not between begin and finish.")
        here = jax.device_put(weights, self._device) if self._device else weights
        there = None if self._prefill_on is None else jax.device_put(weights, self._prefill_on)
        state = prefill_cache = None
        if self._weights is None:
            if self._mesh is None:
                self.config = on_mesh(self.config, _mesh_of(here))
            state = decode.init_state(
                self.config,
                self.stats.slots,
                self.stats.pages,
                self._page_size,
                self._width,
                kv=self._precision[1],
                path=attention_of(self.config, here, self._mesh, self._precision[1]).name,
            )
            home = home_of(self.config, here, self._mesh)
            if home is not None:
                state = dataclasses.replace(state, cache=place(state.cache, home))
            if self._prefill_on is not None:
                prefill_cache = jax.device_put(state.cache, self._prefill_on)
        return Staged(here, version, fingerprint, there, state, prefill_cache)

    def commit(self, staged: Staged, *, pages: Pages) -> None:
        """Serves staged weights from the next dispatch on; nothing can be refused any more."""
        self._weights, self._prefill_weights = staged.weights, staged.prefill_weights
        self._where = self._device or everywhere(self._weights)
        self.version, self.fingerprint = staged.version, staged.fingerprint or None
        if staged.state is not None:
            self._state, self._prefill_cache = staged.state, staged.prefill_cache
            return
        self.stats.swaps += 1
        if pages == "recompute":
            for row in self._rows.values():
                row.saved = None
            self._leave_slots(self._scheduler.preempt_all(running=True), save=False)
        else:
            # Rows whose prompt is not complete have computed nothing that is worth keeping.
            self._leave_slots(self._scheduler.preempt_all(running=False), save=False)
        self._scheduler.forget_pages()

    # ------------------------------------------------------------------------------------- requests

    def submit(
        self, prompt: Prompt | Any, sampling: SamplingParams, *, priority: int = 0, session: str | None = None
    ) -> list[int]:
        """Queues the completions of a prompt (`sampling.per_prompt`); one id each.

        Args:
          priority: higher ones are placed first.
          session: name of a conversation; `Replicas` keep it in one place, which it is in here anyway.

        Raises:
          InputError: parameters that do not fit the model, or a prompt that can never run; nothing is queued.
        """
        if not isinstance(sampling, SamplingParams):
            raise InputError(f"sampler: sampling must be SamplingParams, got {type(sampling).__name__}.")
        (prompt,) = as_prompts([prompt])
        self.check([prompt], sampling)
        return self._submit(prompt, sampling, priority)

    def _submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        priority: int = 0,
        indices: Sequence[int] | None = None,
    ) -> list[int]:
        tokens = np.asarray(prompt.tokens, np.int32)
        now = self._clock()
        ids = []
        for index in range(sampling.per_prompt) if indices is None else indices:
            row = Row(
                id=self._next_id,
                prompt_tokens=tokens,
                prefix=self._scheduler.prefix(tokens, sampling.prompt_logprobs, sampling.prompt_top_logprobs),
                limit=min(len(tokens) + sampling.max_tokens, self.max_context),
                key=row_key(sampling.seed, prompt.uid, index),
                priority=priority,
                request=Request(prompt, index, sampling, now),
            )
            self._scheduler.submit(row)
            self._rows[row.id] = row
            ids.append(row.id)
            self._next_id += 1
        return ids

    def unfinished(self) -> list[tuple[int, Carried]]:
        """Every request that has not ended, by id, the one that is served first in front. Call it between steps.

        Cheap: what they have sampled up to now is copied when it is asked for, also after further steps.
        """
        now = self._clock()
        carried = []
        for row in sorted(self._rows.values(), key=lambda row: row.rank):
            request = row.request
            known = (len(row.tokens), len(request.routing), request.prompt_scores)
            so_far = functools.partial(self._so_far, row, *known, request.started, request.first, now)
            carried.append((row.id, Carried(so_far, row.order >= 0, row.priority)))
        return carried

    def _so_far(self, row: Row, *then: Any) -> Completion:
        return completion_of(
            as_it_was(row, *then), StopReason.CANCELLED, self.config, self._rules, None, self._clock()
        )

    def begun_at(self) -> dict[int, int]:
        """The version of the oldest token of every request that has one and has not ended, by id."""
        return {id: min(row.request.versions) for id, row in self._rows.items() if row.request.versions}

    def resume(self, carried: Carried, sampling: SamplingParams) -> int:
        """Goes on with a request of another engine; its id here.

        Its keys and values are computed again, by prefill, under the weights served when it is placed. An engine
        that is given all that `unfinished` says, in that order and before anything else, serves them as that one
        would have after `swap(…, pages="recompute")`.

        Raises:
          InputError: it does not fit this engine.
        """
        done = carried.so_far
        self.check([done.prompt], sampling)
        (id,) = self._submit(done.prompt, sampling, carried.priority, indices=(done.index,))
        row = self._rows[id]
        self._scheduler.adopt(row, done.tokens.tolist(), begun=carried.begun)
        request = row.request
        request.adopt(done)
        if sampling.stop and row.tokens:
            rule = self._rules.take(sampling)
            for token in row.tokens:
                if rule.strings is not None:
                    rule.strings.push(request.text, token)
            self._rules.give_back(rule)
        return id

    def check(self, prompts: list[Prompt], sampling: SamplingParams) -> None:
        """Raises InputError unless all of the prompts can run; the message lists those that cannot."""
        self._rules.check(sampling)
        V = self.config.vocab_size
        empty, wrong, long, large = [], [], [], []
        for i, prompt in enumerate(prompts):
            tokens = np.asarray(prompt.tokens)
            if tokens.size == 0:
                empty.append(f"{i} ({prompt.uid})")
            elif tokens.min() < 0 or tokens.max() >= V:
                wrong.append(f"{i} ({prompt.uid}: id {tokens.max() if tokens.max() >= V else tokens.min()})")
            elif tokens.size >= self.max_context:
                long.append(f"{i} ({prompt.uid}: {tokens.size} tokens)")
            else:
                limit = min(tokens.size + sampling.max_tokens, self.max_context)
                need = self._scheduler.pages_needed(tokens.size, limit)
                if need > self._allocator.capacity:
                    large.append(f"{i} ({prompt.uid}: {need} pages)")
        if empty:
            raise InputError(f"sampler: prompts without a token: {', '.join(empty)}. Begin them with bos.")
        if wrong:
            raise InputError(
                f"sampler: prompts with ids outside the vocabulary [0, {V}): {', '.join(wrong)}."
            )
        if long:
            raise InputError(
                f"sampler: prompts that leave no room in the context of {self.max_context} tokens: "
                f"{', '.join(long)}. Shorten or skip them, or raise max_context."
            )
        if large:
            raise InputError(
                f"sampler: the cache has {self._allocator.capacity} usable pages of {self._page_size} tokens, "
                f"too few for these prompts with max_tokens={sampling.max_tokens}: {', '.join(large)}. "
                "Raise pages (or leave it out), or lower max_tokens."
            )

    def cancel(self, id: int) -> Completion | None:
        """Ends a request at once, wherever it is: the tokens so far, stop = CANCELLED. None: it has ended already."""
        row = self._rows.get(id)
        if row is None:
            return None
        slot = self._scheduler.cancel(row)
        if slot is not None and self._state is not None:
            self._state = decode.free_resource(self._state, slot)
        self.stats.cancelled += 1
        return self._end(row, StopReason.CANCELLED)

    @property
    def busy(self) -> bool:
        """True while a request is unfinished."""
        return self._scheduler.busy

    @property
    def queued(self) -> int:
        """Rows that wait for a slot or for pages."""
        return self._scheduler.queued

    @property
    def running(self) -> int:
        """Rows in slots, those whose prompt is being filled included."""
        return len(self._scheduler.placed)

    @property
    def pages(self) -> int:
        """Usable pages."""
        return self._allocator.capacity

    @property
    def free_pages(self) -> int:
        """Pages that hold nothing, or nothing that is needed: prefixes that can be given up."""
        needed = {page for row in self._scheduler.placed for page in row.pages}
        return self._allocator.capacity - len(needed)

    @property
    def lost_pages(self) -> int:
        """Pages that are held although no request is left, and that are no kept prompt's: 0, or a leak. 0 while busy."""
        return 0 if self.busy else self._allocator.used - len(self._scheduler.cache)

    def settle_reading(self) -> None:
        """Finds out now whether rows may read common pages together, and not when rows first have some, which then takes
        another program to compile. Weights must be there (`swap`)."""
        self._tiled = self._can_share()

    @property
    def filled_share(self) -> float:
        """Tokens of the rows in slots over the room in their pages; 1 less this is fragmentation."""
        rows = self._scheduler.running
        room = sum(len(row.pages) for row in rows) * self._page_size
        return (
            sum(min(row.position, len(row.pages) * self._page_size) for row in rows) / room if room else 0.0
        )

    def release(self) -> None:
        """Gives back the pages of everything that is kept for later prompts.

        Raises:
          RuntimeError: no request is left, and pages are still held.
        """
        self._scheduler.cache.clear()
        if not self.busy and self._allocator.used:
            raise RuntimeError(f"sampler: {self._allocator.used} pages were not given back.")

    # ------------------------------------------------------------------------------------- one step

    def step(self) -> list[Event]:
        """Places rows, fills prompts, and makes one dispatch; what it did, by request, in the order of ids.

        Raises:
          InputError: there are no weights yet.
        """
        self.begin()
        return self.finish()

    def begin(self) -> None:
        """The first half of `step`: everything up to launching the dispatch, which is not waited for."""
        if self._weights is None:
            raise InputError("sampler: no weights are served yet; call swap(params) first.")
        if not self._scheduler.busy:
            return
        self._move_over()  # before pages get other owners
        plan = self._scheduler.plan()
        stats = self.stats
        stats.peak_pages = max(stats.peak_pages, self._allocator.used)
        stats.prefix_hits += plan.hits
        stats.reused_tokens += plan.reused
        stats.evictions = self._scheduler.cache.evictions
        began = time.perf_counter()
        self._leave_slots(plan, save=self._preemption == "move")
        for row in plan.placed:
            if row.request.started is None:
                row.request.started = self._clock()
            if row.saved is not None:
                self._load(row)
        apart = self._prefill_on is not None
        if not apart:
            self._fill()
        started = self._start()
        if plan.placed or started:
            jax.block_until_ready(self._state.cache)
        stats.prefill_seconds += time.perf_counter() - began
        for row in plan.grown:
            if row.slot is not None and row.running:
                self._state.table[row.slot, : len(row.pages)] = row.pages
        if self._scheduler.running:
            self._pending = self._launch()
        if apart:
            self._fill()  # on its own devices, while the others decode

    def finish(self) -> list[Event]:
        """The second half of `step`: waits for the dispatch and takes what it sampled."""
        if self._pending is None:
            return []
        (running, dispatch, began), self._pending = self._pending, None
        self._state, result = decode.collect(self._state, dispatch)
        stats = self.stats
        stats.decode_seconds += time.perf_counter() - began
        stats.dispatches += 1
        stats.decode_steps += result.steps
        stats.slot_steps += result.steps * stats.slots
        stats.decoded_tokens += int(result.valid.sum())
        events = []
        for row in sorted(running, key=lambda row: row.id):
            before = len(row.tokens)
            if row.request.first is None:
                row.request.first = self._clock()
            reason = take(row, result, self.version, self.config.vocab_size)
            if reason is not None:
                if self._reuse_generated and reason is not StopReason.ERROR and self._current(row):
                    sequence = np.concatenate([row.prompt_tokens, np.array(row.tokens[:-1], np.int32)])
                    self._scheduler.keep(row, sequence)
                    if self._routing is not None:
                        self._write_routing(row.pages, 0, np.stack(row.request.routing))
                self._state = decode.free_resource(self._state, self._scheduler.finish(row))
            events.append(self._event(row, before, reason))
        return events

    def _clock(self) -> float:
        return time.perf_counter() - self._began

    def _leave_slots(self, plan: Plan, *, save: bool) -> None:
        for row, slot, pages in plan.preempted:
            self._let_go(row)
            self._state = decode.free_resource(self._state, slot)
            if pages:
                self.stats.preemptions += 1
                if save:
                    row.saved = self._store(pages[: pages_for(row.position, self._page_size)])

    def _let_go(self, row: Row) -> None:
        if row.request.rule is not None:
            self._rules.give_back(row.request.rule)
            row.request.rule = None

    def _fill(self) -> None:
        """Runs the prefill program over prompts and rows that are not in their pages yet."""
        R, C = self._prefill_shape
        calls = self._prefill_calls if self._scheduler.running and self._prefill_calls else None
        while calls is None or calls > 0:
            jobs = list(self._jobs())[:R]
            if not jobs:
                return
            self._prefill(jobs, C)
            calls = None if calls is None else calls - 1

    def _jobs(self) -> Iterator[tuple[np.ndarray, int, list[int], Any]]:
        """(tokens of the sequence, how many are done, its pages, whose they are) of what has to be computed next."""
        for prefix in self._scheduler.filling:
            yield prefix.tokens, prefix.filled, prefix.pages or [], prefix
        for row in self._scheduler.placed:
            if row.refill is not None and row.prefix.ready and row.refill < row.position:
                sequence = np.concatenate([row.prompt_tokens, np.array(row.tokens, np.int32)])
                yield sequence[: row.position], row.refill, row.pages, row

    def _prefill(self, jobs: list[tuple[np.ndarray, int, list[int], Any]], C: int) -> None:
        R = self._prefill_shape[0]
        tokens, targets = np.zeros((R, C), np.int32), np.zeros((R, C), np.int32)
        starts, lengths = np.zeros(R, np.int32), np.zeros(R, np.int32)
        table = np.full((R, self._width), NOBODY, np.int32)
        scored, wanted = False, 0
        for r, (sequence, done, pages, owner) in enumerate(jobs):
            piece = sequence[done : done + C]
            tokens[r, : len(piece)] = piece
            starts[r], lengths[r] = done, len(piece)
            table[r, : len(pages)] = pages
            if not isinstance(owner, Row) and owner.scored:
                scored, wanted = True, max(wanted, owner.top)
                following = owner.following[done : done + C]
                targets[r, : len(following)] = following
        self.stats.prefilled_tokens += int(lengths.sum())
        arguments = (tokens, starts, lengths, table, targets if scored else None)
        top = self._listed(wanted)
        if self._prefill_on is None:
            cache, scores, routing = decode.prefill(
                self._weights, self.config, self._state.cache, *self._put(arguments), top=top
            )
            self._state = dataclasses.replace(self._state, cache=cache)
        else:
            self._prefill_cache, scores, routing = decode.prefill(
                self._prefill_weights,
                self.config,
                self._prefill_cache,
                *jax.device_put(arguments, self._prefill_on),
                top=top,
            )
        found, routing = read((scores, routing))
        for r, (_, done, pages, owner) in enumerate(jobs):
            S = self._page_size
            if routing is not None:
                self._write_routing(pages, done, routing[r, : lengths[r]])
            if self._prefill_on is not None:
                self._arrived += pages[done // S : pages_for(done + int(lengths[r]), S)]
            if isinstance(owner, Row):
                owner.refill = int(starts[r] + lengths[r])
            else:
                if found is not None and owner.scored:
                    owner.scores.append(decode.TargetScores(*(x[r, : lengths[r]] for x in found)))
                self._scheduler.filled(owner, int(lengths[r]))

    def _write_routing(self, pages: list[int], start: int, ids: np.ndarray) -> None:
        """Notes the experts i16[C, layers, K] of the tokens start … of a sequence with these pages."""
        assert self._routing is not None
        places = start + np.arange(len(ids))
        self._routing[np.asarray(pages, int)[places // self._page_size], places % self._page_size] = ids

    def _read_routing(self, row: Row, start: int) -> np.ndarray:
        """The experts of the tokens start … of a row that starts: those of its prompt, which it has not met yet."""
        assert self._routing is not None
        ids = np.full((row.position - start, *self._routing.shape[2:]), -1, np.int16)
        pages = row.prefix.pages
        if pages is not None and not row.tokens:
            places = np.arange(start, row.position)
            ids[:] = self._routing[
                np.asarray(pages, int)[places // self._page_size], places % self._page_size
            ]
        return ids

    def _start(self) -> int:
        """Puts rows that have all that they continue from into their slots; says how many."""
        copies, ready = [], []
        for row in self._scheduler.placed:
            if row.running:
                continue
            loaded = row.saved is not None
            refilled = row.refill is not None and row.refill >= row.position
            if not (loaded or refilled or (row.refill is None and row.prefix.ready)):
                continue
            request = row.request
            if row.tokens:
                self.stats.resumptions += 1
            if not loaded:
                request.kv_version = self.version
            row.saved = None
            if request.sampling.prompt_logprobs and request.prompt_scores is None:
                request.prompt_scores = prompt_scores_of(row.prefix)
            if self._routing is not None and len(request.routing) < row.position:
                request.routing += list(self._read_routing(row, len(request.routing)))
            copy = self._scheduler.start(row)
            if copy is not None:
                copies.append(copy)
            ready.append(row)
        self._copy(copies)
        for row in ready:
            if row.slot is None:
                raise RuntimeError("sampler: a row that starts has no slot.")
            request = row.request
            request.rule = self._rules.take(request.sampling)
            self._state = decode.insert(
                self._state,
                row.slot,
                pages=row.pages,
                token=row.newest,
                position=row.position,
                limit=row.limit,
                floor=len(row.prompt_tokens) + request.sampling.min_tokens,
                key=row.key,
                sampling=row_sampling(request, self.config.vocab_size),
                rule=request.rule.index,
            )
        return len(ready)

    def _move_over(self) -> None:
        """Moves the pages that `prefill_on` has filled since the last time to where rows decode."""
        if self._prefill_on is None or not self._arrived:
            return
        pages = [page for page in dict.fromkeys(self._arrived) if self._allocator.references(page)]
        self._arrived = []
        W = self._width
        for i in range(0, len(pages), W):
            ids = np.full(W, NOBODY, np.int32)
            ids[: len(pages[i : i + W])] = pages[i : i + W]
            moved = decode.store_pages(self._prefill_cache, jax.device_put(ids, self._prefill_on))
            k, v, ids = jax.device_put((*moved, ids), jax.tree.leaves(self._state.cache)[0].sharding)
            self._state = dataclasses.replace(
                self._state, cache=decode.load_pages(self._state.cache, k, v, ids)
            )

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        size = self.stats.slots
        for i in range(0, len(copies), size):
            pairs = np.full((2, size), NOBODY, np.int32)
            pairs[:, : len(copies[i : i + size])] = np.array(copies[i : i + size]).T
            arguments = self._put((pairs[0], pairs[1]))
            self._state = dataclasses.replace(
                self._state, cache=decode.duplicate_pages(self._state.cache, *arguments)
            )

    def _store(self, pages: list[int]) -> Any:
        ids = np.full(self._width, NOBODY, np.int32)
        ids[: len(pages)] = pages
        stored = read(decode.store_pages(self._state.cache, self._put(ids)))
        return jax.tree.map(lambda x: x[:, : len(pages)].copy(), stored)

    def _load(self, row: Row) -> None:
        """Brings the pages of a preempted row back; those that it shares with its prompt are there."""
        shared = len(row.shared)
        used = jax.tree.leaves(row.saved)[0].shape[1] - shared
        ids = np.full(self._width, NOBODY, np.int32)
        ids[:used] = row.own[:used]

        def padded(x):
            filling = np.zeros((x.shape[0], self._width - used, *x.shape[2:]), x.dtype)
            return np.concatenate([x[:, shared:], filling], axis=1)

        k, v = jax.tree.map(padded, row.saved)
        arguments = self._put((k, v, ids))
        self._state = dataclasses.replace(self._state, cache=decode.load_pages(self._state.cache, *arguments))

    def _launch(self) -> tuple[list[Row], decode.Dispatch, float]:
        running = self._scheduler.running
        samplings = [row.request.sampling for row in running]
        wanted = max(s.top_logprobs for s in samplings)
        tables = self._rules.tables(
            self._put,
            floors=any(s.min_tokens for s in samplings),
            rules={row.request.rule.index for row in running},
        )
        tiles = self._tiles()
        began = time.perf_counter()
        dispatch = decode.launch(
            self._weights,
            self.config,
            self._state,
            tables=tables,
            tiles=tiles,
            steps=self._steps,
            least=len(running) if self._scheduler.queued else 1,
            truncate=any(s.truncated_support for s in samplings),
            raw=any(s.raw_logprobs for s in samplings),
            support=max(s.support_width(self.config.vocab_size) for s in samplings),
            top=self._listed(wanted),
            device=self._where,
        )
        return running, dispatch, began

    def _tiles(self) -> Tiles | None:
        """What the rows of the next dispatch read together, if that is faster and changes no bit."""
        state = self._state
        plan = plan_tiles(state.table, state.position, state.active, self._page_size)
        if plan is not None and self._can_share():
            self._tiled = True
            self.stats.shared_reads += 1
            return plan
        # A program without tiles would be another one to compile.
        return unused_tiles(state.slots, self._width) if self._tiled else None

    def _can_share(self) -> bool:
        cache = self._state.cache
        if not isinstance(cache, PagedCache) or len(cache.k.devices()) > 1:
            return False
        (device,) = cache.k.devices()
        return same_bits(self.config, self._state.slots, self._page_size, self._precision[1], device)

    def _listed(self, wanted: int) -> int:
        """Length of the lists of likeliest tokens that a program makes: one of a few, so that few are compiled."""
        return min(next((n for n in _TOP_SIZES if n >= wanted), wanted), self.config.vocab_size)

    def _put(self, tree: Any) -> Any:
        return place(tree, self._where)

    def _current(self, row: Row) -> bool:
        """Whether all K/V of a row are of the weights that are served now."""
        request = row.request
        return request.kv_version == self.version and all(v == self.version for v in request.versions)

    def _event(self, row: Row, before: int, reason: StopReason | None) -> Event:
        request = row.request
        listed = bool(request.sampling.top_logprobs)
        return Event(
            id=row.id,
            tokens=row.tokens[before:],
            logprobs=request.logprobs[before:],
            top_ids=request.top_ids[before:] if listed else None,
            top_logprobs=request.top_logprobs[before:] if listed else None,
            prompt_scores=None if before else request.prompt_scores,
            completion=None if reason is None else self._end(row, reason),
        )

    # ------------------------------------------------------------------------------------- results

    def _end(self, row: Row, stop: StopReason) -> Completion:
        request, stats = row.request, self.stats
        row.stop = stop
        request.ended = self._clock()
        del self._rows[row.id]
        stats.completions += 1
        stats.tokens += len(row.tokens)
        stats.prompt_tokens += len(row.prompt_tokens)
        completion = completion_of(row, stop, self.config, self._rules, self._tokenizer, self._clock())
        self._let_go(row)
        return completion


def _mesh_of(weights: Any) -> jax.sharding.Mesh | None:
    """The mesh that weights are spread over, if it has the axes that experts are split over."""
    spread = everywhere(weights)
    if spread is None or not isinstance(spread.mesh, jax.sharding.Mesh):
        return None
    return spread.mesh if {"expert", "tensor"} <= set(spread.mesh.axis_names) else None
