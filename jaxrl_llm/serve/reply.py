"""What is answered: completions in the shapes of OpenAI's API and of token-in/token-out generation.

Log-probs are the sampler's: natural, under the exact distribution that the token was drawn from (raw for greedy
decoding), one for every sampled token. The tokens of a stop string and the stop id are among them, while the text is
cut before the stop string and shows no special token. Those of a prompt are raw: of the model at temperature 1.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sampler.base import Completion, PromptScores
from jaxrl_llm.serve.protocol import Ask
from jaxrl_llm.serve.text import Deltas
from jaxrl_llm.serve.worker import Part
from jaxrl_llm.tokens.stream import TextStream
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import StopReason

__all__ = ["Answer", "DONE", "Stream", "chat", "completion", "encode", "generate", "sse", "without_sample"]

DONE = b"data: [DONE]\n\n"
_REASONS = {"eos": "stop", "stop_string": "stop", "length": "length", "cancelled": "abort"}


def encode(value: Any) -> bytes:
    """JSON, ASCII only, so that no character can end a line of a stream."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What all answers to one request share."""

    ask: Ask
    id: str
    created: int  # Unix time, seconds
    model: str
    fingerprint: str
    tokenizer: Tokenizer

    def head(self, kind: str, version: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "policy_version": version,
        }

    def usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self.ask.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }


def _version(versions: np.ndarray, served: int) -> int:
    """The policy that sampled the last token; a completion without one: the policy that is served."""
    return int(versions[-1]) if len(versions) else served


def finish_reason(completion: Completion) -> str:
    """stop, length, or abort for one that was cancelled on request."""
    return _REASONS[str(completion.stop.value)]


def without_sample(part: Part) -> Part:
    """The last part of a completion whose prompt was only to be scored. Its versions still say who did it."""
    if part.completion is None:
        raise RuntimeError("serve: a completion of one token ends with it.")
    none: dict[str, Any] = {"tokens": part.tokens[:0], "logprobs": part.logprobs[:0], "top_ids": None}
    none["top_logprobs"] = None
    stop = part.completion.stop
    done = dataclasses.replace(
        part.completion, **none, text="", stop=stop if stop is StopReason.CANCELLED else StopReason.LENGTH
    )
    return dataclasses.replace(part, **none, completion=done)


# ------------------------------------------------------------------------------------ log-probs


def _name(tokenizer: Tokenizer, token: int, as_ids: bool) -> str:
    if as_ids:
        return f"token_id:{token}"
    return tokenizer.token_bytes(token).decode("utf-8", errors="replace")


def _beside(part: Part | Completion, t: int, top: int) -> list[tuple[int, float]]:
    """(id, log-prob) of the likeliest tokens in the place of token t."""
    if not top or part.top_ids is None or part.top_logprobs is None:
        return []
    pairs = zip(part.top_ids[t][:top], part.top_logprobs[t][:top], strict=True)
    return [(int(i), float(p)) for i, p in pairs if math.isfinite(p)]  # a suppressed token has none


def _beside_prompt(scores: PromptScores, top: int) -> list[list[tuple[int, float]]]:
    """(id, log-prob) of the likeliest tokens in the place of each token of a prompt."""
    if not top or scores.top_ids is None or scores.top_logprobs is None:
        return [[] for _ in scores.logprobs]
    return [
        [(int(i), float(p)) for i, p in zip(ids[:top], logprobs[:top], strict=True)]
        for ids, logprobs in zip(scores.top_ids, scores.top_logprobs, strict=True)
    ]


def prompt_entries(tokenizer: Tokenizer, prompt: Sequence[int], scores: PromptScores, top: int) -> list[Any]:
    """{token id: {logprob, rank, decoded_token}} of each token of a prompt, itself first; None of the first token."""

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": _name(tokenizer, token, False)}

    entries: list[dict[str, Any] | None] = []
    for t, pairs in enumerate(_beside_prompt(scores, top)):
        own = {str(prompt[t]): entry(prompt[t], float(scores.logprobs[t]), int(scores.ranks[t]))}
        best = {str(i): entry(i, p, rank) for rank, (i, p) in enumerate(pairs, 1) if i != prompt[t]}
        entries.append(own | best)
    return [None, *entries[1:]]


