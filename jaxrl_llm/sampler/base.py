"""What a sampler takes and gives back. Read this file first.

Vocabulary of this package: a *row* is one completion that is being sampled; a *slot* is one row of the
compiled decode program; a *page* holds the keys and values of `page_size` consecutive tokens of one
sequence in every layer; a *dispatch* is one call of the decode program, several decode steps long.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Prompt, StopReason

__all__ = ["Completion", "PromptScores", "SamplerStats", "SamplingParams", "TokenSampler", "as_prompts"]


_MOST = 2**31 - 1  # counts are i32 on the device


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, of Python or numpy; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _is_text(value: Any) -> bool:
    """Whether a value is a text that is not empty and can be encoded (no half of a surrogate pair)."""
    return isinstance(value, str) and value.encode(errors="ignore") == value.encode(errors="replace") != b""


def _is_bias(value: Any) -> bool:
    """Whether a value is a pair (token id, number)."""
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and is_integer(value[0])
        and _is_number(value[1])
        and abs(value[1]) <= 1000
    )


def _is_list(value: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, tuple) and all(good(entry) for entry in value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How completions are drawn.

    The distribution that is drawn from is built in this order: suppressed ids and (before `min_tokens`)
    stop ids are removed, logits are divided by `temperature`, `top_k` keeps the k best, `top_p` keeps the
    smallest set of best tokens that holds at least that share of what top-k left (the token that crosses
    the threshold is kept), `min_p` drops tokens less likely than min_p times the best. Ties are kept in
    order of token id. With `record_support` no more than its K best are kept of the result. What remains is renormalised.
    """

    max_tokens: int  # sampled tokens, at least 1
    temperature: float = 1.0  # 0 = greedy: log-probs are raw, not trainable
    top_p: float = 1.0  # (0, 1]; 1 = off
    top_k: int = 0  # 0 = off
    min_p: float = 0.0  # [0, 1]; 0 = off
    n: int = 1  # completions of each prompt
    stop: tuple[str, ...] = ()  # stop strings; every sampled token is kept, also those of the string
    stop_ids: tuple[int, ...] | None = None  # None = the model's eos ids; () = none
    min_tokens: int = 0  # stop ids are suppressed and stop strings ignored before so many sampled tokens
    seed: int = 0
    suppress_ids: tuple[int, ...] = ()  # never sampled
    raw_logprobs: bool = False  # also return log-probs under the unmodified softmax (temperature 1)
    # Also return the ids and log-probs of so many of the likeliest tokens at each sampled one; 0 = none. They are those
    # of the policy at `temperature`, before top_k, top_p and min_p: what a learner computes again.
    top_logprobs: int = 0
    # (id, value): added to the logit of a token before the temperature, as in OpenAI's API. The log-probs are those of
    # the biased distribution, which a learner does not compute: for serving, not for training.
    logit_bias: tuple[tuple[int, float], ...] = ()
    # Also return raw log-probs and ranks of the prompt's own tokens, under the weights that sample its first token.
    prompt_logprobs: bool = False
    prompt_top_logprobs: int = (
        0  # and so many of the likeliest tokens in the place of each; needs prompt_logprobs
    )
    # K > 0: where top_k, top_p or min_p act, also return the at most K tokens that each one was drawn from, which a learner
    # needs to compute the same log-prob; 0 = off. K limits the distribution itself: what is kept beyond is not drawn.
    # Where they do not act: the tokens that could not be drawn, if there are any (suppressed ids, stop ids before min_tokens).
    record_support: int = 0
    greedy_too: bool = False  # one more completion of each prompt after its n, greedy, with index n

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias.items())))
        for name in ("stop", "suppress_ids", "stop_ids", "logit_bias"):
            if isinstance(getattr(self, name), Iterable) and not isinstance(getattr(self, name), bytes):
                object.__setattr__(self, name, tuple(getattr(self, name)))

        def count(name: str, least: int) -> bool:
            value = getattr(self, name)
            return is_integer(value) and least <= value <= _MOST

        def number(name: str, good: Callable[[float], bool]) -> bool:
            value = getattr(self, name)
            return _is_number(value) and good(value)

        ids = "a list of token ids"
        # Called one after the other, since a later rule builds on an earlier one.
        rules: tuple[tuple[str, Callable[[], bool], str], ...] = (
            ("max_tokens", lambda: count("max_tokens", 1), "at least 1 (an integer, less than 2**31)"),
            (
                "temperature",
                lambda: number("temperature", lambda t: t == 0 or 1e-3 <= t <= 1e3),
                "0 (greedy) or in [0.001, 1000]",
            ),
            ("top_p", lambda: number("top_p", lambda p: 0 < p <= 1), "in (0, 1]; 1 turns it off"),
            ("top_k", lambda: count("top_k", 0), "0 (off) or a positive count"),
            ("min_p", lambda: number("min_p", lambda p: 0 <= p <= 1), "in [0, 1]; 0 turns it off"),
            ("n", lambda: count("n", 1), "at least 1 (an integer, less than 2**31)"),
            ("top_logprobs", lambda: count("top_logprobs", 0), "0 (off) or a positive count"),
            (
                "prompt_top_logprobs",
                lambda: (
                    count("prompt_top_logprobs", 0) and (self.prompt_logprobs or not self.prompt_top_logprobs)
                ),
                "0 (off) or a positive count, with prompt_logprobs=True",
            ),
            ("record_support", lambda: count("record_support", 0), "0 (off) or a positive count"),
            (
                "min_tokens",
                lambda: count("min_tokens", 0) and self.min_tokens <= self.max_tokens,
                f"in [0, max_tokens={self.max_tokens}] (an integer)",
            ),
            ("stop", lambda: _is_list(self.stop, _is_text), "non-empty strings"),
            (
                "stop_ids",
                lambda: self.stop_ids is None or _is_list(self.stop_ids, is_integer),
                ids + " or None",
            ),
            ("suppress_ids", lambda: _is_list(self.suppress_ids, is_integer), ids),
            (
                "logit_bias",
                lambda: _is_list(self.logit_bias, _is_bias),
                "pairs of a token id and a number in [-1000, 1000]",
            ),
            ("seed", lambda: is_integer(self.seed), "an integer"),
        )
        for name, good, allowed in rules:
            if not good():
                raise InputError(f"SamplingParams: {name} must be {allowed}, got {getattr(self, name)!r}.")

    @property
    def greedy(self) -> bool:
        """True at temperature 0."""
        return self.temperature == 0

    @property
    def per_prompt(self) -> int:
        """Completions of each prompt, the greedy one included."""
        return self.n + self.greedy_too

    @property
    def truncated_support(self) -> bool:
        """True when the distribution drawn from may miss tokens (top-k, top-p, min-p)."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def support_width(self, vocab_size: int) -> int:
        """K of the lists that a sampler records: no longer than truncation can need; 0 = none."""
        if not self.truncated_support:
            return 0
        return min(self.record_support, self.top_k or vocab_size, vocab_size)


class PromptScores(NamedTuple):
    """What a policy makes of a prompt, read from left to right; entry t is about token t, entry 0 says nothing (zeros)."""

    logprobs: np.ndarray  # f32[P], raw
    ranks: np.ndarray  # i32[P], tokens that are likelier, and 1
    top_ids: np.ndarray | None  # i32[P, K], the likeliest tokens in the place of each, best first; on request
    top_logprobs: np.ndarray | None  # f32[P, K], likewise


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled answer.

    `tokens` holds every token that was sampled up to the stop, a stop id and the tokens of a stop string
    included; `text` is cut before the stop string. `logprobs` are natural log-probs under the exact
    distribution drawn from, or raw ones for greedy decoding. With `record_support` this distribution is the softmax of
    the logits / temperature over `support_ids`, which hold the sampled token or leave out others.
    """

    prompt: Prompt
    index: int  # which of the n samples of the prompt; n = the greedy one beside them
    tokens: np.ndarray  # i32[N]
    logprobs: np.ndarray  # f32[N]
    stop: StopReason
    versions: np.ndarray  # i32[N], snapshot that sampled the token
    kv_versions: np.ndarray  # i32[N], oldest snapshot whose K/V the token attended to
    raw_logprobs: np.ndarray | None = None  # f32[N], on request
    top_ids: np.ndarray | None = (
        None  # i32[N, K], on request: the likeliest tokens in the place of each, best first
    )
    top_logprobs: np.ndarray | None = None  # f32[N, K], likewise
    prompt_logprobs: np.ndarray | None = (
        None  # f32[P], on request: see `PromptScores`; None of a row that never ran
    )
    prompt_ranks: np.ndarray | None = None  # i32[P], likewise
    prompt_top_ids: np.ndarray | None = None  # i32[P, K], likewise
    prompt_top_logprobs: np.ndarray | None = None  # f32[P, K], likewise
    # i32[N, K], with record_support: the tokens that each was drawn from, best first, then -1, or what was left out of the
    # vocabulary, as codes of `ops.support`; None where every token was drawn from all of it
    support_ids: np.ndarray | None = None
    support_cut: np.ndarray | None = None  # bool[N], likewise: truncation had kept more than K
    # i16[P + N - 1, layers, experts_per_token], the experts that each token was sent through, prompt included, all but the
    # last, which nothing was computed from; -1 = not known. None of a dense model
    routing_ids: np.ndarray | None = None
    text: str | None = None  # None without a tokenizer
    timings: Mapping[str, float] = dataclasses.field(default_factory=dict)  # seconds

    @property
    def prompt_scores(self) -> PromptScores | None:
        """The fields about the prompt, if they were asked for."""
        if self.prompt_logprobs is None or self.prompt_ranks is None:
            return None
        return PromptScores(
            self.prompt_logprobs, self.prompt_ranks, self.prompt_top_ids, self.prompt_top_logprobs
        )


