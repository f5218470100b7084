"""The sampler that rollouts use: continuous batching over the four verbs of `decode`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.params import ParamSpec, parameter_specs
from jaxrl_llm.ops.quantize import Precision
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.attention import AttentionPath, attention_path
from jaxrl_llm.sampler.base import Completion, SamplerStats, SamplingParams, as_prompts, is_integer
from jaxrl_llm.sampler.paged_cache import NOBODY, PageAllocator, pages_for
from jaxrl_llm.sampler.sampling import RowSampling, row_key
from jaxrl_llm.sampler.scheduler import Plan, Row, Scheduler, distinct_prefixes
from jaxrl_llm.sampler.stopping import StopStrings
from jaxrl_llm.types import Prompt, StopReason

__all__ = ["Sampler"]


class Sampler:
    """Samples completions of prompts; holds no weights and keeps no tokens or pages between calls.

    What is sampled depends on (seed, prompt uid, sample index, position) and on the weights. Slots,
    neighbours, the order of the queue, the size of the cache and preemption change nothing, bit for bit,
    as long as `slots` is the same; another number of slots may flip a near-tie.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int = 64,
        pages: int | None = None,
        page_size: int = 64,
        max_context: int | None = None,
        tokenizer: Any = None,
        steps_per_dispatch: int = 8,
        prefill_rows: int = 8,
        prefill_chunk: int = 32,
        preemption: str = "move",
        weights: Precision = "compute",
        kv: Precision = "compute",
        mesh: jax.sharding.Mesh | None = None,
    ):
        """
        Args:
          config: of the model whose weights will be passed to `generate`.
          slots: rows that are decoded together, at least 2.
          pages: pages of the cache, page 0 (never used) included; bounds the memory. None: as many as the
            requests of a call can need without preemption.
          page_size: tokens of a page.
          max_context: tokens of prompt and completion; None: `config.max_positions`.
          tokenizer: needed for stop strings and `Completion.text`; ids beyond its vocabulary (padding of
            the embedding) are then never sampled.
          steps_per_dispatch: most decode steps between two looks of the scheduler; while rows wait, it looks
            as soon as a row has ended.
          prefill_rows, prefill_chunk: shape of the prefill program, rows and tokens.
          preemption: "move" = pages of a preempted row go to host memory and come back, exact;
            "recompute" = they are computed again by prefill, which costs no host memory and may differ
            from decoding in the last bits.
          weights, kv: "int8" or "fp8" keep the weights of the layers, or the pages, in 8 bits. What is sampled from,
            and what log-probs are of, is then the rounded policy, which is not the learner's.
          mesh: devices to run on; the state is replicated over it. None: where the weights are.
        """
        if preemption not in ("move", "recompute"):
            raise InputError(f'sampler: preemption must be "move" or "recompute", got {preemption!r}.')
        for name, precision in (("weights", weights), ("kv", kv)):
            if precision not in get_args(Precision):
                allowed = ", ".join(get_args(Precision))
                raise InputError(f"sampler: {name} must be one of {allowed}, got {precision!r}.")
        for name, value, least in (
            ("slots", slots, 2),
            ("page_size", page_size, 1),
            ("steps_per_dispatch", steps_per_dispatch, 1),
            ("prefill_rows", prefill_rows, 1),
            ("prefill_chunk", prefill_chunk, 1),
            ("pages", 2 if pages is None else pages, 2),
        ):
            if not is_integer(value) or not least <= value < 2**31:
                raise InputError(f"sampler: {name} must be at least {least} (an integer), got {value!r}.")
        if max_context is not None and not (
            is_integer(max_context) and 2 <= max_context <= config.max_positions
        ):
            raise InputError(
                f"sampler: max_context must be in [2, {config.max_positions}] (the model's positions), "
                f"got {max_context!r}."
            )
        self.config = config
        self.stats = SamplerStats(slots=slots)
        self._slots = slots
        self._pages = pages
        self._page_size = page_size
        self._max_context = max_context or config.max_positions
        self._tokenizer = tokenizer
        self._steps = steps_per_dispatch
        self._prefill_shape = (prefill_rows, pages_for(prefill_chunk, page_size) * page_size)
        self._preemption = preemption
        self._precision: tuple[Precision, Precision] = (weights, kv)
        self._mesh = mesh
        self._largest = (0, 0)  # table width and pages of any call so far
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}

    def generate(
        self,
        params: Any,
        prompts: Sequence[Prompt | Sequence[int]],
        sampling: SamplingParams,
        *,
        version: int = 0,
        on_progress: Callable[[SamplerStats], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts, the samples of a prompt consecutive, a greedy one last.

        Args:
          params: the learner's tree, or the result of `decode.prepare_for_sampling`, in whatever precision.
          prompts: prompts, or token lists (uid = hash of the tokens and occurrence in this call).
          version: stamped on every token.
          on_progress: called with the statistics so far after every dispatch.

        Raises:
          InputError: a prompt is empty, has ids outside the vocabulary, or leaves no room for a token in
            the context or the cache; the message lists all such prompts.
        """
        began = time.perf_counter()
        if not isinstance(sampling, SamplingParams):
            raise InputError(f"sampler: sampling must be SamplingParams, got {type(sampling).__name__}.")
        prompts = as_prompts(prompts)
        self._check(prompts, sampling)
        self.stats = stats = SamplerStats(slots=self._slots)
        if not prompts:
            return []
        weights = params
        if not isinstance(params, decode.SamplingWeights):
            _check_params(params, self.config)
            weights = decode.prepare_for_sampling(params, self.config, self._precision[0])
        stats.prepare_seconds = time.perf_counter() - began
        run = _Run(self, weights, prompts, sampling, began)
        run.to_the_end(on_progress)
        return run.completions(version)

    def attention(self, params: Any) -> AttentionPath:
        """What attends to the pages where these weights are, and why."""
        return attention_path(self.config, *_platform(params, self._mesh), kv=self._precision[1])

    # ------------------------------------------------------------------------------------- internals

    def _check(self, prompts: list[Prompt], sampling: SamplingParams) -> None:
        V = self.config.vocab_size
        outside = [i for i in (sampling.stop_ids or ()) + sampling.suppress_ids if not 0 <= i < V]
        if outside:
            raise InputError(f"sampler: stop_ids and suppress_ids must be in [0, {V}), got {outside}.")
        if sampling.top_logprobs > V:
            raise InputError(
                f"sampler: top_logprobs={sampling.top_logprobs} is more than the {V} tokens of the vocabulary."
            )
        if sampling.stop and self._tokenizer is None:
            raise InputError(
                "sampler: stop strings need a tokenizer; pass tokenizer= to Sampler, or use stop_ids."
            )
        empty, wrong, long = [], [], []
        for i, prompt in enumerate(prompts):
            tokens = np.asarray(prompt.tokens)
            if tokens.size == 0:
                empty.append(f"{i} ({prompt.uid})")
            elif tokens.min() < 0 or tokens.max() >= V:
                wrong.append(f"{i} ({prompt.uid}: id {tokens.max() if tokens.max() >= V else tokens.min()})")
            elif tokens.size >= self._max_context:
                long.append(f"{i} ({prompt.uid}: {tokens.size} tokens)")
        if empty:
            raise InputError(f"sampler: prompts without a token: {', '.join(empty)}. Begin them with bos.")
        if wrong:
            raise InputError(
                f"sampler: prompts with ids outside the vocabulary [0, {V}): {', '.join(wrong)}."
            )
        if long:
            raise InputError(
                f"sampler: prompts that leave no room in the context of {self._max_context} tokens: "
                f"{', '.join(long)}. Shorten or skip them, or raise max_context."
            )

    def _stopping(self, stop: tuple[str, ...]) -> StopStrings | None:
        if stop and stop not in self._stop_strings:
            self._stop_strings[stop] = StopStrings(stop, self._tokenizer, self.config.vocab_size)
        return self._stop_strings.get(stop)


def _check_params(params: Any, config: ModelConfig) -> None:
    """Raises InputError unless a tree has every parameter of the config, in its shape; it may have more."""
    wrong = []
    specs = jax.tree_util.tree_flatten_with_path(
        parameter_specs(config), is_leaf=lambda x: isinstance(x, ParamSpec)
    )[0]
    for path, spec in specs:
        leaf = params
        for entry in path:
            leaf = leaf[entry.key] if isinstance(leaf, Mapping) and entry.key in leaf else None
        found = None if leaf is None else tuple(np.shape(leaf))
        if found != spec.shape:
            wrong.append(f"{jax.tree_util.keystr(path)} is {found or 'missing'}, expected {spec.shape}")
    if wrong:
        raise InputError(
            f"sampler: params do not fit the config of the sampler: {'; '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}. Pass the params of that model."
        )


def _bucket(tokens: int) -> int:
    """Rounds up a context length, so that nearby lengths share a compiled program."""
    for limit, step in ((256, 64), (2048, 256)):
        if tokens <= limit:
            return -(-tokens // step) * step
    return -(-tokens // 1024) * 1024


def _home(weights: decode.SamplingWeights, mesh: jax.sharding.Mesh | None) -> jax.sharding.Sharding | None:
    """Where the pages live: on every device of the mesh, else on the one device of the weights."""
    if mesh is not None:
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shardings = {leaf.sharding for leaf in jax.tree.leaves(weights) if isinstance(leaf, jax.Array)}
    # Committed there from the start, as the pages that a program returns are: it is compiled once.
    return shardings.pop() if len(shardings) == 1 else None


def _platform(weights: Any, mesh: jax.sharding.Mesh | None) -> tuple[str, int]:
    """Name and number of the devices that a program runs on."""
    devices = set() if mesh is None else set(mesh.devices.flat)
    if mesh is None:
        devices.update(*(x.devices() for x in jax.tree.leaves(weights) if isinstance(x, jax.Array)))
    return next((d.platform for d in devices), jax.default_backend()), max(1, len(devices))


class _Run:
    """One call of `generate`."""

    def __init__(
        self,
        sampler: Sampler,
        weights: decode.SamplingWeights,
        prompts: list[Prompt],
        sampling: SamplingParams,
        began: float,
    ):
        self._sampler, self._weights, self._sampling, self._began = sampler, weights, sampling, began
        self._prompts = prompts
        self._stats = sampler.stats
        self._config = config = sampler.config
        self._page_size = S = sampler._page_size
        self._stops = sampler._stopping(sampling.stop)

        V = config.vocab_size
        self._stop_ids = frozenset(config.eos_ids if sampling.stop_ids is None else sampling.stop_ids)
        self._stop_table = np.zeros(V, bool)
        self._stop_table[list(self._stop_ids)] = True
        self._halt = self._stop_table | (self._stops.complete if self._stops else False)
        suppressed = np.zeros(V, bool)
        suppressed[list(sampling.suppress_ids)] = True
        if sampler._tokenizer is not None:
            suppressed[sampler._tokenizer.vocab_size :] = True
        if suppressed.all() or (sampling.min_tokens and (suppressed | self._stop_table).all()):
            raise InputError(
                "sampler: suppress_ids (with stop ids before min_tokens) leave nothing to sample."
            )
        self._suppressed = suppressed if suppressed.any() or sampling.min_tokens else None
        self._row_sampling = RowSampling.uniform(
            1,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        self._greedy_row = RowSampling.uniform(1, temperature=0.0)

        tokens = [np.asarray(p.tokens, np.int32) for p in prompts]
        prefixes = distinct_prefixes(tokens)
        self._rows = [
            Row(
                prompt=i,
                index=j,
                prompt_tokens=tokens[i],
                prefix=prefixes[i],
                limit=min(len(tokens[i]) + sampling.max_tokens, sampler._max_context),
                key=row_key(sampling.seed, prompt.uid, j),
            )
            for i, prompt in enumerate(prompts)
            for j in range(sampling.per_prompt)
        ]

        # Never smaller than in an earlier call, so that calls share the compiled programs.
        self._width = max(pages_for(_bucket(max(row.limit for row in self._rows)), S), sampler._largest[0])
        pages = sampler._pages or max(self._enough_pages(), sampler._largest[1])
        sampler._largest = (self._width, pages)
        self._stats.pages = pages
        self._allocator = PageAllocator(pages)
        self._scheduler = Scheduler(
            slots=sampler._slots,
            allocator=self._allocator,
            page_size=S,
            steps=sampler._steps,
            prefill_rows=sampler._prefill_shape[0],
        )
        self._refuse_too_large()
        for row in self._rows:
            self._scheduler.submit(row)
        home = _home(weights, sampler._mesh)
        kv, path = sampler._precision[1], sampler.attention(weights)
        self._state = decode.init_state(config, sampler._slots, pages, S, self._width, kv=kv, path=path.name)
        if home is not None:
            self._state = dataclasses.replace(self._state, cache=jax.device_put(self._state.cache, home))

    def _enough_pages(self) -> int:
        """Pages with which nothing is ever preempted, rounded up to share compiled programs."""
        S, sampler = self._page_size, self._sampler
        live = min(sampler._slots, len(self._rows))
        own = max(pages_for(row.limit, S) - (len(row.prompt_tokens) - 1) // S for row in self._rows)
        ahead = sampler._prefill_shape[0]
        prompts = min(len(self._prompts), -(-live // self._sampling.per_prompt) + 1 + ahead)
        prefix = max(pages_for(len(row.prefix.tokens), S) for row in self._rows)
        step = max(16, sampler._slots)
        return -(-(1 + live * (own + 1) + prompts * prefix) // step) * step

    def _refuse_too_large(self) -> None:
        needs = {
            row.prompt: self._scheduler.pages_needed(len(row.prompt_tokens), row.limit) for row in self._rows
        }
        large = [
            f"{i} ({self._prompts[i].uid}: {need} pages)"
            for i, need in needs.items()
            if need > self._allocator.capacity
        ]
        if large:
            raise InputError(
                f"sampler: the cache has {self._allocator.capacity} usable pages of {self._page_size} tokens, "
                f"too few for these prompts with max_tokens={self._sampling.max_tokens}: {', '.join(large)}. "
                "Raise pages (or leave it out), or lower max_tokens."
            )

    # ------------------------------------------------------------------------------------- the loop

    def to_the_end(self, on_progress: Callable[[SamplerStats], None] | None) -> None:
        while self._scheduler.busy:
            self._carry_out(self._scheduler.plan())
            self._dispatch()
            self._stats.seconds = time.perf_counter() - self._began
            if on_progress is not None:
                on_progress(self._stats)
        if self._allocator.used:
            raise RuntimeError(f"sampler: {self._allocator.used} pages were not given back.")

    def _carry_out(self, plan: Plan) -> None:
        stats = self._stats
        stats.peak_pages = max(stats.peak_pages, self._allocator.used)
        stats.preemptions += len(plan.preempted)
        stats.resumptions += len(plan.resumed)
        stats.prefix_hits += plan.hits
        began = time.perf_counter()
        for row, slot, own in plan.preempted:
            self._state = decode.free_resource(self._state, slot)
            if self._sampler._preemption == "move":
                used = pages_for(row.position, self._page_size) - row.prefix.shared(self._page_size)
                row.saved = self._store(own[: max(0, used)])
        self._prefill([(prefix.tokens, 0, prefix.pages or []) for prefix in plan.prefilled])
        self._copy(plan.copied)
        again = []
        for row in plan.resumed:
            if row.saved is not None:
                self._load(row)
            else:
                start = row.prefix.shared(self._page_size) * self._page_size
                sequence = np.concatenate([row.prompt_tokens, np.array(row.tokens, np.int32)])
                again.append((sequence[start : row.position], start, self._pages_of(row)))
        self._prefill(again)
        if plan.prefilled or plan.copied or plan.resumed:
            jax.block_until_ready(self._state.cache)
        stats.prefill_seconds += time.perf_counter() - began
        for row in plan.admitted:
            self._insert(row)
        for row in plan.grown:
            if row.slot is not None:
                pages = self._pages_of(row)
                self._state.table[row.slot, : len(pages)] = pages

    def _pages_of(self, row: Row) -> list[int]:
        return (row.prefix.pages or [])[: row.prefix.shared(self._page_size)] + row.own

    def _insert(self, row: Row) -> None:
        if row.slot is None:
            raise RuntimeError("sampler: an admitted row has no slot.")
        if not row.preemptions:
            row.started = time.perf_counter() - self._began
        self._state = decode.insert(
            self._state,
            row.slot,
            pages=self._pages_of(row),
            token=row.newest,
            position=row.position,
            limit=row.limit,
            floor=len(row.prompt_tokens) + self._sampling.min_tokens,
            key=row.key,
            sampling=self._row_sampling if row.index < self._sampling.n else self._greedy_row,
        )

    def _prefill(self, fills: list[tuple[np.ndarray, int, list[int]]]) -> None:
        """Computes (tokens, start, pages of the whole sequence) in chunks, R sequences at a time."""
        R, C = self._sampler._prefill_shape
        queue = [(tokens, start, pages, 0) for tokens, start, pages in fills if len(tokens)]
        while queue:
            now, queue = queue[:R], queue[R:]
            tokens = np.zeros((R, C), np.int32)
            starts, lengths = np.zeros(R, np.int32), np.zeros(R, np.int32)
            table = np.full((R, self._width), NOBODY, np.int32)
            rest = []
            for r, (sequence, start, pages, done) in enumerate(now):
                piece = sequence[done : done + C]
                tokens[r, : len(piece)] = piece
                starts[r], lengths[r] = start + done, len(piece)
                table[r, : len(pages)] = pages
                if done + C < len(sequence):
                    rest.append((sequence, start, pages, done + C))
            queue = rest + queue
            self._stats.prefilled_tokens += int(lengths.sum())
            arguments = jax.device_put((tokens, starts, lengths, table))
            self._state = dataclasses.replace(
                self._state, cache=decode.prefill(self._weights, self._config, self._state.cache, *arguments)
            )

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        size = self._sampler._slots
        for i in range(0, len(copies), size):
            pairs = np.full((2, size), NOBODY, np.int32)
            pairs[:, : len(copies[i : i + size])] = np.array(copies[i : i + size]).T
            arguments = jax.device_put((pairs[0], pairs[1]))
            self._state = dataclasses.replace(
                self._state, cache=decode.duplicate_pages(self._state.cache, *arguments)
            )

    def _store(self, pages: list[int]) -> Any:
        ids = np.full(self._width, NOBODY, np.int32)
        ids[: len(pages)] = pages
        stored = jax.device_get(decode.store_pages(self._state.cache, jax.device_put(ids)))
        return jax.tree.map(lambda x: x[:, : len(pages)].copy(), stored)

    def _load(self, row: Row) -> None:
        used = jax.tree.leaves(row.saved)[0].shape[1]
        ids = np.full(self._width, NOBODY, np.int32)
        ids[:used] = row.own[:used]
        k, v = jax.tree.map(
            lambda x: np.concatenate(
                [x, np.zeros((x.shape[0], self._width - used, *x.shape[2:]), x.dtype)], axis=1
            ),
            row.saved,
        )
        row.saved = None
        arguments = jax.device_put((k, v, ids))
        self._state = dataclasses.replace(self._state, cache=decode.load_pages(self._state.cache, *arguments))

    def _dispatch(self) -> None:
        sampling, stats = self._sampling, self._stats
        began = time.perf_counter()
        self._state, result = decode.generate(
            self._weights,
            self._config,
            self._state,
            stop_ids=self._stop_table,
            halt=self._halt,
            suppressed=self._suppressed,
            steps=self._sampler._steps,
            least=len(self._scheduler.running) if self._scheduler.queued else 1,
            truncate=sampling.truncated_support,
            raw=sampling.raw_logprobs,
            top=sampling.top_logprobs,
        )
        now = time.perf_counter()
        stats.decode_seconds += now - began
        stats.dispatches += 1
        stats.decode_steps += int(result.steps)
        stats.decoded_tokens += int(result.valid.sum())
        for row in list(self._scheduler.running):
            reason = self._take(row, result)
            if reason is None:
                continue
            row.stop = reason
            row.ended = now - self._began
            self._state = decode.free_resource(self._state, self._scheduler.finish(row))
            stats.completions += 1
            stats.tokens += len(row.tokens)
            stats.prompt_tokens += len(row.prompt_tokens)

    def _take(self, row: Row, result: decode.ResultTokens) -> StopReason | None:
        """Appends the tokens of a dispatch to a row; says why it ended, if it did."""
        for t in range(int(result.steps)):
            if not result.valid[t, row.slot]:
                raise RuntimeError("sampler: a row ended on the device for no reason that the host knows.")
            token, logprob = int(result.tokens[t, row.slot]), float(result.logprobs[t, row.slot])
            if not np.isfinite(logprob):
                return StopReason.ERROR
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if result.raw_logprobs is not None:
                row.raw_logprobs.append(float(result.raw_logprobs[t, row.slot]))
            if result.top_ids is not None:
                row.top_ids.append(result.top_ids[t, row.slot])
                row.top_logprobs.append(result.top_logprobs[t, row.slot])
            found = self._stops is not None and self._stops.push(row.text, token)
            if len(row.tokens) > self._sampling.min_tokens:
                if token in self._stop_ids:
                    return StopReason.EOS
                if found:
                    return StopReason.STOP_STRING
            if len(row.prompt_tokens) + len(row.tokens) >= row.limit:
                return StopReason.LENGTH
        return None

    # ------------------------------------------------------------------------------------- results

    def completions(self, version: int) -> list[Completion]:
        return [self._completion(row, version) for row in self._rows]

    def _completion(self, row: Row, version: int) -> Completion:
        if row.stop is None:
            raise RuntimeError("sampler: a completion was asked for before its row ended.")
        stop, N = row.stop, len(row.tokens)
        tokenizer, text = self._sampler._tokenizer, None
        if tokenizer is not None:
            text = tokenizer.decode(row.tokens)
            if stop is StopReason.STOP_STRING and self._stops is not None:
                text = self._stops.cut(text, tokenizer.decode(row.tokens[:-1]))
        K = self._sampling.top_logprobs
        return Completion(
            prompt=self._prompts[row.prompt],
            index=row.index,
            tokens=np.array(row.tokens, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            stop=stop,
            versions=np.full(N, version, np.int32),
            kv_versions=np.full(N, version, np.int32),
            raw_logprobs=np.array(row.raw_logprobs, np.float32) if self._sampling.raw_logprobs else None,
            top_ids=np.array(row.top_ids, np.int32).reshape(N, K) if K else None,
            top_logprobs=np.array(row.top_logprobs, np.float32).reshape(N, K) if K else None,
            text=text,
            timings={"queued": row.started, "sampled": row.ended - row.started},
        )
