"""What a client asks: JSON bodies, checked, to `Ask` records.

A field that is missing or null has its default. A field of another type or range is refused by name; so is one that
would change what is sampled and is not implemented, and one that nobody knows. Fields that OpenAI's clients send and
that change nothing here are ignored.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import InputError, did_you_mean
from jaxrl_llm.sampler.base import SamplingParams, is_integer
from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = [
    "ApiError",
    "Ask",
    "Limits",
    "Served",
    "parse_chat",
    "parse_completion",
    "parse_generate",
    "parse_json",
]


class ApiError(Exception):
    """An answer other than 200, in the shape that OpenAI's clients read."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """{"error": {message, type, param, code}}."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may ask for, and all together."""

    completions: int = 128  # of one request: prompts x n
    queued: int = 256  # completions that may wait for a slot; what comes then is answered with 429
    body: int = 16 * 2**20  # bytes of a request
    stop: int = 16  # stop strings of a request
    stop_length: int = 256  # characters of a stop string
    top_logprobs: int = 20
    seconds: float = 600.0  # of a request, from its arrival to its last byte
    upload_seconds: float = 30.0  # for the body to arrive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The model behind the server, as far as requests depend on it."""

    name: str  # that clients give as `model`
    tokenizer: Tokenizer
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_context: int  # tokens, prompt and completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """A checked request."""

    prompts: tuple[list[int], ...]
    sampling: SamplingParams
    stream: bool = False
    include_usage: bool = False  # a last chunk of the stream with the number of tokens
    logprobs: bool = False
    top: int = 0  # likeliest tokens to show beside each
    echo: tuple[str, ...] | None = None  # texts of the prompts, to be put in front of the completions
    prompt_logprobs: int | None = (
        None  # likeliest tokens to show beside each of the prompt; None: show nothing of it
    )
    score_only: bool = False  # the one token that the engine samples is not given
    token_ids: bool = False
    tokens_as_ids: bool = False  # "token_id:5" in place of text in log-probs
    priority: int = 0  # of the engine: higher ones go first
    session: str | None = None  # name of the conversation that it continues

    @property
    def completions(self) -> int:
        """Rows of the engine that it takes."""
        return len(self.prompts) * self.sampling.per_prompt


def parse_json(raw: bytes) -> Any:
    """The value of a JSON text.

    Raises:
      ApiError: it is none.
    """

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(raw, parse_constant=refuse)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; send a flat JSON object.") from None
    except ValueError as error:  # not UTF-8, not JSON, a number with thousands of digits
        raise ApiError(400, f"the body is not valid JSON ({error}); send a JSON object.") from None


# ------------------------------------------------------------------------------------ fields

_Good = Callable[[Any], bool]


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    # Compared, since an integer of hundreds of digits has no float.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _ids(value: Any) -> bool:
    return isinstance(value, list) and all(is_integer(v) and 0 <= v < 2**31 for v in value)


def _between(low: int, high: int) -> _Good:
    return lambda value: is_integer(value) and low <= value <= high


_SAMPLED = frozenset(
    "max_tokens temperature top_p top_k min_p stop stop_token_ids min_tokens seed n logit_bias ignore_eos logprobs "
    "prompt_logprobs".split()
)
_COMMON = frozenset(
    "model stream stream_options return_token_ids return_tokens_as_token_ids priority user prompt_cache_key".split()
)
_CHAT = frozenset(
    "messages max_completion_tokens top_logprobs tools tool_choice chat_template_kwargs add_generation_prompt "
    "continue_final_message".split()
)
# Sent by clients; nothing that is sampled depends on them.
_IGNORED = frozenset(
    "store metadata service_tier parallel_tool_calls reasoning_effort verbosity prediction safety_identifier "
    "prompt_cache_retention cache_salt request_id spaces_between_special_tokens detokenize".split()
)
# The same, among the sampling parameters of token-in/token-out generation: about text, or about experts.
_ENGINE = frozenset("skip_special_tokens routed_experts_prompt_start output_kind extra_args".split())
# Not implemented: only the values that mean "off" are taken.
_OFF: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "echo": (False,),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": (),
    "functions": (),
    "function_call": (),
    "audio": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": (),
}
_SKIP: Mapping[str, tuple[Any, ...]] = {"skip_special_tokens": (True,)}


