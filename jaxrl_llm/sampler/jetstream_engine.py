"""An engine with JetStream's contract over our programs; `jetstream` makes it a real subclass of JetStream's class.

Two threads of the orchestrator call it: one calls `prefill`, the other `insert` and `generate`. JetStream hands no
decode state to `prefill`, and here both work on the same pages, so the state lives in the engine, behind a
lock that the two take in turn (a long prompt is computed in chunks, with decode steps between them); what
`init_decode_state` returns only stands for it.

An orchestrator thread that meets an exception kills its process. A request that cannot be answered (an empty prompt, one
that leaves no room, ids outside the vocabulary) is therefore *refused*: it is logged, and its slot ends at once without a
token. Misuse of the engine by a program raises.

Two contracts exist. In 0.2.2 `prefill` gives back a prefix and the first `generate` its first token. In 0.3.0
`prefill` samples the first token as well. Both call `insert`; only 0.3.0 calls `free_resource`, so `insert` frees what
its slot held before. Rows that end by themselves are freed in `generate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.experts import dropless
from jaxrl_llm.sampler import decode
from jaxrl_llm.sampler.base import SamplingParams, is_integer
from jaxrl_llm.sampler.paged_cache import NOBODY, PageAllocator, pages_for
from jaxrl_llm.sampler.prefix_cache import PrefixCache, page_names
from jaxrl_llm.sampler.rules import Tables
from jaxrl_llm.sampler.sampling import RowSampling, row_key

__all__ = ["BOS_MARK", "Contract", "PagedEngine", "ParamsBox", "Prefix", "Request", "ticket_mark"]

_LOG = logging.getLogger(__name__)

# JetStream 0.2.2 puts the tokenizer's bos id in front of every prompt, also of token ids. Ours is a mark that `prefill`
# takes away: whether a prompt begins with BOS is for whoever wrote it to say.
BOS_MARK = -1

# Prompts that the orchestrator may have prefilled and not inserted: one in each of the prefill thread, the transfer queue,
# the transfer thread and the generate queue.
_AHEAD = 4

# The lengths to which JetStream pads prompts.
_BUCKETS = tuple(2**i for i in range(4, 16))


def ticket_mark(number: int) -> int:
    """The id before a prompt that names its `Request` (`PagedEngine.announce`)."""
    return -2 - number


class Served(NamedTuple):
    """Weights that are being served."""

    weights: decode.SamplingWeights
    version: int
    swaps: int  # which weights of this box: what their pages are known by, even if somebody reuses a version


class ParamsBox:
    """Weights that can be exchanged while they serve.

    The orchestrator reads its params once and passes that object to every call; passing a box makes each call read the
    weights of the moment. It is opaque to JAX.
    """

    def __init__(self, params: Any, config: ModelConfig, version: int = 0):
        self._config = config
        self.current = Served(self._prepared(params), _version(version), 0)

    def _prepared(self, params: Any) -> decode.SamplingWeights:
        if isinstance(params, decode.SamplingWeights):
            return params
        try:
            return decode.prepare_for_sampling(params, self._config)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"params box: params are not the parameters of a model ({error!r}). Give model.params."
            ) from error

    @property
    def version(self) -> int:
        """Of the weights that the next call computes with."""
        return self.current.version

    def swap(self, params: Any, version: int) -> None:
        """Exchanges the weights; calls that have begun end with the old ones. From any thread.

        The new ones are moved to where the old ones are. In the compute dtype they are kept, not copied: a learner must
        not donate them while they serve.

        Raises:
          InputError: they are of another model, or the version is no integer.
        """
        weights, old = self._prepared(params), self.current
        kinds = [jax.tree.map(lambda x: (x.shape, x.dtype), tree) for tree in (old.weights, weights)]
        if kinds[0] != kinds[1]:
            raise InputError(
                "params box: the new params have other parameters, shapes or dtypes than those that are served. Give params "
                "of the same model."
            )
        weights = jax.tree.map(lambda new, was: jax.device_put(new, was.sharding), weights, old.weights)
        self.current = Served(weights, _version(version), old.swaps + 1)


def _version(value: Any) -> int:
    if not is_integer(value):
        raise InputError(f"params box: version must be an integer (train steps done), got {value!r}.")
    return int(value)


@dataclasses.dataclass(eq=False)
class Request:
    """What the orchestrator does not tell its engine about a request."""

    max_tokens: int
    cancelled: bool = False  # may be set by any thread; the row then ends at the next step


@dataclasses.dataclass(eq=False)
class Prefix:
    """A prompt whose keys and values are in the pages. To JAX it is a tree without arrays: nothing can delete it."""

    tokens: np.ndarray  # i32[P], the prompt
    pages: list[int] | None  # with `filled` tokens; None: refused, or already inserted
    filled: int
    served: Served
    request: Request | None
    first: list[tuple[int, float]]  # (token, log-prob) of each sample, where prefill samples the first token
    keys: list[np.ndarray]  # u32[2] of each sample


jax.tree_util.register_pytree_node(Prefix, lambda prefix: ((), prefix), lambda prefix, _: prefix)


@dataclasses.dataclass(eq=False)
class _Row:
    tokens: list[int]  # prompt and sampled ones
    prompt: int  # tokens of the prompt
    pages: list[int]
    swaps: int  # of the weights that wrote its keys and values
    kv_version: int  # the oldest of their versions
    request: Request | None


@dataclasses.dataclass(frozen=True, eq=False)
class PagedState:
    """Stands for the state of an engine, which holds it."""

    engine: PagedEngine = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Contract:
    """What differs between the versions of JetStream."""

    # (data i32[B, 3] of (token, valid, length), log-probs f32[B, 1], versions i32[B, 1], kv versions i32[B, 1])
    results: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Any]
    first_at_prefill: bool  # `prefill` samples the first token (0.3.0)


class PagedEngine:
    """Continuous batching on pages, with the methods and properties of JetStream's `Engine` 0.2.2 and 0.3.0.

    Prompts that begin alike share their full pages, as long as the same weights serve. Pages are ample for all slots at
    `max_context`, so no row ever waits for one.
    """

    def __init__(
        self,
        config: ModelConfig,
        box: ParamsBox,
        *,
        contract: Contract,
        slots: int = 8,
        page_size: int = 64,
        max_context: int | None = None,
        prefill_chunk: int = 64,
        sampling: SamplingParams | None = None,
        known_ids: int | None = None,
        on_swap: Literal["keep", "recompute"] = "keep",
    ):
        """
        Args:
          box: the weights that `load_params` gives out.
          slots: requests that are decoded together, at least 2.
          max_context: tokens of prompt and completion; None: `config.max_positions`.
          prefill_chunk: tokens of a prompt that are computed between two decode steps, rounded up to whole pages.
          sampling: how every request is sampled (the protocol of JetStream carries none of it); None: greedy. Its
            `max_tokens` is the most that a request may ask for.
          known_ids: ids from here on are never sampled (padding of the embedding).
          on_swap: "keep" = rows go on with the keys and values of the old weights (`kv_version` says so); "recompute" =
            those of every live row are computed again with the new ones.
        """
        for name, value, least in (
            ("slots", slots, 2),
            ("page_size", page_size, 1),
            ("prefill_chunk", prefill_chunk, 1),
        ):
            if not is_integer(value) or not least <= value < 2**31:
                raise InputError(
                    f"jetstream engine: {name} must be at least {least} (an integer), got {value!r}."
                )
        most = config.max_positions
        if max_context is not None and not (is_integer(max_context) and 2 <= max_context <= most):
            raise InputError(
                f"jetstream engine: max_context must be in [2, {most}] (the model's positions), got {max_context!r}."
            )
        if on_swap not in ("keep", "recompute"):
            raise InputError(f'jetstream engine: on_swap must be "keep" or "recompute", got {on_swap!r}.')
        self.config = dropless(config)
        self.box = box
        self._contract = contract
        self._slots, self._page_size = int(slots), int(page_size)
        self._max_context = int(max_context or most)
        self._chunk = pages_for(prefill_chunk, page_size) * page_size
        self._on_swap = on_swap
        self._sampling = sampling = sampling or SamplingParams(max_tokens=self._max_context, temperature=0.0)
        self._stop_table, suppressed = self._tables(sampling, known_ids)
        self._rules = Tables(
            stop=self._stop_table[None],
            halt=self._stop_table[None],
            suppressed=None if suppressed is None else suppressed[None],
        )
        self._row_sampling = RowSampling.uniform(
            1,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        self._width = pages_for(self._max_context, page_size)
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._requests: dict[int, Request] = {}
        self._numbers, self._prompts = itertools.count(), itertools.count()
        self._handle = PagedState(self)
        self.reset()

    def _tables(
        self, sampling: SamplingParams, known_ids: int | None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(stop ids bool[V], ids that are never sampled bool[V] or None)."""
        if (
            sampling.n != 1
            or sampling.greedy_too
            or sampling.stop
            or sampling.top_logprobs
            or sampling.raw_logprobs
            or sampling.record_support
            or sampling.logit_bias
            or sampling.prompt_logprobs
        ):
            raise InputError(
                "jetstream engine: sampling takes temperature, top_k, top_p, min_p, stop_ids, min_tokens, suppress_ids, seed "
                "and max_tokens; leave n, greedy_too, stop, logit_bias and what asks for more log-probs at their defaults."
            )
        V = self.config.vocab_size
        self.stop_ids = frozenset(self.config.eos_ids if sampling.stop_ids is None else sampling.stop_ids)
        outside = sorted(i for i in (*self.stop_ids, *sampling.suppress_ids) if not 0 <= i < V)
        if outside:
            raise InputError(
                f"jetstream engine: stop_ids and suppress_ids must be in [0, {V}), got {outside}."
            )
        stops, suppressed = np.zeros(V, bool), np.zeros(V, bool)
        stops[list(self.stop_ids)] = True
        suppressed[list(sampling.suppress_ids)] = True
        suppressed[V if known_ids is None else known_ids :] = True
        if (suppressed | (stops if sampling.min_tokens else False)).all():
            raise InputError(
                "jetstream engine: suppress_ids (with stop ids before min_tokens) leave nothing to sample."
            )
        return stops, suppressed if suppressed.any() or sampling.min_tokens else None

    def reset(self) -> None:
        """Empties all slots and pages. For when no orchestrator uses the engine."""
        pages = 1 + (self._slots + _AHEAD) * self._width
        state = decode.init_state(self.config, self._slots, pages, self._page_size, self._width)
        homes = {leaf.sharding for leaf in jax.tree.leaves(self.box.current.weights)}
        if len(homes) == 1:  # committed from the start, as what the programs return: they are compiled once
            state = dataclasses.replace(state, cache=jax.device_put(state.cache, homes.pop()))
        self._state = state
        self._allocator = PageAllocator(pages)
        self._prefixes = PrefixCache(self._allocator)
        self._prefixes_swaps = self.box.current.swaps  # the weights that computed them
        self._rows: list[_Row | None] = [None] * self._slots
        self._occupied, self._freed = [0] * self._slots, [0] * self._slots

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """The state for one thread. Whoever waits is next: a thread that comes back queues behind it."""
        with self._turn:
            self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    # ------------------------------------------------------------------------------ JetStream's verbs

    def load_params(self, *args: Any, **kwargs: Any) -> ParamsBox:
        """The box with the weights; `box.swap` exchanges them."""
        return self.box

    def init_decode_state(self, *args: Any, **kwargs: Any) -> PagedState:
        """What stands for the state; the same at each call, so that a thread that begins again loses nothing."""
        return self._handle

    def prefill(
        self,
        *,
        params: ParamsBox,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: Any = None,
        rng: Any = None,
        request_id: Any = None,
    ) -> Any:
        """Computes the keys and values of a prompt, except of pages that an earlier one has left.

        Args:
          params: what `load_params` gave.
          padded_tokens: i32[N], a prompt with the marks of this module before and padding behind it.
          true_length: tokens without padding; more than N says that JetStream has cut the prompt, which is then refused.
          rng, request_id: accepted and not read: sampling depends on the seed and on the number of the prompt.

        Returns:
          A `Prefix`; under 0.3.0 (Prefix, result of the first token).
        """
        if existing_prefix is not None or sampler is not None:
            raise InputError(
                "jetstream engine: existing_prefix and sampler must be None; prefixes are shared by themselves, and "
                "sampling is set when the engine is made."
            )
        prefix = self._filled(params, padded_tokens, true_length, 1)
        return (prefix, self._first_results(prefix, 1)) if self._contract.first_at_prefill else prefix

    def prefill_multisampling(
        self,
        *,
        params: ParamsBox,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: Any = None,
        rng: Any = None,
        num_samples: int = 1,
    ) -> tuple[Prefix, Any]:
        """`prefill` under 0.3.0 for several samples of one prompt, to be given to `bulk_insert`."""
        if existing_prefix is not None or sampler is not None or not self._contract.first_at_prefill:
            raise InputError(
                "jetstream engine: prefill_multisampling belongs to JetStream 0.3.0, and existing_prefix and sampler must be "
                "None."
            )
        num_samples = max(1, min(int(num_samples), self._slots))
        prefix = self._filled(params, padded_tokens, true_length, num_samples)
        return prefix, self._first_results(prefix, num_samples)

    def insert(self, prefix: Any, decode_state: PagedState, slot: int, request_id: Any = None) -> PagedState:
        """Puts a prompt into a slot; frees what the slot held before."""
        return self.bulk_insert(prefix, decode_state, [slot])

    def bulk_insert(self, prefix: Any, decode_state: PagedState, slots: Sequence[int]) -> PagedState:
        """Puts the samples of one prompt into as many slots: full pages are shared, the last one is copied."""
        if isinstance(prefix, tuple):  # what `prefill` gave, with the first token
            prefix = prefix[0]
        self._mine(decode_state)
        with self._exclusive():
            for slot in slots:
                self._vacate(slot)
                self._occupied[slot] += 1
            if prefix.pages is None:
                return decode_state  # refused: the slots stay empty, and `generate` says that they have ended
            pages, prefix.pages = prefix.pages, None
            shared = prefix.filled // self._page_size
            for sample, slot in enumerate(slots):
                own = pages
                if sample:
                    self._allocator.retain(pages[:shared])
                    own = pages[:shared] + self._copies(pages[shared:])
                self._put(prefix, sample, slot, own)
        return decode_state

    def generate(
        self, params: ParamsBox, decode_state: PagedState, sampler: Any = None, rng: Any = None
    ) -> tuple[PagedState, Any]:
        """One token of every live row, with the weights of the moment; rows that end are freed."""
        if sampler is not None:
            raise InputError(
                "jetstream engine: sampler must be None; sampling is set when the engine is made."
            )
        self._mine(decode_state)
        data = np.zeros((self._slots, 3), np.int32)
        logprobs = np.zeros((self._slots, 1), np.float32)
        versions, kv_versions = (np.full((self._slots, 1), -1, np.int32) for _ in range(2))
        with self._exclusive():
            served = params.current
            self._notice(served)
            for slot, row in enumerate(self._rows):
                if row is not None and row.request is not None and row.request.cancelled:
                    self._vacate(slot)
            live = [(slot, row) for slot, row in enumerate(self._rows) if row is not None]
            for slot, row in live:
                if self._on_swap == "recompute" and row.swaps != served.swaps:
                    self._compute(served, np.array(row.tokens[:-1], np.int32), 0, row.pages)
                    row.swaps, row.kv_version = served.swaps, served.version
                if len(row.pages) * self._page_size < len(row.tokens):
                    row.pages += self._allocate(1)
                    self._state.table[slot, len(row.pages) - 1] = row.pages[-1]
            if live:
                result = self._step(served.weights)
            for slot, row in live:
                logprob = float(result.logprobs[0, slot])
                if not np.isfinite(logprob):
                    _LOG.error("jetstream engine: a row ended because its log-prob is %s.", logprob)
                    self._vacate(slot)
                    continue
                row.tokens.append(int(result.tokens[0, slot]))
                data[slot] = row.tokens[-1], 1, len(row.tokens) - row.prompt
                logprobs[slot], versions[slot], kv_versions[slot] = logprob, served.version, row.kv_version
                if not self._state.active[slot]:
                    self._vacate(slot)
        return decode_state, self._contract.results(data, logprobs, versions, kv_versions)

    def free_resource(self, slot: int) -> None:
        """Frees a slot.

        The orchestrator of 0.3.0 calls it once for each prompt that it has inserted, after it has given the slot out
        again: by then the slot may hold the next prompt, which must stay. 0.2.2 never calls it.
        """
        with self._exclusive():
            self._freed[slot] += 1
            if not self._contract.first_at_prefill or self._freed[slot] == self._occupied[slot]:
                self._vacate(slot)

    def get_prefix_destination_sharding(self) -> None:
        """None: prompts are computed where they are decoded (interleaved mode)."""
        return None

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots."""
        return self._slots

    @property
    def samples_per_slot(self) -> int:
        """1."""
        return 1

    @property
    def max_prefill_length(self) -> int:
        """To so many tokens JetStream cuts prompts: one of its lengths, with room for two marks."""
        return next((length for length in _BUCKETS if length > self._max_context), _BUCKETS[-1])

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have."""
        return min(self._max_context - 1, self.max_prefill_length - 2)

    @property
    def use_chunked_prefill(self) -> bool:
        """False: `prefill` takes whole prompts and chunks them by itself."""
        return False

    @property
    def prefill_chunk_size(self) -> int:
        """Tokens that `prefill` computes between two decode steps."""
        return self._chunk

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the weights."""
        devices = {d for leaf in jax.tree.leaves(self.box.current.weights) for d in leaf.sharding.device_set}
        return jax.sharding.Mesh(np.array(sorted(devices, key=lambda d: d.id)), ("device",))

    @property
    def colocated_cpus(self) -> None:
        """None."""
        return None

    # ------------------------------------------------------------------------------ beyond JetStream

    def announce(self, request: Request) -> int:
        """Registers a request; the mark that this returns goes in front of its prompt."""
        number = next(self._numbers)
        self._requests[number] = request
        return ticket_mark(number)

    def problem(self, tokens: Sequence[int] | np.ndarray) -> str | None:
        """Why a prompt has to be refused, or None."""
        if not len(tokens):
            return "the prompt has no token. Begin it with bos."
        ids, V = np.asarray(tokens), self.config.vocab_size
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= V:
            return f"the prompt has the id {low if low < 0 else high}, outside the vocabulary [0, {V})."
        if len(tokens) > self.longest_prompt:
            return (
                f"the prompt has {len(tokens)} tokens; {self.longest_prompt} leave room for an answer in a context of "
                f"{self._max_context}."
            )
        return None

    def release(self, prefix: Prefix) -> None:
        """Gives back the pages of a prefix that will not be inserted."""
        with self._exclusive():
            if prefix.pages is not None:
                self._allocator.release(prefix.pages)
                prefix.pages = None

    def forget_prefixes(self) -> None:
        """Gives back the pages that are kept for prompts to come."""
        with self._exclusive():
            self._prefixes.clear()

    @property
    def pages_used(self) -> int:
        """Pages that slots, prefixes that are not inserted, and prompts to come hold."""
        return self._allocator.used

    @property
    def pages_kept(self) -> int:
        """Pages that are kept for prompts to come; given away when a row needs one."""
        return len(self._prefixes)

    def warm_up(self) -> None:
        """Compiles the programs, so that the first request does not wait for it."""
        tokens = np.zeros(2, np.int32)
        prefix = self.prefill(params=self.box, padded_tokens=tokens, true_length=2)
        state = self.insert(prefix, self.init_decode_state(), 0)
        self.generate(self.box, state)
        self.free_resource(0)

    # ------------------------------------------------------------------------------ internals

    def _mine(self, decode_state: PagedState) -> None:
        if decode_state is not self._handle:
            raise InputError(
                "jetstream engine: decode_state must be what init_decode_state of this engine gave."
            )

    def _filled(self, params: ParamsBox, padded_tokens: Any, true_length: int, samples: int) -> Prefix:
        """The prefix of a prompt, with the first tokens where prefill samples them; refused if it must be."""
        if not isinstance(params, ParamsBox):
            raise InputError(
                f"jetstream engine: params must be the ParamsBox of load_params, got {type(params).__name__}."
            )
        served = params.current
        tokens, request, problem = self._prompt(padded_tokens, int(true_length))
        sampling, number = self._sampling, next(self._prompts)
        prefix = Prefix(
            tokens=tokens,
            pages=None,
            filled=len(tokens) - 1,
            served=served,
            request=request,
            first=[],
            keys=[row_key(sampling.seed, f"jetstream-{number}", i) for i in range(samples)],
        )
        if problem is not None:
            _LOG.warning("jetstream engine: a request is refused: %s", problem)
            return prefix
        if request is not None and request.cancelled:
            return prefix
        S, names = self._page_size, page_names(tokens[: prefix.filled], self._page_size)
        with self._exclusive():
            self._notice(served)
            current = served.swaps == self._prefixes_swaps
            found = self._prefixes.find(names if current else [], multiple=self._chunk // S)
            self._allocator.retain(found)
            covered = prefix.filled + self._contract.first_at_prefill
            pages = found + self._allocate(pages_for(covered, S) - len(found))
        for start in range(len(found) * S, prefix.filled, self._chunk):
            with self._exclusive():
                self._compute_chunk(
                    served, tokens[start : min(start + self._chunk, prefix.filled)], start, pages
                )
        with self._exclusive():
            if served.swaps == self._prefixes_swaps:
                self._prefixes.add(names, pages[: len(names)])
            prefix.pages = pages
            if self._contract.first_at_prefill:
                self._sample_first(prefix, samples)
        return prefix

    def _prompt(self, padded: Any, length: int) -> tuple[np.ndarray, Request | None, str | None]:
        """(prompt without marks and padding, its request, why it is refused)."""
        tokens = np.asarray(padded).reshape(-1)
        cut = length > len(tokens)
        tokens = tokens[:length].astype(np.int32)
        if len(tokens) and tokens[0] == BOS_MARK:
            tokens = tokens[1:]
        request = None
        if len(tokens) and tokens[0] < BOS_MARK:
            request = self._requests.pop(ticket_mark(int(tokens[0])), None)
            tokens = tokens[1:]
        if cut:
            return tokens, request, f"the prompt has more than {self.longest_prompt} tokens."
        return tokens, request, self.problem(tokens)

    def _notice(self, served: Served) -> None:
        """Pages of other weights are not reused."""
        if served.swaps > self._prefixes_swaps:
            self._prefixes.clear()
            self._prefixes_swaps = served.swaps

    def _allocate(self, count: int) -> list[int]:
        self._prefixes.evict(count - self._allocator.free)
        if self._allocator.free < count:
            raise RuntimeError(
                f"jetstream engine: no page is free; more than {_AHEAD} prefixes wait to be inserted. Insert or release them."
            )
        return self._allocator.allocate(count)

    def _copies(self, pages: list[int]) -> list[int]:
        """New pages with the content of others."""
        new = self._allocate(len(pages))
        if pages:
            arguments = jax.device_put((np.array(pages, np.int32), np.array(new, np.int32)))
            cache = decode.duplicate_pages(self._state.cache, *arguments)
            self._state = dataclasses.replace(self._state, cache=cache)
        return new

    def _compute(self, served: Served, tokens: np.ndarray, start: int, pages: list[int]) -> None:
        for begin in range(start, len(tokens), self._chunk):
            self._compute_chunk(served, tokens[begin : begin + self._chunk], begin, pages)

    def _compute_chunk(self, served: Served, tokens: np.ndarray, start: int, pages: list[int]) -> None:
        """Writes the keys and values of a chunk that begins at token `start` to its pages."""
        chunk = np.zeros((1, self._chunk), np.int32)
        chunk[0, : len(tokens)] = tokens
        table = np.full((1, self._width), NOBODY, np.int32)
        table[0, : len(pages)] = pages
        arguments = jax.device_put(
            (chunk, np.array([start], np.int32), np.array([len(tokens)], np.int32), table)
        )
        cache, *_ = decode.prefill(served.weights, self.config, self._state.cache, *arguments)
        self._state = dataclasses.replace(self._state, cache=cache)

    def _limits(self, prefix: Prefix) -> tuple[int, int]:
        """(tokens at which a row ends, tokens below which stop ids are suppressed)."""
        sampling, asked = self._sampling, prefix.request
        most = sampling.max_tokens if asked is None else min(sampling.max_tokens, max(1, asked.max_tokens))
        P = len(prefix.tokens)
        return min(P + most, self._max_context), P + sampling.min_tokens

    def _sample_first(self, prefix: Prefix, samples: int) -> None:
        """Samples the first token of each sample with the decode program, on rows of their own."""
        kept = self._state
        state = dataclasses.replace(kept, active=np.zeros(self._slots, bool))
        limit, floor = self._limits(prefix)
        for slot in range(samples):
            state = decode.insert(
                state,
                slot,
                pages=prefix.pages or [],
                token=int(prefix.tokens[-1]),
                position=prefix.filled,
                limit=limit,
                floor=floor,
                key=prefix.keys[slot],
                sampling=self._row_sampling,
            )
        self._state = state
        result = self._step(prefix.served.weights)
        self._state = dataclasses.replace(kept, cache=self._state.cache)
        prefix.first = [(int(result.tokens[0, i]), float(result.logprobs[0, i])) for i in range(samples)]
        prefix.filled += 1

    def _first_results(self, prefix: Prefix, samples: int) -> Any:
        data = np.zeros((samples, 3), np.int32)
        logprobs = np.zeros((samples, 1), np.float32)
        versions = np.full((samples, 1), -1, np.int32)
        for i, (token, logprob) in enumerate(prefix.first):
            if np.isfinite(logprob):
                data[i] = token, 1, 1
                logprobs[i], versions[i] = logprob, prefix.served.version
        return self._contract.results(data, logprobs, versions, versions.copy())

    def _put(self, prefix: Prefix, sample: int, slot: int, pages: list[int]) -> None:
        tokens = [int(token) for token in prefix.tokens]
        limit, floor = self._limits(prefix)
        if prefix.first:
            token, logprob = prefix.first[sample]
            tokens.append(token)
            stopped = self._stop_table[token] and len(tokens) >= floor
            if stopped or len(tokens) >= limit or not np.isfinite(logprob):
                self._allocator.release(pages)  # its only token has been given out
                return
        self._rows[slot] = _Row(
            tokens=tokens,
            prompt=len(prefix.tokens),
            pages=pages,
            swaps=prefix.served.swaps,
            kv_version=prefix.served.version,
            request=prefix.request,
        )
        self._state = decode.insert(
            self._state,
            slot,
            pages=pages,
            token=tokens[-1],
            position=prefix.filled,
            limit=limit,
            floor=floor,
            key=prefix.keys[sample],
            sampling=self._row_sampling,
        )

    def _step(self, weights: decode.SamplingWeights) -> decode.ResultTokens:
        self._state, result = decode.generate(
            weights,
            self.config,
            self._state,
            tables=self._rules,
            steps=1,
            truncate=self._sampling.truncated_support,
        )
        return result

    def _vacate(self, slot: int) -> None:
        row, self._rows[slot] = self._rows[slot], None
        if row is not None:
            self._allocator.release(row.pages)
            self._state = decode.free_resource(self._state, slot)
