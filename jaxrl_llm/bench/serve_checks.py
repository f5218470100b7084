"""What a load test of the server takes for right: of one answer, of two answers to the same question, of a server at rest.

Pure functions; each returns what is wrong in plain words, nothing when all is well.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = [
    "Choice",
    "Growth",
    "Model",
    "References",
    "Sample",
    "Task",
    "check_choice",
    "check_choices",
    "check_growth",
    "check_refusal",
    "check_rest",
    "check_usage",
    "growth",
    "parse_metrics",
]

_MIB = 2**20
# Memory of a process that leaks nothing may grow by so many bytes between two quarters; while it has answered fewer
# than a thousand requests between them, or in its first minutes, it still compiles programs, and may grow by the
# second number.
_NOISE, _NOISE_AT_FIRST = 16 * _MIB, 256 * _MIB
_FIRST_SECONDS = 120
_THREADS = 8  # that may come in the second half
_ROUNDING = 1e-5  # nats: what the log-prob of a certain token may lie above 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What is known of the model behind the server."""

    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int  # tokens, prompt and completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is asked, in whatever form: equal tasks have equal answers under the same weights, if they have a seed."""

    prompt: tuple[int, ...]  # token ids
    message: str | None = None  # the user turn that the prompt was made of
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None  # None: drawn anew each time
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0  # never with `stop`
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def repeatable(self) -> bool:
        """Whether it has one answer."""
        return self.temperature == 0 or self.seed is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """One completion as a client got it; None: this form of answer does not tell."""

    index: int
    finish_reason: Any
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    named: tuple[int, ...] | None = None  # tokens by the names that stand beside the log-probs
    version: int | None = None  # of the policy that sampled the last token
    versions: tuple[int, ...] | None = None  # of each token


class Sample(NamedTuple):
    """One look at the server."""

    seconds: float  # since the load began
    requests: int  # answered so far
    resident: float  # bytes
    threads: int | None  # None: not on this system, or not our process
    files: int | None  # open ones, sockets included


class Growth(NamedTuple):
    """Memory of the last quarter of a series beside the second one."""

    bytes: float  # of the means
    requests: float  # answered between the two
    per_thousand: float  # bytes a thousand requests


# ------------------------------------------------------------------------------------ one answer


def check_choice(
    choice: Choice, task: Task, model: Model, *, logprobs: bool, aborted: bool = False
) -> list[str]:
    """Length, end, text and log-probs of one completion.

    Args:
      logprobs: whether they were asked for.
      aborted: the server was told to abort what runs while this was under way.
    """
    out = []
    room = min(task.max_tokens, model.max_context - len(task.prompt))
    reasons = ("stop", "length", "abort") if aborted else ("stop", "length")
    if choice.finish_reason not in reasons:
        out.append(f"finish_reason is {choice.finish_reason!r}, not one of {', '.join(reasons)}")
    if choice.tokens is not None:
        out += _check_tokens(choice, task, model, room)
    if logprobs != (choice.logprobs is not None):
        out.append(
            f"log-probs were {'' if logprobs else 'not '}asked for, and it has {choice.logprobs!r:.40}"
        )
    if choice.logprobs is not None:
        out += _check_logprobs(choice, room)
    if choice.text is not None and any(s in choice.text for s in task.stop):
        out.append(f"the text {choice.text!r:.80} holds one of its stop strings {task.stop}")
    if choice.versions is not None and choice.tokens is not None:
        if len(choice.versions) != len(choice.tokens):
            out.append(f"{len(choice.versions)} policy versions for {len(choice.tokens)} tokens")
        elif choice.versions and choice.versions[-1] != choice.version:
            out.append(f"policy_version is {choice.version}, of the last token {choice.versions[-1]}")
    return out