class _Fields:
    """Reads the fields of a JSON object, each with its check."""

    def __init__(
        self, body: Any, known: Collection[str], *, off: Mapping[str, tuple[Any, ...]], prefix: str = ""
    ):
        if not isinstance(body, dict):
            what = prefix.rstrip(".") or "the body"
            raise ApiError(
                400, f"{what} must be a JSON object, got {_shown(body)}.", param=prefix.rstrip(".") or None
            )
        self._body, self._prefix = body, prefix
        for name, value in body.items():
            if name in known or name in _IGNORED or value is None:
                continue
            if name not in off:
                hint = did_you_mean(name, known)
                raise self.error(
                    name, f"{prefix}{name} is not a field of this request.{hint}", code="unknown_field"
                )
            if value not in off[name] or isinstance(value, bool) != isinstance(off[name][0], bool):
                allowed = " or ".join([*map(json.dumps, off[name]), "null"])
                raise self.error(
                    name,
                    f"{prefix}{name} must be {allowed}, got {_shown(value)}: this server has no other.",
                    code="unsupported",
                )

    def error(self, name: str, message: str, code: str | None = None) -> ApiError:
        return ApiError(400, message, param=self._prefix + name, code=code)

    def get(self, name: str, good: _Good, allowed: str, default: Any = None) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        if not good(value):
            raise self.error(name, f"{self._prefix}{name} must be {allowed}, got {_shown(value)}.")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        return self.get(name, _boolean, "true or false", default)

    def required(self, name: str, good: _Good, allowed: str) -> Any:
        if self._body.get(name) is None:
            raise self.error(name, f"{self._prefix}{name} is missing; it must be {allowed}.")
        return self.get(name, good, allowed)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------------------------------ sampling


def _stop(fields: _Fields, limits: Limits) -> tuple[str, ...]:
    def good(value: Any) -> bool:
        values = [value] if isinstance(value, str) else value
        return (
            isinstance(values, list)
            and len(values) <= limits.stop
            and all(isinstance(v, str) and 0 < len(v) <= limits.stop_length for v in values)
        )

    allowed = f"a text, or a list of at most {limits.stop}, of 1 to {limits.stop_length} characters each"
    value = fields.get("stop", good, allowed, [])
    return (value,) if isinstance(value, str) else tuple(value)


def _bias(fields: _Fields, served: Served) -> tuple[tuple[int, float], ...]:
    def good(value: Any) -> bool:
        return isinstance(value, dict) and all(
            re.fullmatch(r"\d{1,9}", key) and int(key) < served.vocab_size and _number(v) and abs(v) <= 100
            for key, v in value.items()
        )

    allowed = f"an object from token ids, below {served.vocab_size}, to numbers in [-100, 100]"
    return tuple((int(k), float(v)) for k, v in fields.get("logit_bias", good, allowed, {}).items())


