"""The sampler that rollouts use: an `Engine` for each call, from the first prompt to the last."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_llm import memory
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import dropless
from jaxrl_llm.ops.quantize import Precision
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.attention import AttentionPath, attention_of
from jaxrl_llm.sampler.base import Completion, SamplerStats, SamplingParams, as_prompts, is_integer
from jaxrl_llm.sampler.checks import check_options, check_params
from jaxrl_llm.sampler.engine import Engine
from jaxrl_llm.sampler.paged_cache import pages_for
from jaxrl_llm.sampler.replicas import Replicas
from jaxrl_llm.types import Prompt

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
        check_options(
            config,
            slots=slots,
            pages=pages,
            page_size=page_size,
            max_context=max_context,
            steps_per_dispatch=steps_per_dispatch,
            prefill_rows=prefill_rows,
            prefill_chunk=prefill_chunk,
            preemption=preemption,
            weights=weights,
            kv=kv,
        )
        self.config = dropless(config)
        self.stats = SamplerStats(slots=slots)
        self._pages = pages
        self._max_context = max_context or config.max_positions
        self._options = dict(
            slots=slots,
            page_size=page_size,
            max_context=max_context,
            tokenizer=tokenizer,
            steps_per_dispatch=steps_per_dispatch,
            prefill_rows=prefill_rows,
            prefill_chunk=prefill_chunk,
            preemption=preemption,
            weights=weights,
            kv=kv,
            mesh=mesh,
        )
        self._largest = (0, 0)  # table width and pages of any call so far
        self._check_memory(pages or 1)

    @property
    def options(self) -> Mapping[str, Any]:
        """The arguments that every engine of this sampler gets."""
        return self._options

    def attention(self, params: Any) -> AttentionPath:
        """What attends to the pages where these weights are, and why."""
        return attention_of(self.config, params, self._options["mesh"], self._options["kv"])

    def generate(
        self,
        params: Any,
        prompts: Sequence[Prompt | Sequence[int]],
        sampling: SamplingParams,
        *,
        version: int = 0,
        keep: int | None = None,
        on_progress: Callable[[SamplerStats], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts, the samples of a prompt consecutive, a greedy one last.

        Args:
          params: the learner's tree, or the result of `decode.prepare_for_sampling`, in whatever precision.
          prompts: prompts, or token lists (uid = hash of the tokens and occurrence in this call).
          version: stamped on every token.
          keep: over-generation: of the `sampling.n` samples of a prompt only so many are returned, the first to end
            (those that end in the same dispatch: by index), and the others are cancelled as soon as these have. It
            saves the wait for the longest answers and favours short ones: the samples returned are no longer drawn
            from the policy alone. None: all.
          on_progress: called with the statistics so far after every dispatch.

        Raises:
          InputError: a prompt is empty, has ids outside the vocabulary, or leaves no room for a token in
            the context or the cache; the message lists all such prompts.
        """
        began = time.perf_counter()
        if not isinstance(sampling, SamplingParams):
            raise InputError(f"sampler: sampling must be SamplingParams, got {type(sampling).__name__}.")
        if keep is not None and not (is_integer(keep) and 1 <= keep <= sampling.n):
            raise InputError(f"sampler: keep must be in [1, n={sampling.n}] or None, got {keep!r}.")
        prompts = as_prompts(prompts)
        engine = self._engine(prompts, sampling)
        engine.check(prompts, sampling)
        self.stats = stats = engine.stats
        if not prompts:
            return []
        weights = params
        if not isinstance(params, decode.SamplingWeights):
            check_params(params, self.config)
            weights = decode.prepare_for_sampling(params, self.config, self._options["weights"])
        stats.prepare_seconds = time.perf_counter() - began
        engine.swap(weights, version=version)
        groups = [engine.submit(prompt, sampling) for prompt in prompts]
        done: dict[int, Completion] = {}
        while engine.busy:
            ended = {event.id: event.completion for event in engine.step() if event.completion is not None}
            done |= ended
            if keep is not None and ended:
                for ids in groups:
                    self._cut(engine, ids[: sampling.n], done, keep)
            stats.seconds = time.perf_counter() - began
            if on_progress is not None:
                on_progress(stats)
        engine.release()
        return [done[id] for ids in groups for id in ids if id in done]

    def engine(self, rows: int, devices: Sequence[jax.Device] = ()) -> Engine | Replicas:
        """An engine that lives on, for prompts that are not known yet, without weights.

        Args:
          rows: most completions that are submitted to it at a time; it has pages enough for as many as there are
            slots for, each up to the whole context, unless the sampler was given a number of pages.
          devices: to compute on, each with all slots and a copy of the weights; none: where the weights are.
        """
        width = pages_for(self._max_context, self._options["page_size"])
        pages = self._pages or 1 + width * min(self._options["slots"], rows) + 2 * width
        self._check_memory(pages)
        options: dict[str, Any] = dict(pages=pages, table_width=width, **self._options)
        if len(devices) > 1:
            return Replicas(self.config, devices, **options)
        return Engine(self.config, device=devices[0] if devices else None, **options)

    @staticmethod
    def _cut(engine: Engine, ids: list[int], done: dict[int, Completion], keep: int) -> None:
        """Ends a group of which `keep` samples have ended."""
        ended = [id for id in ids if id in done]
        if len(ended) >= keep:
            for id in ids:
                engine.cancel(id)
            for id in ended[keep:]:
                del done[id]

    def _engine(self, prompts: list[Prompt], sampling: SamplingParams) -> Engine:
        """An engine with pages enough; never smaller than in an earlier call, so that calls share programs."""
        S, slots = self._options["page_size"], self._options["slots"]
        lengths = [max(1, np.size(prompt.tokens)) for prompt in prompts] or [1]
        limits = [min(length + sampling.max_tokens, self._max_context) for length in lengths]
        width = max(pages_for(_bucket(max(limits)), S), self._largest[0])
        pages = self._pages
        if pages is None:
            live = min(slots, len(prompts) * sampling.per_prompt)
            own = max(
                pages_for(limit, S) - (length - 1) // S for limit, length in zip(limits, lengths, strict=True)
            )
            ahead = self._options["prefill_rows"]
            groups = min(len(prompts), -(-live // sampling.per_prompt) + 1 + ahead)
            prefix = pages_for(max(lengths) - 1, S)
            step = max(16, slots)
            pages = -(-(1 + live * (own + 1) + groups * prefix) // step) * step
            pages = max(pages, self._largest[1])
        self._check_memory(pages)
        self._largest = (width, max(pages, self._largest[1]))
        return Engine(self.config, pages=pages, table_width=width, **self._options)

    def _check_memory(self, pages: int) -> None:
        """Raises InputError when the cache and the programs of this sampler cannot fit; nothing is allocated yet."""
        options = self._options
        memory.refuse_too_large(
            [
                memory.cache_parts(
                    self.config,
                    slots=options["slots"],
                    pages=pages,
                    page_size=options["page_size"],
                    steps_per_dispatch=options["steps_per_dispatch"],
                    prefill=(options["prefill_rows"], max(options["prefill_chunk"], options["page_size"])),
                    kv=options["kv"],
                    bounded_by="pages" if self._pages else "slots",
                )
            ]
        )


def _bucket(tokens: int) -> int:
    """Rounds up a context length, so that nearby lengths share a compiled program."""
    for limit, step in ((256, 64), (2048, 256)):
        if tokens <= limit:
            return -(-tokens // step) * step
    return -(-tokens // 1024) * 1024