def _check_tokens(choice: Choice, task: Task, model: Model, room: int) -> list[str]:
    tokens = choice.tokens or ()
    if any(not 0 <= t < model.vocab_size for t in tokens):
        return [f"a token id outside [0, {model.vocab_size}): {max(tokens)} or {min(tokens)}"]
    out = []
    if len(tokens) > room:
        out.append(f"{len(tokens)} tokens, at most {room} were allowed")
    ends = [at for at in range(len(tokens)) if _ends(tokens[: at + 1], task, model)]
    if ends and ends[0] < len(tokens) - 1:
        out.append(f"it goes on after token {ends[0] + 1} of {len(tokens)}, which ends it")
    ended = bool(ends)
    if choice.finish_reason == "stop" and not ended:
        out.append(f"finish_reason is stop, and nothing ends it: {tokens[-3:]}")
    if choice.finish_reason == "length" and (ended or len(tokens) < room):
        out.append(f"finish_reason is length with {len(tokens)} of {room} tokens{', and it ended' * ended}")
    if choice.text is not None:
        whole = model.tokenizer.decode(tokens)
        found = [at for s in task.stop if (at := whole.find(s)) >= 0]
        expected = whole[: min(found)] if found else whole
        if choice.text != expected:
            out.append(f"the text is {choice.text!r:.80}, its tokens say {expected!r:.80}")
    return out


def _ends(tokens: Sequence[int], task: Task, model: Model) -> bool:
    """Whether the last token ends a completion, by itself or with a stop string."""
    if len(tokens) <= task.min_tokens:
        return False
    if tokens[-1] in model.eos_ids and not task.ignore_eos:
        return True
    if not task.stop:
        return False
    *before, last = (model.tokenizer.token_bytes(t) for t in tokens[-64:])
    text = b"".join(before) + last
    return any(
        text.find(s.encode(), max(0, len(text) - len(last) - len(s.encode()) + 1)) >= 0 for s in task.stop
    )


def _check_logprobs(choice: Choice, room: int) -> list[str]:
    out, logprobs = [], choice.logprobs or ()
    count = room if choice.tokens is None else len(choice.tokens)
    if len(logprobs) != count and (choice.tokens is not None or len(logprobs) > count):
        out.append(f"{len(logprobs)} log-probs for {count} tokens")
    wrong = [p for p in logprobs if not (math.isfinite(p) and p <= _ROUNDING)]
    if wrong:
        out.append(f"log-probs that are none: {wrong[:3]}")
    if choice.named is not None and choice.tokens is not None and choice.named != choice.tokens:
        out.append("the tokens beside the log-probs are not those of the answer")
    return out


def check_choices(choices: Sequence[Choice], count: int) -> list[str]:
    """Whether an answer has the completions 0 to count - 1, each once."""
    found = [choice.index for choice in choices]
    return (
        [] if found == list(range(count)) else [f"the choices are numbered {found}, {count} were asked for"]
    )


def check_usage(usage: Any, task: Task, choices: Sequence[Choice], prompts: int = 1) -> list[str]:
    """Whether the counts of an answer are those of its tokens; `prompts`: how often the prompt was sent."""
    if not isinstance(usage, Mapping):
        return [f"usage is {usage!r:.40}"]
    out = []
    prompt, sampled, total = (usage.get(f"{name}_tokens") for name in ("prompt", "completion", "total"))
    if prompt != prompts * len(task.prompt):
        out.append(f"usage says {prompt} tokens of the prompt, it has {prompts * len(task.prompt)}")
    counted = [choice.tokens for choice in choices if choice.tokens is not None]
    if len(counted) == len(choices) and sampled != sum(map(len, counted)):
        out.append(f"usage says {sampled} sampled tokens, there are {sum(map(len, counted))}")
    if not isinstance(prompt, int) or not isinstance(sampled, int) or total != prompt + sampled:
        out.append(f"usage does not add up: {dict(usage)}")
    return out


def check_refusal(status: int, headers: Mapping[str, str], body: Any, expected: int) -> list[str]:
    """Whether a refusal has the status that was expected, says why, and, when it is 429, says when to come back."""
    if status != expected:
        return [f"status {status} in place of {expected}: {body!r:.200}"]
    out = []
    error = body.get("error") if isinstance(body, Mapping) else None
    if not (isinstance(error, Mapping) and isinstance(error.get("message"), str) and error["message"]):
        out.append(f"{status} without an error message: {body!r:.80}")
    if status == 429 and not re.fullmatch(r"[1-9]\d{0,3}", headers.get("retry-after", "")):
        out.append(f"429 with Retry-After {headers.get('retry-after')!r}")
    return out


# ------------------------------------------------------------------------------------ the same question twice