def content(tokenizer: Tokenizer, part: Part | Completion, ask: Ask) -> list[dict[str, Any]]:
    """An entry for each token: {token, logprob, bytes, top_logprobs}."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        name = _name(tokenizer, token, ask.tokens_as_ids)
        return {"token": name, "logprob": logprob, "bytes": list(tokenizer.token_bytes(token))}

    return [
        {
            **entry(int(token), float(logprob)),
            "top_logprobs": [entry(i, p) for i, p in _beside(part, t, ask.top)],
        }
        for t, (token, logprob) in enumerate(zip(part.tokens, part.logprobs, strict=True))
    ]


def _bytes_name(tokenizer: Tokenizer, token: int, as_ids: bool) -> str:
    """As `_name`, but different for different bytes, since names are keys in the older shape."""
    data = tokenizer.token_bytes(token)
    try:
        data.decode()
    except UnicodeDecodeError:
        if not as_ids:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)
    return _name(tokenizer, token, as_ids)


class _Lists:
    """The log-probs of /v1/completions: parallel lists, with offsets into the text."""

    def __init__(self, tokenizer: Tokenizer, ask: Ask):
        self._tokenizer, self._ask = tokenizer, ask
        self._text = TextStream(tokenizer)
        self._offset = 0

    def prompt(self, tokens: Sequence[int], text: str, scores: PromptScores | None) -> dict[str, Any]:
        """The lists of a prompt whose text is shown; what is pushed later comes after it.

        Args:
          scores: None: there are none, since the completion was aborted before it began.
        """
        names = [_bytes_name(self._tokenizer, token, self._ask.tokens_as_ids) for token in tokens]
        stream, offsets, at = TextStream(self._tokenizer), [], 0
        for token in tokens:
            offsets.append(min(at, len(text)))  # a prompt's text may leave out what its tokens spell
            at += len(stream.push(token))
        self._offset = len(text)
        own: list[float | None] = [None] * len(tokens)
        tops: list[dict[str, float] | None] = [None] * len(tokens)
        if scores is not None:
            beside = _beside_prompt(scores, self._ask.top)
            for t in range(1, len(tokens)):
                own[t] = logprob = float(scores.logprobs[t])
                pairs = {_bytes_name(self._tokenizer, i, self._ask.tokens_as_ids): p for i, p in beside[t]}
                tops[t] = {names[t]: logprob} | pairs
        return {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": tops if self._ask.top else None,
            "text_offset": offsets,
        }

    def push(self, part: Part | Completion) -> dict[str, Any]:
        as_ids = self._ask.tokens_as_ids
        names, offsets, tops = [], [], []
        for t, (token, logprob) in enumerate(zip(part.tokens, part.logprobs, strict=True)):
            names.append(_bytes_name(self._tokenizer, int(token), as_ids))
            offsets.append(self._offset)
            self._offset += len(self._text.push(int(token)))
            if self._ask.top:
                pairs = {
                    _bytes_name(self._tokenizer, i, as_ids): p for i, p in _beside(part, t, self._ask.top)
                }
                tops.append({names[-1]: float(logprob)} | pairs)
        return {
            "tokens": names,
            "token_logprobs": [float(p) for p in part.logprobs],
            "top_logprobs": tops if self._ask.top else None,
            "text_offset": offsets,
        }


# ------------------------------------------------------------------------------------ whole answers


def _total(completions: Sequence[Completion]) -> int:
    return sum(len(c.tokens) for c in completions)


def _ids_of(answer: Answer, completion: Completion) -> dict[str, Any]:
    return {"token_ids": completion.tokens.tolist()} if answer.ask.token_ids else {}


def _prompt_ids(answer: Answer) -> dict[str, Any]:
    return {"prompt_token_ids": answer.ask.prompts[0]} if answer.ask.token_ids else {}


def _of_prompt(answer: Answer, number: int, done: Completion) -> dict[str, Any]:
    """The log-probs of a prompt, if they were asked for."""
    ask = answer.ask
    if ask.prompt_logprobs is None:
        return {}
    scores = done.prompt_scores
    if scores is None:  # it was aborted before it began
        return {"prompt_logprobs": None}
    entries = prompt_entries(answer.tokenizer, ask.prompts[number], scores, ask.prompt_logprobs)
    return {"prompt_logprobs": entries}


def chat(answer: Answer, completions: Sequence[Completion], version: int) -> dict[str, Any]:
    """The body of a chat completion."""
    ask, tokenizer = answer.ask, answer.tokenizer
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": done.text, "refusal": None},
            "logprobs": {"content": content(tokenizer, done, ask), "refusal": None} if ask.logprobs else None,
            "finish_reason": finish_reason(done),
            "policy_version": _version(done.versions, version),
            **_ids_of(answer, done),
        }
        for index, done in enumerate(completions)
    ]
    return {
        **answer.head("chat.completion", version),
        "choices": choices,
        "usage": answer.usage(_total(completions)),
        **_prompt_ids(answer),
        **_of_prompt(answer, 0, completions[0]),
    }


def _joined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {name: None if after[name] is None else before[name] + after[name] for name in after}


def _of_completion(
    lists: _Lists, ask: Ask, index: int, row: Part | Completion, begins: bool
) -> dict[str, Any] | None:
    """The log-probs of a completion or of a part of it, with those of a prompt whose text is shown when it `begins`."""
    if not ask.logprobs:
        return None
    if not begins or ask.echo is None:
        return lists.push(row)
    number = index // ask.sampling.n
    prompt = lists.prompt(ask.prompts[number], ask.echo[number], row.prompt_scores)
    return _joined(prompt, lists.push(row))


def completion(answer: Answer, completions: Sequence[Completion], version: int) -> dict[str, Any]:
    """The body of a text completion."""
    ask = answer.ask
    choices = []
    for index, done in enumerate(completions):
        number = index // ask.sampling.n
        ids = {"prompt_token_ids": ask.prompts[number]} if ask.token_ids else {}
        shown = "" if ask.echo is None else ask.echo[number]
        choices.append(
            {
                "index": index,
                "text": shown + (done.text or ""),
                "logprobs": _of_completion(_Lists(answer.tokenizer, ask), ask, index, done, True),
                "finish_reason": finish_reason(done),
                "policy_version": _version(done.versions, version),
                **_ids_of(answer, done),
                **ids,
                **_of_prompt(answer, number, done),
            }
        )
    return {
        **answer.head("text_completion", version),
        "choices": choices,
        "usage": answer.usage(_total(completions)),
    }


def generate(answer: Answer, completions: Sequence[Completion], version: int) -> dict[str, Any]:
    """The body of a generation from token ids: ids, their log-probs, and who sampled each."""
    ask = answer.ask
    choices = [
        {
            "index": index,
            "token_ids": done.tokens.tolist(),
            "logprobs": {"content": content(answer.tokenizer, done, ask)} if ask.logprobs else None,
            "finish_reason": finish_reason(done),
            "policy_version": _version(done.versions, version),
            "policy_versions": done.versions[: len(done.tokens)].tolist(),
            "kv_versions": done.kv_versions[: len(done.tokens)].tolist(),
        }
        for index, done in enumerate(completions)
    ]
    return {
        "request_id": answer.id,
        "model": answer.model,
        "policy_version": version,
        "choices": choices,
        "usage": answer.usage(_total(completions)),
        **_prompt_ids(answer),
        **_of_prompt(answer, 0, completions[0]),
    }


# ------------------------------------------------------------------------------------ streams


class Stream:
    """The chunks of one streamed answer, in the shape of chat or of text completions."""

    def __init__(self, answer: Answer, *, chat: bool):
        ask = answer.ask
        self._answer, self._ask, self._chat = answer, ask, chat
        self._kind = "chat.completion.chunk" if chat else "text_completion"
        self._rows = [Deltas(answer.tokenizer, ask.sampling.stop) for _ in range(ask.completions)]
        self._lists = [_Lists(answer.tokenizer, ask) for _ in range(ask.completions)]
        self._begun = [False] * ask.completions
        self._tokens = 0

    def _chunk(self, choices: list[dict[str, Any]], version: int, usage: Any = None) -> dict[str, Any]:
        body = {**self._answer.head(self._kind, version), "choices": choices}
        return body | ({"usage": usage} if self._ask.include_usage else {})

    def opening(self, version: int) -> Iterator[dict[str, Any]]:
        """Chunks before any token: the roles of chat messages."""
        for index in range(len(self._rows) if self._chat else 0):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunk = self._chunk([choice], version)
            yield chunk | (_prompt_ids(self._answer) if index == 0 else {})

    def push(self, part: Part, version: int) -> dict[str, Any] | None:
        """The chunk of a part of a completion; None when it has nothing to tell."""
        ask, done = self._ask, part.completion
        begins, self._begun[part.index] = not self._begun[part.index], True
        self._tokens += len(part.tokens)
        text = self._rows[part.index].push(part.tokens) if done is None else ""
        if done is not None:
            text = self._rows[part.index].finish(done.text or "")
        if begins and ask.echo is not None:
            text = ask.echo[part.index // ask.sampling.n] + text
        if not (text or done is not None or (len(part.tokens) and (ask.logprobs or ask.token_ids))):
            return None
        choice: dict[str, Any] = {"index": part.index}
        if self._chat:
            choice["delta"] = {"content": text} if text else {}
            entries = content(self._answer.tokenizer, part, ask) if ask.logprobs else None
            choice["logprobs"] = None if entries is None else {"content": entries, "refusal": None}
        else:
            choice["text"] = text
            choice["logprobs"] = _of_completion(self._lists[part.index], ask, part.index, part, begins)
        choice["finish_reason"] = None if done is None else finish_reason(done)
        if ask.token_ids:
            choice["token_ids"] = part.tokens.tolist()
        if done is not None:
            choice["policy_version"] = _version(done.versions, version)
        return self._chunk([choice], version)

    def closing(self, version: int) -> Iterator[dict[str, Any]]:
        """Chunks after the last token: the usage, if it was asked for."""
        if self._ask.include_usage:
            yield self._chunk([], version, self._answer.usage(self._tokens))
