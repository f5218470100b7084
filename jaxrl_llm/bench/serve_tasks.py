"""What a load test asks, in every form that the server has, and how the answers are read."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxrl_llm.bench.serve_checks import Choice, Model, Task

__all__ = ["BAD_REQUESTS", "FORMS", "Form", "Streamed", "make_task", "make_tasks", "question", "read_choices"]

Form = Literal["chat", "chat_stream", "completion", "completion_stream", "generate"]
FORMS: tuple[Form, ...] = ("chat", "chat_stream", "completion", "completion_stream", "generate")
_PATHS: Mapping[str, str] = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "generate": "/inference/v1/generate",
}
_WORDS = (
    "the a red cat ran on in hill and sun rain one two five count tell why light moon sing list name".split()
)
# No letter of the names of special tokens, which a stop string finds and the text does not show.
_STOPS = ((".",), ("t",), ("h", "m"), (" i", "ng", "u"), ("never seen",))
# (what, path, body or bytes, status)
BAD_REQUESTS: tuple[tuple[str, str, Any, int], ...] = (
    ("no JSON", "/v1/completions", b'{"prompt": ', 400),
    ("a number for a body", "/v1/chat/completions", 7, 400),
    ("no prompt", "/v1/completions", {}, 400),
    ("no tokens to sample", "/v1/completions", {"prompt": "x", "max_tokens": 0}, 400),
    ("a negative temperature", "/v1/completions", {"prompt": "x", "temperature": -1}, 400),
    ("a misspelt field", "/v1/completions", {"prompt": "x", "max_token": 5}, 400),
    ("too many log-probs", "/v1/completions", {"prompt": "x", "logprobs": 21}, 400),
    ("too long a prompt", "/v1/completions", {"prompt": [5] * 100_000}, 400),
    ("an id beyond the vocabulary", "/inference/v1/generate", {"token_ids": [2**30]}, 400),
    ("no ids", "/inference/v1/generate", {"token_ids": []}, 400),
    ("a message without a role", "/v1/chat/completions", {"messages": [{"content": "x"}]}, 400),
    ("too many choices", "/v1/completions", {"prompt": "x", "n": 100_000}, 400),
    ("another model", "/v1/completions", {"model": "no such model", "prompt": "x"}, 404),
    ("another path", "/v1/nowhere", {}, 404),
    ("an unknown kind of pause", "/pause?mode=later", b"", 400),
    ("an unknown way to update", "/update_weights", {"snapshot": "run", "pages": "some"}, 400),
)


def _message(rng: random.Random, model: Model, tokens: int) -> str:
    """Words that make a prompt of about so many tokens."""
    text = rng.choice(_WORDS)
    while (missing := tokens - len(model.tokenizer.encode(text))) > 0:
        text += "".join(f" {rng.choice(_WORDS)}" for _ in range(1 + missing // 8))
    return text


def make_task(rng: random.Random, model: Model, *, repeatable: bool, beginning: str = "") -> Task:
    """A question of a random length, about a third of them long, with random parameters.

    Args:
      repeatable: with a seed, or greedy; otherwise it may also be drawn anew each time.
      beginning: text that the user turn begins with.
    """
    context = model.max_context
    tokens = rng.choice((1, 4, 10, 20, context // 4, context // 2))
    message = beginning + _message(rng, model, tokens)
    while len(prompt := model.tokenizer.chat([{"role": "user", "content": message}])) > context - 4:
        message = message[: len(message) // 2]
    chosen: dict[str, Any] = {}
    greedy = rng.random() < 0.4
    feature = rng.choice(("plain", "plain", "stop", "stop", "ignore_eos", "min_tokens", "bias", "truncated"))
    if feature == "stop":
        chosen["stop"] = rng.choice(_STOPS)
    elif feature == "ignore_eos":
        chosen["ignore_eos"] = True
    elif feature == "bias":
        chosen["logit_bias"] = ((rng.randrange(3, model.vocab_size), 4.0),)
    elif feature == "truncated" and not greedy:
        chosen |= rng.choice(({"top_p": 0.9}, {"top_k": 20}))
    most = rng.choice((1, 2, 5, 8, 16, 16, 32, 48, context))
    if feature == "min_tokens":
        chosen["min_tokens"] = min(most, 4, context - len(prompt))
    return Task(
        prompt=tuple(prompt),
        message=message,
        max_tokens=most,
        temperature=0.0 if greedy else rng.choice((0.7, 1.0)),
        seed=rng.randrange(2**31) if repeatable or rng.random() < 0.5 else None,
        **chosen,
    )


def make_tasks(rng: random.Random, model: Model, count: int) -> list[Task]:
    """Questions that have one answer each; half of them begin alike, as those of one application do."""
    beginning = _message(rng, model, model.max_context // 4) + " "
    return [
        make_task(rng, model, repeatable=True, beginning=beginning if number % 2 else "")
        for number in range(count)
    ]


def question(
    task: Task,
    form: Form,
    *,
    n: int = 1,
    logprobs: int | None = None,
    ids: bool = True,
    prompts: Sequence[tuple[int, ...]] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Path and body of a request.

    Args:
      n: completions of each prompt.
      logprobs: None, or how many tokens to list beside each, 0 included.
      ids: ask for token ids too; generation from ids always gives them.
      prompts: these in place of the task's own, for the form `completion`.
    """
    kind = form.removesuffix("_stream")
    sampling: dict[str, Any] = {
        "max_tokens": task.max_tokens,
        "temperature": task.temperature,
        "top_p": task.top_p,
        "top_k": task.top_k,
        "seed": task.seed,
        "stop": list(task.stop) or None,
        "ignore_eos": task.ignore_eos,
        "min_tokens": task.min_tokens,
        "logit_bias": {str(token): value for token, value in task.logit_bias} or None,
        "n": n,
    }
    if kind == "generate":
        if logprobs is not None:
            sampling["logprobs"] = max(1, logprobs)
        return _PATHS[kind], {"token_ids": list(task.prompt), "sampling_params": sampling}
    body = {**sampling, "return_token_ids": ids, "return_tokens_as_token_ids": ids}
    if form.endswith("_stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        body["messages"] = [{"role": "user", "content": task.message}]
        if logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": logprobs}
    else:
        body["prompt"] = list(task.prompt) if prompts is None else [list(prompt) for prompt in prompts]
        body["logprobs"] = logprobs
    return _PATHS[kind], body


# ------------------------------------------------------------------------------------ answers


def _named(names: Sequence[str]) -> tuple[int, ...] | None:
    """The ids in names such as "token_id:5"; None when they are texts."""
    if not all(name.startswith("token_id:") for name in names):
        return None
    return tuple(int(name.removeprefix("token_id:")) for name in names)


def _logprobs(value: Any) -> tuple[tuple[float, ...] | None, tuple[int, ...] | None]:
    """(log-probs, tokens beside them) of either shape of OpenAI's."""
    if value is None:
        return None, None
    if "content" in value:
        entries = value["content"]
        return tuple(e["logprob"] for e in entries), _named([e["token"] for e in entries])
    if not len(value["tokens"]) == len(value["token_logprobs"]) == len(value["text_offset"]):
        raise ValueError("the lists of log-probs are of different lengths")
    return tuple(value["token_logprobs"]), _named(value["tokens"])


def _tuple(values: Any) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def read_choices(form: Form, body: Any) -> list[Choice]:
    """The completions of a whole answer.

    Raises:
      KeyError, TypeError, ValueError: it has not the shape of one.
    """
    choices = []
    for choice in body["choices"]:
        logprobs, named = _logprobs(choice["logprobs"])
        text = choice["message"]["content"] if form == "chat" else choice.get("text")
        choices.append(
            Choice(
                index=choice["index"],
                finish_reason=choice["finish_reason"],
                text=text,
                tokens=_tuple(choice.get("token_ids")),
                logprobs=logprobs,
                named=named,
                version=choice["policy_version"],
                versions=_tuple(choice.get("policy_versions")),
            )
        )
    return choices


class Streamed:
    """Puts the events of a streamed answer together."""

    def __init__(self, form: Form):
        self._form = form
        self._parts: dict[int, Choice] = {}
        self.usage: Any = None
        self.ended = False  # the end mark came

    def push(self, event: Any) -> bool:
        """Takes an event, None for the end mark; whether it holds anything that was sampled.

        Raises:
          KeyError, TypeError, ValueError: it has not the shape of one, or comes after the end.
        """
        if self.ended:
            raise ValueError("an event after the end mark")
        if event is None:
            self.ended = True
            return False
        if "error" in event:
            raise ValueError(f"the stream ends with an error: {event['error']}")
        self.usage = event.get("usage") or self.usage
        sampled = False
        for new in event["choices"]:
            before = self._parts.get(new["index"], Choice(index=new["index"], finish_reason=None))
            if before.finish_reason is not None:
                raise ValueError(f"choice {new['index']} goes on after its finish_reason")
            text = (new["delta"].get("content") if self._form == "chat_stream" else new["text"]) or ""
            logprobs, named = _logprobs(new["logprobs"])
            sampled = sampled or bool(text or new.get("token_ids"))
            self._parts[before.index] = dataclasses.replace(
                before,
                finish_reason=new["finish_reason"],
                text=(before.text or "") + text,
                tokens=_joined(before.tokens, _tuple(new.get("token_ids"))),
                logprobs=_joined(before.logprobs, logprobs),
                named=_joined(before.named, named),
                version=new.get("policy_version", before.version),
            )
        return sampled

    def choices(self) -> list[Choice]:
        """The completions, once the end mark has come.

        Raises:
          ValueError: it has not.
        """
        if not self.ended:
            raise ValueError("the stream has no end mark")
        return [self._parts[index] for index in sorted(self._parts)]


def _joined(before: tuple[Any, ...] | None, new: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    return before if new is None else (before or ()) + new