class References:
    """The first answer to each task under each version; later ones must be equal to it, bit for bit."""

    def __init__(self) -> None:
        self._known: dict[tuple[Task, int, int], dict[str, Any]] = {}
        self.compared = 0

    def check(self, choice: Choice, task: Task, version: int) -> list[str]:
        """Compares a completion that was sampled by one version alone. What is not known yet is remembered."""
        if not task.repeatable:
            return []
        # A greedy answer depends neither on the seed nor on its number.
        key = (dataclasses.replace(task, message=None), version, choice.index if task.temperature else 0)
        said = {
            name: value
            for name in ("tokens", "text", "logprobs", "finish_reason")
            if (value := getattr(choice, name)) is not None
        }
        known = self._known.setdefault(key, {})
        self.compared += bool(known)
        out = [
            f"{name} differs from the answer before: {_difference(known[name], value)}"
            for name, value in said.items()
            if name in known and known[name] != value
        ]
        self._known[key] = said | known
        return out


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, str) or len(before) != len(now):
        return f"{before!r:.60} and {now!r:.60}"
    places = [i for i, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1]]
    at = places[0]
    return f"{len(places)} of {len(now)} places, the first is {at}, {before[at]!r} and {now[at]!r}"


# ------------------------------------------------------------------------------------ leaks

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*(?:\{[^}]*\})?) (\S+)")


def parse_metrics(text: str) -> dict[str, float]:
    """{name with labels: value} of a page in Prometheus' text format.

    Raises:
      ValueError: a line that is none.
    """
    out = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            found = _SAMPLE.fullmatch(line)
            if found is None:
                raise ValueError(f"/metrics has the line {line[:80]!r}")
            out[found[1]] = float(found[2])
    return out


def check_rest(now: Mapping[str, float], tasks: float) -> list[str]:
    """What a server still holds that nobody waits for.

    Args:
      now: its metrics, asked for when it has nothing else to do.
      tasks: asyncio tasks that it had before the load.
    """
    wanted = {
        "jaxrl_requests_in_flight": (1, "requests are under way (the one for /metrics itself included)"),
        "jaxrl_completions_open": (0, "completions are open"),
        "jaxrl_rows_running": (0, "rows are in slots"),
        "jaxrl_rows_queued": (0, "rows are in the queue"),
        "jaxrl_pages_free": (now["jaxrl_pages"], "pages are free"),
        "jaxrl_pages_lost": (0, "pages are held by no row and by no kept prompt"),
        "jaxrl_paused": (0, "is the state of the pause"),
    }
    out = [
        f"at rest {now[name]:g} {what}, expected {value:g}"
        for name, (value, what) in wanted.items()
        if now[name] != value
    ]
    if now["jaxrl_tasks"] > tasks:
        out.append(f"at rest {now['jaxrl_tasks']:g} asyncio tasks, {tasks:g} before the load")
    return out


def growth(samples: Sequence[Sample]) -> Growth | None:
    """Memory in the last quarter of the time minus memory in the second; None when one of them has no sample."""
    if not samples:
        return None
    end = samples[-1].seconds
    second = [s for s in samples if end / 4 <= s.seconds < end / 2]
    last = [s for s in samples if s.seconds >= 3 * end / 4]
    if not second or not last:
        return None

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    grown = mean([s.resident for s in last]) - mean([s.resident for s in second])
    requests = mean([float(s.requests) for s in last]) - mean([float(s.requests) for s in second])
    return Growth(grown, requests, 1000 * grown / max(1.0, requests))


def check_growth(samples: Sequence[Sample], max_growth: float) -> list[str]:
    """Whether memory or threads grew while the load went on; `max_growth` is in MiB a thousand requests."""
    out = []
    found = growth(samples)
    settled = found is not None and found.requests >= 1000 and samples[-1].seconds >= _FIRST_SECONDS
    noise = _NOISE if settled else _NOISE_AT_FIRST
    if found is not None and found.bytes > noise + max_growth * _MIB * found.requests / 1000:
        out.append(
            f"memory grew by {found.bytes / _MIB:.1f} MiB from the second to the last quarter, "
            f"{found.per_thousand / _MIB:.2f} MiB a thousand requests; {max_growth:g} are allowed beyond "
            f"{noise / _MIB:g} MiB"
        )
    threads = [sample.threads for sample in samples if sample.threads is not None]
    before, after = threads[: len(threads) // 2], threads[len(threads) // 2 :]
    if before and max(after) > max(before) + _THREADS:
        out.append(
            f"at most {max(before)} threads in the first half of the load, up to {max(after)} in the second"
        )
    return out
