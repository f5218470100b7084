"""Conversations as token buffers: sampled ids go in and stay; only new text is ever tokenised.

Rendering the whole history again would change it: decoding and encoding is not the identity, and some
templates rewrite earlier turns. The mask records what was sampled when it was appended; it is never
derived from the values of ids, so a stop id that is also the padding id keeps its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import Trajectory

__all__ = ["Conversation"]

_FIELDS = ("tokens", "mask", "logprob", "version", "kv_version")
_DTYPES = {
    "tokens": np.int32,
    "mask": bool,
    "logprob": np.float32,
    "version": np.int32,
    "kv_version": np.int32,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """An episode so far. Appending returns a new value."""

    tokens: np.ndarray  # i32[L]
    mask: np.ndarray  # bool[L], sampled by the policy
    logprob: np.ndarray  # f32[L], behavior log-prob (nats), 0 where not sampled
    version: np.ndarray  # i32[L], -1 where not sampled
    kv_version: np.ndarray  # i32[L], likewise
    # i32[L, K], under top-k, top-p or min-p the tokens that each was drawn from, -1 beyond; None = none was
    support_ids: np.ndarray | None = None

    def __post_init__(self):
        shapes = {name: getattr(self, name).shape for name in _FIELDS}
        if len(set(shapes.values())) != 1 or self.tokens.ndim != 1:
            raise ValueError(f"conversation: all fields must have one shape [L], got {shapes}.")
        support = self.support_ids
        if support is not None and (support.ndim != 2 or len(support) != len(self)):
            raise ValueError(
                f"conversation: support_ids must be [L, K] for {len(self)} tokens, got the shape {support.shape}."
            )

    def __len__(self) -> int:
        return int(self.tokens.size)

    @classmethod
    def start(cls, tokens: Sequence[int] | np.ndarray) -> Conversation:
        """A conversation that consists of a prompt."""
        empty = {name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()}
        return cls(**empty).append_given(tokens)

    def _append(self, support_ids: np.ndarray | None = None, **new: Any) -> Conversation:
        joined = {n: np.concatenate([getattr(self, n), np.asarray(new[n], _DTYPES[n])]) for n in _FIELDS}
        given = [(self.support_ids, len(self)), (support_ids, len(new["tokens"]))]
        known = [np.shape(ids)[1] for ids, _ in given if ids is not None]
        if not known:
            return Conversation(**joined)
        support = np.full((len(joined["tokens"]), max(known)), -1, np.int32)
        for (ids, number), start in zip(given, (0, len(self)), strict=True):
            if ids is not None:
                support[start : start + number, : np.shape(ids)[1]] = ids
        return Conversation(**joined, support_ids=support)

    def append_given(self, tokens: Sequence[int] | np.ndarray) -> Conversation:
        """Adds tokens that the policy did not write: prompts, tool results, template text. Not trained."""
        n = len(tokens)
        return self._append(
            tokens=tokens,
            mask=np.zeros(n, bool),
            logprob=np.zeros(n),
            version=np.full(n, -1),
            kv_version=np.full(n, -1),
        )

    def append_sampled(
        self,
        tokens: Sequence[int] | np.ndarray,
        logprob: Sequence[float] | np.ndarray,
        version: int | np.ndarray,
        kv_version: int | np.ndarray | None = None,
        support_ids: np.ndarray | None = None,
    ) -> Conversation:
        """Adds tokens exactly as they were sampled, the stop id included if it was sampled.

        Args:
          tokens: i32[N].
          logprob: f32[N], behavior log-probs (nats).
          version: int or i32[N], train steps done by the policy.
          kv_version: oldest version whose K/V was attended to; default: `version`.
          support_ids: i32[N, K], of `Completion`, when the sampler truncated: without them the log-probs of a learner
            are over the vocabulary, and are not those of the sampler.
        """
        n = len(tokens)
        if len(logprob) != n:
            raise ValueError(f"append_sampled: {n} tokens but {len(logprob)} log-probs.")
        if support_ids is not None and (np.ndim(support_ids) != 2 or len(support_ids) != n):
            raise ValueError(
                f"append_sampled: support_ids must be [N, K] for {n} tokens, got the shape {np.shape(support_ids)}."
            )
        kv_version = version if kv_version is None else kv_version
        return self._append(
            tokens=tokens,
            mask=np.ones(n, bool),
            logprob=logprob,
            version=np.broadcast_to(version, n),
            kv_version=np.broadcast_to(kv_version, n),
            support_ids=support_ids,
        )

    def append_text(self, tokenizer: Tokenizer, text: str) -> Conversation:
        """Adds text from outside, tokenised by itself; control tokens that it spells stay text."""
        return self.append_given(tokenizer.encode(text))

    def append_turns(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> Conversation:
        """Ends the assistant turn that was sampled and adds new messages, laid out by the chat template.

        The end-of-turn token is the sampled one where the policy produced it. Where it did not (the turn was
        cut), the template's is added and not trained.
        """
        new = tokenizer.next_turn(messages, add_generation_prompt, **options)
        end = next((i for i, token in enumerate(new) if tokenizer.is_special(token)), None)
        if end is not None and len(self) and self.mask[-1] and new[end] == self.tokens[-1]:
            if not tokenizer.decode(new[:end]).strip():  # some templates put a blank before the end of a turn
                new = new[end + 1 :]
        return self.append_given(new)

    def truncate(self, limit: int) -> Conversation:
        """The first `limit` tokens. No stop id is invented for what is cut off."""
        if limit < 0:
            raise ValueError(f"truncate: limit must not be negative, got {limit}.")
        support = None if self.support_ids is None else self.support_ids[:limit]
        return Conversation(**{name: getattr(self, name)[:limit] for name in _FIELDS}, support_ids=support)

    def trajectory(self, **fields: Any) -> Trajectory:
        """The record of this episode; `fields` are those of `Trajectory` that are not per token."""
        per_token = {name: getattr(self, name) for name in _FIELDS}
        return Trajectory(**per_token, **{"support_ids": self.support_ids, **fields})
