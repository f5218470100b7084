"""What is answered: completions in the shapes of OpenAI's API and of token-in/token-out generation.

Log-probs are the sampler's: natural, under the exact distribution that the token was drawn from (raw for greedy
decoding), one for every sampled token. The tokens of a stop string and the stop id are among them, while the text is
cut before the stop string and shows no special token.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.sampler.base import Completion
from jaxrl_llm.serve.protocol import Ask
from jaxrl_llm.serve.text import Deltas
from jaxrl_llm.serve.worker import Part
from jaxrl_llm.tokens.stream import TextStream
from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = ["Answer", "DONE", "Stream", "chat", "completion", "encode", "generate", "sse"]

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
    }


def completion(answer: Answer, completions: Sequence[Completion], version: int) -> dict[str, Any]:
    """The body of a text completion."""
    ask = answer.ask
    choices = []
    for index, done in enumerate(completions):
        ids = {"prompt_token_ids": ask.prompts[index // ask.sampling.n]} if ask.token_ids else {}
        choices.append(
            {
                "index": index,
                "text": done.text,
                "logprobs": _Lists(answer.tokenizer, ask).push(done) if ask.logprobs else None,
                "finish_reason": finish_reason(done),
                "policy_version": _version(done.versions, version),
                **_ids_of(answer, done),
                **ids,
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
            "policy_versions": done.versions.tolist(),
            "kv_versions": done.kv_versions.tolist(),
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
        self._tokens += len(part.tokens)
        text = self._rows[part.index].push(part.tokens) if done is None else ""
        if done is not None:
            text = self._rows[part.index].finish(done.text or "")
        if not (text or done is not None or (len(part.tokens) and (ask.logprobs or ask.token_ids))):
            return None
        choice: dict[str, Any] = {"index": part.index}
        if self._chat:
            choice["delta"] = {"content": text} if text else {}
            entries = content(self._answer.tokenizer, part, ask) if ask.logprobs else None
            choice["logprobs"] = None if entries is None else {"content": entries, "refusal": None}
        else:
            choice["text"] = text
            choice["logprobs"] = self._lists[part.index].push(part) if ask.logprobs else None
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