def _prompt_logprobs(fields: _Fields, limits: Limits, *, stream: bool) -> int | None:
    allowed = f"a count in [0, {limits.top_logprobs}]: this server lists no more tokens"
    wanted = fields.get("prompt_logprobs", _between(0, limits.top_logprobs), allowed)
    if wanted is not None and stream:
        raise fields.error(
            "prompt_logprobs",
            "prompt_logprobs are not streamed; leave stream out, or use echo and logprobs of /v1/completions.",
        )
    return wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What decides how much is sampled and what is said of the prompt."""

    default: int | None  # tokens when the request says nothing; None: what the context has room for
    top: int  # likeliest tokens at each sampled one
    most: str = "max_tokens"  # the field that limits the tokens
    prompt_top: int | None = None  # likeliest tokens at each of the prompt; None: no log-probs of it
    may_score: bool = False  # whether no token at all may be asked for


def _sampling(
    fields: _Fields, served: Served, limits: Limits, prompts: Sequence[Sequence[int]], want: _Wanted
) -> tuple[SamplingParams, bool]:
    """Also says whether the prompts are only to be scored. The engine has to sample a token all the same."""
    most = want.most if fields.get(want.most, lambda _: True, "") is not None else "max_tokens"
    room = served.max_context - min(map(len, prompts))
    least = "at least 0" if want.may_score else "at least 1; 0 goes with echo or prompt_logprobs"
    wanted = fields.get(
        most, _between(0 if want.may_score else 1, 2**31 - 1), f"a count of {least}", want.default or room
    )
    n = fields.get("n", _between(1, 2**31 - 1), "a count of at least 1", 1)
    if n * len(prompts) > limits.completions:
        raise fields.error(
            "n",
            f"n: {n} completions of {len(prompts)} prompts are {n * len(prompts)}; one request may have "
            f"{limits.completions}. Send several requests.",
        )
    stop_ids = fields.get("stop_token_ids", _ids, "a list of token ids", [])
    outside = [i for i in stop_ids if i >= served.vocab_size]
    if outside:
        raise fields.error(
            "stop_token_ids", f"stop_token_ids must be below {served.vocab_size}, got {_shown(outside)}."
        )
    eos = () if fields.flag("ignore_eos") else served.eos_ids
    top_k = fields.get("top_k", _between(-1, 2**31 - 1), "0 or -1 (off), or a positive count", 0)
    try:
        sampling = SamplingParams(
            max_tokens=min(max(wanted, 1), room),
            temperature=fields.get("temperature", _number, "a number", 1.0),
            top_p=fields.get("top_p", _number, "a number", 1.0),
            top_k=max(top_k, 0),
            min_p=fields.get("min_p", _number, "a number", 0.0),
            n=n,
            stop=_stop(fields, limits),
            stop_ids=(*eos, *(i for i in dict.fromkeys(stop_ids) if i not in eos)),
            min_tokens=fields.get("min_tokens", _between(0, 2**31 - 1), "a count", 0),
            # Without a seed, each request draws anew.
            seed=fields.get(
                "seed", _between(-(2**63), 2**63 - 1), "an integer of 64 bits", secrets.randbits(63)
            ),
            top_logprobs=min(want.top, served.vocab_size),
            prompt_logprobs=want.prompt_top is not None,
            prompt_top_logprobs=min(want.prompt_top or 0, served.vocab_size),
            logit_bias=_bias(fields, served),
        )
    except InputError as error:
        found = re.match(r"SamplingParams: (\w+)", str(error))
        name = {"max_tokens": most, "stop_ids": "stop_token_ids"}.get(found[1], found[1]) if found else ""
        message = re.sub(r"^SamplingParams: \w+", name, str(error)) if found else str(error)
        raise fields.error(name, message) from None
    return sampling, wanted == 0


def _options(fields: _Fields) -> dict[str, Any]:
    """The fields that chat and completions share."""
    stream = fields.flag("stream")
    options = fields.get("stream_options", lambda v: isinstance(v, dict), "an object", {})
    usage = options.get("include_usage", False)
    if not _boolean(usage) and usage is not None:
        raise fields.error(
            "stream_options", f"stream_options.include_usage must be true or false, got {_shown(usage)}."
        )
    return {
        "stream": stream,
        "include_usage": bool(usage),
        "token_ids": fields.flag("return_token_ids"),
        "tokens_as_ids": fields.flag("return_tokens_as_token_ids"),
        "priority": _priority(fields),
        "session": _session(fields),
    }


def _session(fields: _Fields) -> str | None:
    # OpenAI's field for requests that begin alike; the turns of a conversation have the same one.
    return fields.get("prompt_cache_key", _text, "a text")


def _priority(fields: _Fields) -> int:
    # Clients number places in a queue, as vLLM does: the lower, the earlier.
    return -fields.get("priority", _between(-(2**31), 2**31 - 1), "an integer", 0)


def _check_model(fields: _Fields, served: Served) -> None:
    name = fields.get("model", _text, "a text", served.name)
    if name != served.name:
        raise ApiError(
            404,
            f"the model {name!a} does not exist; this server has {served.name!a}.",
            param="model",
            code="model_not_found",
        )


def _check_prompts(name: str, prompts: Sequence[Sequence[int]], served: Served) -> None:
    for prompt in prompts:
        if not prompt:
            raise ApiError(400, f"{name} has no token; give at least one.", param=name)
        if max(prompt) >= served.vocab_size:
            raise ApiError(
                400,
                f"{name} has the token id {max(prompt)}; the vocabulary has {served.vocab_size}.",
                param=name,
            )
        if len(prompt) >= served.max_context:
            raise ApiError(
                400,
                f"This model's maximum context length is {served.max_context} tokens, prompt and completion, and {name} "
                f"has {len(prompt)}. Shorten it to at most {served.max_context - 1}.",
                param=name,
                code="context_length_exceeded",
            )


# ------------------------------------------------------------------------------------ requests


def parse_completion(body: Any, served: Served, limits: Limits) -> Ask:
    """POST /v1/completions.

    Raises:
      ApiError: says which field is wrong and what is allowed.
    """
    fields = _Fields(body, _SAMPLED | _COMMON | {"prompt", "echo"}, off={**_OFF, **_SKIP})
    _check_model(fields, served)
    options = _options(fields)

    def good(value: Any) -> bool:
        if isinstance(value, list) and value and not _ids(value):
            return all(map(_text, value)) or all(v and _ids(v) for v in value)
        return _text(value) or (bool(value) and _ids(value))

    given = fields.required(
        "prompt", good, "a text, a list of token ids, or a list of texts or of lists of ids"
    )
    many = isinstance(given, list) and not is_integer(given[0])
    if many and len(given) > limits.completions:
        raise fields.error(
            "prompt", f"prompt: {len(given)} prompts; one request may have {limits.completions} completions."
        )
    prompts = tuple(_tokens(p, served) for p in (given if many else [given]))
    _check_prompts("prompt", prompts, served)
    top = fields.get("logprobs", _between(0, limits.top_logprobs), f"a count in [0, {limits.top_logprobs}]")
    echo = fields.flag("echo")
    of_prompt = _prompt_logprobs(fields, limits, stream=options["stream"])
    shown = [count for count in (of_prompt, top if echo else None) if count is not None]
    want = _Wanted(
        default=16, top=top or 0, prompt_top=max(shown, default=None), may_score=echo or of_prompt is not None
    )
    sampling, score_only = _sampling(fields, served, limits, prompts, want)
    texts = None
    if echo:
        asked = given if many else [given]
        texts = tuple(p if isinstance(p, str) else served.tokenizer.decode(p) for p in asked)
    return Ask(
        prompts=prompts,
        sampling=sampling,
        logprobs=top is not None,
        top=top or 0,
        echo=texts,
        prompt_logprobs=of_prompt,
        score_only=score_only,
        **options,
    )


def _tokens(prompt: str | list[int], served: Served) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    try:
        return served.tokenizer.encode(prompt, add_bos=True)
    except InputError as error:
        raise ApiError(400, str(error), param="prompt") from None


def parse_chat(body: Any, served: Served, limits: Limits) -> Ask:
    """POST /v1/chat/completions.

    Raises:
      ApiError: says which field is wrong and what is allowed.
    """
    fields = _Fields(body, _SAMPLED | _COMMON | _CHAT, off={**_OFF, **_SKIP})
    _check_model(fields, served)
    options = _options(fields)
    logprobs = fields.flag("logprobs")
    top = fields.get(
        "top_logprobs", _between(0, limits.top_logprobs), f"a count in [0, {limits.top_logprobs}]", 0
    )
    if top and not logprobs:
        raise fields.error("top_logprobs", "top_logprobs needs logprobs to be true.")
    prompt = _conversation(fields, served)
    _check_prompts("messages", [prompt], served)
    of_prompt = _prompt_logprobs(fields, limits, stream=options["stream"])
    want = _Wanted(
        default=None,
        top=top,
        most="max_completion_tokens",
        prompt_top=of_prompt,
        may_score=of_prompt is not None,
    )
    sampling, score_only = _sampling(fields, served, limits, [prompt], want)
    return Ask(
        prompts=(prompt,),
        sampling=sampling,
        logprobs=logprobs,
        top=top,
        prompt_logprobs=of_prompt,
        score_only=score_only,
        **options,
    )


_TEMPLATE_ARGUMENTS = frozenset(
    "self messages template tools default_system add_generation_prompt continue_final_message".split()
)


def _conversation(fields: _Fields, served: Served) -> list[int]:
    messages = fields.required("messages", lambda v: isinstance(v, list) and bool(v), "a list of messages")
    turns = [_message(fields, f"messages[{i}]", message) for i, message in enumerate(messages)]
    tools = fields.get(
        "tools",
        lambda v: isinstance(v, list) and all(isinstance(t, dict) for t in v),
        "a list of objects {type, function}",
    )
    choice = fields.get(
        "tool_choice", lambda v: v in ("auto", "none"), '"auto" or "none": calls cannot be forced', "auto"
    )
    variables = fields.get(
        "chat_template_kwargs",
        lambda v: isinstance(v, dict) and not _TEMPLATE_ARGUMENTS & v.keys(),
        f"an object without {', '.join(sorted(_TEMPLATE_ARGUMENTS))}",
        {},
    )
    begun = fields.flag("continue_final_message")
    try:
        return served.tokenizer.chat(
            turns,
            fields.flag("add_generation_prompt", not begun),
            begun,
            tools=tools or None if choice == "auto" else None,
            **variables,
        )
    except InputError as error:
        raise fields.error("continue_final_message" if begun else "messages", str(error)) from None


def _message(fields: _Fields, at: str, message: Any) -> dict[str, Any]:
    """A message as chat templates expect it: the content one text, the arguments of tool calls objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise fields.error(
            "messages", f"{at} must be an object with role and content, got {_shown(message)}."
        )
    content = message.get("content")
    if isinstance(content, list):
        wrong = [p for p in content if not isinstance(p, dict) or not isinstance(p.get("text"), str)]
        if wrong:
            raise fields.error(
                "messages",
                f'{at}.content may have parts {{"type": "text", "text": …}} only, got {_shown(wrong[0])}.',
            )
        content = "".join(part["text"] for part in content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise fields.error(
            "messages", f"{at}.content must be a text or a list of parts, got {_shown(content)}."
        )
    calls = message.get("tool_calls")
    if calls is None:
        return {**message, "content": content}
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise fields.error("messages", f"{at}.tool_calls must be a list of objects, got {_shown(calls)}.")
    return {**message, "content": content, "tool_calls": [_with_arguments(call) for call in calls]}


def _with_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (
        ValueError,
        RecursionError,
    ):  # what a model wrote need not be JSON; the template shows it as it is
        return call
    if not isinstance(arguments, dict):  # null, 42 or a list: templates go through the names of arguments
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def parse_generate(body: Any, served: Served, limits: Limits) -> Ask:
    """POST /inference/v1/generate: token ids in, token ids out.

    Raises:
      ApiError: says which field is wrong and what is allowed.
    """
    top_level = {"model", "token_ids", "sampling_params", "priority", "stream", "return_token_ids"}
    top_level |= {"prompt_cache_key"}
    fields = _Fields(body, top_level, off={"features": (), "content_parts": (), "kv_transfer_params": ()})
    _check_model(fields, served)
    if fields.flag("stream"):
        raise fields.error("stream", "stream must be false here; /v1/completions streams token ids.")
    prompt = fields.required("token_ids", lambda v: bool(v) and _ids(v), "a list of token ids")
    _check_prompts("token_ids", [prompt], served)
    inner = fields.get("sampling_params", lambda v: isinstance(v, dict), "an object", {})
    # No text is made, so that special tokens are neither shown nor skipped.
    sampled = _Fields(inner, _SAMPLED | _ENGINE, off=_OFF, prefix="sampling_params.")
    top = sampled.get("logprobs", _between(0, limits.top_logprobs), f"a count in [0, {limits.top_logprobs}]")
    # The sampled token itself is always told; `logprobs: 1` asks for nothing beside it.
    beside = top if top is not None and top > 1 else 0
    of_prompt = _prompt_logprobs(sampled, limits, stream=False)
    want = _Wanted(default=None, top=beside, prompt_top=of_prompt, may_score=of_prompt is not None)
    sampling, score_only = _sampling(sampled, served, limits, [prompt], want)
    return Ask(
        prompts=(prompt,),
        sampling=sampling,
        logprobs=top is not None,
        top=beside,
        prompt_logprobs=of_prompt,
        score_only=score_only,
        token_ids=fields.flag("return_token_ids"),
        tokens_as_ids=True,
        priority=_priority(fields),
        session=_session(fields),
    )