@dataclasses.dataclass
class SamplerStats:
    """What one call of `generate` did. Counts are exact and reproducible, seconds are not."""

    completions: int = 0
    tokens: int = 0  # returned
    prompt_tokens: int = 0  # of all completions
    prefilled_tokens: int = 0  # really computed by prefill, prompts of preempted rows included
    prefix_hits: int = 0  # completions whose prompt was already in the pages
    dispatches: int = 0
    shared_reads: int = 0  # dispatches in which rows read the pages that they have in common together
    decode_steps: int = 0
    slot_steps: int = 0  # slots x decode steps
    decoded_tokens: int = 0  # sampled by live rows, also past a stop string
    preemptions: int = 0
    resumptions: int = 0
    cancelled: int = 0
    reused_tokens: int = 0  # of prompts, found in pages that other prompts had filled
    evictions: int = 0  # pages of prompts that were given up for others
    swaps: int = 0  # of the weights
    peak_pages: int = 0
    slots: int = 0
    pages: int = 0
    seconds: float = 0.0
    prepare_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def occupancy(self) -> float:
        """Live rows / (slots x decode steps)."""
        return self.decoded_tokens / max(1, self.slot_steps)

    @property
    def tokens_per_second(self) -> float:
        """Returned tokens over the whole wall-clock time of the call."""
        return self.tokens / self.seconds if self.seconds else 0.0


