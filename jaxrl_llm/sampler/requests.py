"""What an engine knows of a request, from its arrival to the completion that is made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sampler.base import Completion, PromptScores, SamplingParams
from jaxrl_llm.sampler.decode import ResultTokens
from jaxrl_llm.sampler.rules import Rule, RuleTable
from jaxrl_llm.sampler.sampling import RowSampling
from jaxrl_llm.sampler.scheduler import Prefix, Row
from jaxrl_llm.types import Prompt, StopReason

__all__ = [
    "Carried",
    "Event",
    "Request",
    "as_it_was",
    "completion_of",
    "prompt_scores_of",
    "row_sampling",
    "take",
]

# Lists of a request with an entry for each token, or none.
_BY_TOKEN = (
    "logprobs",
    "raw_logprobs",
    "top_ids",
    "top_logprobs",
    "support_ids",
    "support_cut",
    "versions",
    "kv_versions",
)


class Event(NamedTuple):
    """What one step did for one request."""

    id: int
    tokens: list[int]  # new ones
    logprobs: list[float]  # of them
    top_ids: list[np.ndarray] | None  # i32[K] each, when asked for
    top_logprobs: list[np.ndarray] | None  # f32[K] each
    prompt_scores: PromptScores | None  # in the first event of a request that asked for them
    completion: Completion | None  # of the whole request, when it has ended


class Carried:
    """A request that has not ended, as another engine can go on with it."""

    __slots__ = ("_so_far", "begun", "priority")

    def __init__(self, so_far: Completion | Callable[[], Completion], begun: bool, priority: int):
        """
        Args:
          so_far: the completion as far as it is; or a function that makes it, called when it is first asked for.
          begun: it has been in a slot, so that it comes before those that have not.
          priority: as it was submitted.
        """
        self._so_far, self.begun, self.priority = so_far, begun, priority

    @property
    def so_far(self) -> Completion:
        """What has been sampled; its `stop` says nothing."""
        if not isinstance(self._so_far, Completion):
            self._so_far = self._so_far()
        return self._so_far


@dataclasses.dataclass(eq=False)
class Request:
    """What an engine knows of a row besides what the scheduler needs: who asked for it, and the lists that it fills."""

    prompt: Prompt
    index: int
    sampling: SamplingParams
    arrived: float
    rule: Rule | None = None  # while in a slot
    text: bytearray = dataclasses.field(default_factory=bytearray)  # of the sampled tokens, for stop strings
    logprobs: list[float] = dataclasses.field(default_factory=list)
    raw_logprobs: list[float] = dataclasses.field(default_factory=list)
    top_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    top_logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    support_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
    support_cut: list[bool] = dataclasses.field(default_factory=list)
    routing: list[np.ndarray] = dataclasses.field(default_factory=list)  # i16[layers, K] of each token fed
    versions: list[int] = dataclasses.field(default_factory=list)
    kv_versions: list[int] = dataclasses.field(default_factory=list)
    prompt_scores: PromptScores | None = None  # from its first start on, if asked for
    kv_version: int = 0  # oldest weights that computed K/V in its pages
    started: float | None = None  # seconds on the engine's clock
    first: float | None = None
    ended: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.index >= self.sampling.n or self.sampling.greedy

    def adopt(self, done: Completion) -> None:
        """Begins with what another engine has sampled of it."""
        self.logprobs += done.logprobs.tolist()
        self.versions += done.versions.tolist()
        self.kv_versions += done.kv_versions.tolist()
        for mine, theirs in (
            (self.raw_logprobs, done.raw_logprobs),
            (self.top_ids, done.top_ids),
            (self.top_logprobs, done.top_logprobs),
            (self.support_ids, done.support_ids),
            (self.support_cut, done.support_cut),
            (self.routing, done.routing_ids),
        ):
            if theirs is not None:
                mine += theirs.tolist() if theirs.ndim == 1 else list(theirs)


def take(row: Row, result: ResultTokens, version: int, vocab_size: int) -> StopReason | None:
    """Appends the tokens of a dispatch, which weights of `version` sampled, to a row; says why it ended, if it did."""
    request, slot = row.request, row.slot
    sampling, rule = request.sampling, request.rule
    K, width = sampling.top_logprobs, sampling.support_width(vocab_size)
    tokens, logprobs = result.tokens[:, slot].tolist(), result.logprobs[:, slot].tolist()
    valid = result.valid[:, slot]
    for t in range(result.steps):
        if not valid[t]:
            raise RuntimeError("sampler: a row ended on the device for no reason that the host knows.")
        token, logprob = tokens[t], logprobs[t]
        if result.routing_ids is not None:
            request.routing.append(result.routing_ids[t, slot])
        if not np.isfinite(logprob):
            return StopReason.ERROR
        row.tokens.append(token)
        request.logprobs.append(logprob)
        request.versions.append(version)
        request.kv_versions.append(min(request.kv_version, version))
        if sampling.raw_logprobs:
            request.raw_logprobs.append(float(result.raw_logprobs[t, slot]))
        if K:
            request.top_ids.append(result.top_ids[t, slot, :K])
            request.top_logprobs.append(result.top_logprobs[t, slot, :K])
        if width:
            request.support_ids.append(result.support_ids[t, slot, :width])
            request.support_cut.append(bool(result.support_cut[t, slot]))
        found = rule.strings is not None and rule.strings.push(request.text, token)
        if len(row.tokens) > sampling.min_tokens:
            if token in rule.stop_ids:
                return StopReason.EOS
            if found:
                return StopReason.STOP_STRING
        if len(row.prompt_tokens) + len(row.tokens) >= row.limit:
            return StopReason.LENGTH
    return None


def as_it_was(
    row: Row,
    tokens: int,
    routing: int,
    scores: PromptScores | None,
    started: float | None,
    first: float | None,
    ended: float,
) -> Row:
    """A row when it had so many tokens, and routes of so many: its lists only ever grow."""
    lists = {name: getattr(row.request, name)[:tokens] for name in _BY_TOKEN}
    then = dataclasses.replace(
        row.request,
        routing=row.request.routing[:routing],
        prompt_scores=scores,
        started=started,
        first=first,
        ended=ended,
        **lists,
    )
    return dataclasses.replace(row, tokens=row.tokens[:tokens], request=then)


def completion_of(
    row: Row, stop: StopReason, config: ModelConfig, rules: RuleTable, tokenizer: Any, now: float
) -> Completion:
    """What has been sampled of a row, as its receiver gets it.

    Args:
      tokenizer: what makes its text; None: it gets none.
      now: seconds on the engine's clock, for a row that has not ended.
    """
    request = row.request
    sampling, N = request.sampling, len(row.tokens)
    text = None
    if tokenizer is not None:
        text = tokenizer.decode(row.tokens)
        if stop is StopReason.STOP_STRING and request.rule is not None and request.rule.strings is not None:
            text = request.rule.strings.cut(text, tokenizer.decode(row.tokens[:-1]))
    K, width = sampling.top_logprobs, sampling.support_width(config.vocab_size)
    ended = request.ended or now
    started = ended if request.started is None else request.started
    first = ended if request.first is None else request.first
    support = np.array(request.support_ids, np.int32).reshape(N, width) if width else None
    if sampling.record_support and not width and not request.greedy:
        support = rules.left_out(sampling, N)
    routing = None
    if config.num_experts:
        chosen = (config.num_layers, config.experts_per_token)
        routing = np.array(request.routing, np.int16).reshape(-1, *chosen)
    scores = request.prompt_scores
    return Completion(
        prompt=request.prompt,
        index=request.index,
        tokens=np.array(row.tokens, np.int32),
        logprobs=np.array(request.logprobs, np.float32),
        stop=stop,
        versions=np.array(request.versions, np.int32),
        kv_versions=np.array(request.kv_versions, np.int32),
        raw_logprobs=np.array(request.raw_logprobs, np.float32) if sampling.raw_logprobs else None,
        top_ids=np.array(request.top_ids, np.int32).reshape(N, K) if K else None,
        top_logprobs=np.array(request.top_logprobs, np.float32).reshape(N, K) if K else None,
        support_ids=support,
        support_cut=np.array(request.support_cut, bool) if width else None,
        routing_ids=routing,
        prompt_logprobs=None if scores is None else scores.logprobs,
        prompt_ranks=None if scores is None else scores.ranks,
        prompt_top_ids=None if scores is None else scores.top_ids,
        prompt_top_logprobs=None if scores is None else scores.top_logprobs,
        text=text,
        timings={
            "queued": started - request.arrived,
            "first_token": first - request.arrived,
            "sampled": ended - started,
        },
    )


def prompt_scores_of(prefix: Prefix) -> PromptScores:
    """The scores of a prompt whose prefix is complete."""
    P, K = len(prefix.tokens) + 1, prefix.top
    logprobs, ranks = np.zeros(P, np.float32), np.zeros(P, np.int32)
    top_ids, top_logprobs = np.zeros((P, K), np.int32), np.zeros((P, K), np.float32)
    done = 1  # nothing comes before the first token
    for chunk in prefix.scores:
        after = done + len(chunk.logprobs)
        logprobs[done:after], ranks[done:after] = chunk.logprobs, chunk.ranks
        top_ids[done:after], top_logprobs[done:after] = chunk.top_ids[:, :K], chunk.top_logprobs[:, :K]
        done = after
    if done != P:
        raise RuntimeError(f"sampler: {done} of the {P} tokens of a prompt have been scored.")
    return PromptScores(logprobs, ranks, top_ids if K else None, top_logprobs if K else None)


def row_sampling(request: Request, vocab_size: int) -> RowSampling:
    if request.greedy:
        return RowSampling.uniform(1, temperature=0.0)
    sampling = request.sampling
    return RowSampling.uniform(
        1,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        limit=sampling.support_width(vocab_size),
    )
