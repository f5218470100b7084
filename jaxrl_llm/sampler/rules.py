"""What rows may sample and what ends them, as tables over the vocabulary that the decode program looks up.

Requests with the same stop ids, stop strings, suppressed ids and biases share one entry, a *rule*. The tables hold
a power of two of rules, so that few requests compile the program anew.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.ops.support import NOTHING, left_out
from jaxrl_llm.sampler.base import SamplingParams
from jaxrl_llm.sampler.stopping import StopStrings, bytes_of_tokens

__all__ = ["Rule", "RuleTable", "Tables"]

_STOPS = 64  # sets of stop strings that are kept ready


class Tables(NamedTuple):
    """Arrays over (rule, token). A table that no rule needs is None, which costs the program nothing."""

    stop: Any  # bool[R, V], suppressed below a row's floor
    halt: Any  # bool[R, V], ends a row on the device at or above its floor: stop ids, tokens with a whole stop string
    suppressed: Any = None  # bool[R, V], never sampled; None also promises that no row has a floor
    bias: Any = None  # f32[R, V], added to the logits


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """One entry of the tables, and what the host needs of it."""

    index: int
    stop_ids: frozenset[int]
    strings: StopStrings | None


class RuleTable:
    """Gives requests their rules, and builds the tables when they change."""

    def __init__(self, vocab_size: int, eos_ids: tuple[int, ...], tokenizer: Any = None):
        self._V, self._eos, self._tokenizer = vocab_size, eos_ids, tokenizer
        self._bytes: list[bytes] | None = None
        self._strings: dict[tuple[str, ...], StopStrings] = {}
        self._rules: dict[Any, Rule] = {}
        self._users: dict[int, int] = {}  # live rows of each rule
        self._entries: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = {}
        self._left_out: tuple[Any, np.ndarray, np.ndarray] | None = None  # the last, see `_left_out_before`
        self._size = 1
        self._arrays: dict[tuple[bool, bool], Tables] = {}

    def check(self, sampling: SamplingParams) -> None:
        """Raises InputError where parameters do not fit the model or the tokenizer."""
        V = self._V
        biased = tuple(i for i, _ in sampling.logit_bias)
        outside = [i for i in (sampling.stop_ids or ()) + sampling.suppress_ids + biased if not 0 <= i < V]
        if outside:
            raise InputError(
                f"sampler: stop_ids, suppress_ids and logit_bias must be in [0, {V}), got {outside}."
            )
        for name in ("top_logprobs", "prompt_top_logprobs"):
            if getattr(sampling, name) > V:
                raise InputError(
                    f"sampler: {name}={getattr(sampling, name)} is more than the {V} tokens of the vocabulary."
                )
        if sampling.stop and self._tokenizer is None:
            raise InputError(
                "sampler: stop strings need a tokenizer; pass tokenizer= to Sampler, or use stop_ids."
            )
        suppressed, stop = self._suppressed(sampling), self._ids(self._stop_ids(sampling))
        if suppressed.all() or (sampling.min_tokens and (suppressed | stop).all()):
            raise InputError(
                "sampler: suppress_ids (with stop ids before min_tokens) leave nothing to sample."
            )

    def take(self, sampling: SamplingParams) -> Rule:
        """The rule of a request, for one row in a slot; `give_back` when it leaves the slot."""
        name = (self._stop_ids(sampling), sampling.stop, sampling.suppress_ids, sampling.logit_bias)
        rule = self._rules.get(name)
        if rule is None:
            rule = self._make(name, sampling)
        self._users[rule.index] = self._users.get(rule.index, 0) + 1
        return rule

    def give_back(self, rule: Rule) -> None:
        """One row in a slot less has the rule. Its entry is kept until another rule needs the place."""
        self._users[rule.index] -= 1

    def tables(self, put: Callable[[Any], Any], *, floors: bool, rules: set[int]) -> Tables:
        """The tables on the device.

        Args:
          put: moves a tree of arrays there.
          floors: whether a row of the dispatch has `min_tokens`.
          rules: indices of the rows of the dispatch.
        """
        suppress = floors or any(self._entries[i][2].any() for i in rules)
        biased = any(self._entries[i][3].any() for i in rules)
        if (suppress, biased) not in self._arrays:
            stacked = [
                np.stack(
                    [
                        self._entries[i][kind]
                        if i in self._entries
                        else np.zeros_like(self._entries[0][kind])
                        for i in range(self._size)
                    ]
                )
                for kind in range(4)
            ]
            stop, halt, suppressed, bias = stacked
            tables = Tables(stop, halt, suppressed if suppress else None, bias if biased else None)
            self._arrays[suppress, biased] = jax.tree.map(put, tables)
        return self._arrays[suppress, biased]

    def left_out(self, sampling: SamplingParams, tokens: int) -> np.ndarray | None:
        """i32[tokens, K]: what could not be sampled in the place of each token, as codes of `ops.support`.

        None where nothing was left out.
        """
        early, always = self._left_out_before(sampling)
        width = max(len(early), len(always))
        if not width:
            return None
        codes = np.full((tokens, width), NOTHING, np.int32)
        codes[: sampling.min_tokens, : len(early)] = early
        codes[sampling.min_tokens :, : len(always)] = always
        return codes

    # ------------------------------------------------------------------------------------- internals

    def _left_out_before(self, sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
        """i32[K]: the codes of what cannot be sampled below `min_tokens` and from there on."""
        name = (sampling.suppress_ids, self._stop_ids(sampling) if sampling.min_tokens else frozenset())
        if self._left_out is None or self._left_out[0] != name:  # a rollout has one kind of request
            suppressed = np.flatnonzero(self._suppressed(sampling)).tolist()
            always = left_out(suppressed, self._V)
            early = left_out({*suppressed, *name[1]}, self._V) if name[1] else always
            self._left_out = name, early, always
        return self._left_out[1:]

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        return frozenset(self._eos if sampling.stop_ids is None else sampling.stop_ids)

    def _ids(self, ids: Any) -> np.ndarray:
        table = np.zeros(self._V, bool)
        table[list(ids)] = True
        return table

    def _suppressed(self, sampling: SamplingParams) -> np.ndarray:
        table = self._ids(sampling.suppress_ids)
        if self._tokenizer is not None:
            table[self._tokenizer.vocab_size :] = True  # padding of the embedding
        return table

    def _stopping(self, stop: tuple[str, ...]) -> StopStrings | None:
        if not stop:
            return None
        if stop not in self._strings:
            if self._bytes is None:
                self._bytes = bytes_of_tokens(self._tokenizer, self._V)
            while len(self._strings) >= _STOPS:
                del self._strings[next(iter(self._strings))]
            self._strings[stop] = StopStrings(stop, self._bytes)
        return self._strings[stop]

    def _make(self, name: Any, sampling: SamplingParams) -> Rule:
        for old, rule in list(self._rules.items()):
            if not self._users[rule.index]:  # nobody's: its place is free
                del self._rules[old]
        taken = {rule.index for rule in self._rules.values()}
        index = next(i for i in range(len(taken) + 1) if i not in taken)
        while index >= self._size:
            self._size *= 2
        strings = self._stopping(sampling.stop)
        stop = self._ids(name[0])
        bias = np.zeros(self._V, np.float32)
        for token, value in sampling.logit_bias:
            bias[token] = value
        halt = stop | strings.complete if strings else stop
        self._entries[index] = (stop, halt, self._suppressed(sampling), bias)
        self._arrays = {}
        rule = Rule(index=index, stop_ids=name[0], strings=strings)
        self._rules[name] = rule
        self._users.setdefault(index, 0)
        return rule