class TokenSampler(Protocol):
    """Anything that completes prompts with given weights."""

    def generate(
        self,
        params: Any,
        prompts: Sequence[Prompt | Sequence[int]],
        sampling: SamplingParams,
        *,
        version: int = 0,
        on_progress: Callable[[SamplerStats], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of the prompts, the samples of a prompt consecutive, a greedy one last."""


def _token_list(value: Any, number: int) -> np.ndarray:
    """i32[N] of a list of token ids. Raises InputError for anything else."""
    tokens = (
        np.asarray(value) if isinstance(value, Sequence | np.ndarray) or hasattr(value, "__array__") else None
    )
    if tokens is not None and tokens.size == 0:
        tokens = tokens.astype(np.int32)  # an empty list has no type of its own
    if tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InputError(
            f"sampler: prompt {number} must be a list of token ids (integers) or a Prompt, got {str(value)[:80]!r}. Text is "
            "encoded with the model's tokenizer: tokenizer.chat or tokenizer.encode."
        )
    if tokens.size and not -(2**31) <= int(tokens.min()) <= int(tokens.max()) <= _MOST:
        raise InputError(f"sampler: prompt {number} has a token id beyond 32 bits.")
    return tokens.astype(np.int32)


def as_prompts(prompts: Iterable[Prompt | Sequence[int]]) -> list[Prompt]:
    """Gives token lists a uid: a stable hash of the tokens plus the occurrence number within this call.

    Raises:
      InputError: something that is neither a Prompt nor a list of token ids, or a uid that is no text.
    """
    if isinstance(prompts, str | Prompt) or not isinstance(prompts, Iterable):
        raise InputError(
            f"sampler: prompts must be a list of token lists or Prompts, got {type(prompts).__name__}."
        )
    seen: dict[str, int] = {}
    out = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Prompt):
            if not _is_text(prompt.uid):
                raise InputError(
                    f"sampler: the uid of prompt {number} must be a text that is not empty, got {prompt.uid!a}."
                )
            _token_list(prompt.tokens, number)
        else:
            tokens = _token_list(prompt, number)
            digest = hashlib.blake2b(tokens.astype("<i4").tobytes(), digest_size=16).hexdigest()
            occurrence = seen[digest] = seen.get(digest, -1) + 1
            prompt = Prompt(uid=f"tokens-{digest}-{occurrence}", tokens=tokens)
        out.append(prompt)
    return out
