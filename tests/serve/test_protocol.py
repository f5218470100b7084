"""What may be asked: fields, their types and ranges, and what becomes of them."""

import copy
import dataclasses

import pytest

from jaxrl_llm.serve import metrics
from jaxrl_llm.serve.protocol import (
    ApiError,
    Limits,
    Served,
    parse_chat,
    parse_completion,
    parse_generate,
    parse_json,
)
from jaxrl_llm.tokens.tiny import tiny_tokenizer

LIMITS = Limits(completions=8)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served():
    return Served(name="tiny", tokenizer=tiny_tokenizer(), vocab_size=128, eos_ids=(2,), max_context=64)


def refusal(parse, body, served):
    with pytest.raises(ApiError) as caught:
        parse(body, served, LIMITS)
    assert caught.value.status in (400, 404)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value", "parts"),
    [
        ("max_tokens", 0, ["max_tokens must be a count of at least 1; 0 goes with echo or prompt_logprobs"]),
        ("prompt_logprobs", -1, ["prompt_logprobs must be a count in [0, 20]", "-1"]),
        ("prompt_logprobs", True, ["prompt_logprobs must be a count"]),
        ("echo", True, ["echo must be false or null"]),
        ("max_tokens", "9", ['"9"']),
        ("max_completion_tokens", 1.5, ["max_completion_tokens", "1.5"]),
        ("temperature", -1, ["temperature must be 0 (greedy) or in [0.001, 1000]", "-1"]),
        ("temperature", "hot", ["temperature must be a number"]),
        ("top_p", 0, ["top_p must be in (0, 1]"]),
        ("top_k", -2, ["top_k must be 0 or -1 (off)"]),
        ("min_p", 2, ["min_p must be in [0, 1]"]),
        ("n", 9, ["9 completions of 1 prompts", "8"]),
        ("n", True, ["n must be a count"]),
        ("seed", 2**63, ["seed must be an integer of 64 bits"]),
        ("stop", "", ["stop must be a text"]),
        ("stop", ["a"] * 17, ["at most 16"]),
        ("stop", [1], ["stop must be"]),
        ("stop_token_ids", [-1], ["stop_token_ids must be a list of token ids"]),
        ("stop_token_ids", [128], ["below 128"]),
        ("min_tokens", 70, ["min_tokens must be in [0, max_tokens="]),
        ("logit_bias", {"x": 1}, ["logit_bias must be an object from token ids, below 128"]),
        ("logit_bias", {"128": 1}, ["logit_bias"]),
        ("logit_bias", {"5": 101}, ["[-100, 100]"]),
        ("logit_bias", {"5": 10**400}, ["[-100, 100]"]),
        ("temperature", 10**400, ["temperature must be a number, got 1000"]),
        ("stream", "yes", ["stream must be true or false"]),
        ("stream_options", {"include_usage": 1}, ["include_usage must be true or false"]),
        ("logprobs", 3, ["logprobs must be true or false"]),
        ("top_logprobs", 2, ["needs logprobs to be true"]),
        ("tool_choice", "required", ["calls cannot be forced"]),
        ("tools", [1], ["tools must be a list of objects"]),
        ("chat_template_kwargs", {"template": "x"}, ["an object without", "template"]),
        ("chat_template_kwargs", {"self": 1}, ["an object without"]),
        ("frequency_penalty", 0.5, ["frequency_penalty must be 0 or null"]),
        ("response_format", {"type": "json_object"}, ['{"type": "text"}']),
        ("best_of", True, ["best_of must be 1"]),
        ("guided_json", {"type": "object"}, ["guided_json must be null"]),
        ("chat_template", "{{ 1 }}", ["chat_template must be null"]),
        ("skip_special_tokens", False, ["skip_special_tokens must be true"]),
        ("temprature", 0.5, ["temprature is not a field of this request", "Did you mean temperature?"]),
        ("messages", [], ["messages must be a list of messages"]),
        ("messages", None, ["messages is missing"]),
        ("messages", ["hi"], ["messages[0] must be an object with role and content"]),
        ("messages", [{"role": "user", "content": 1}], ["messages[0].content must be a text"]),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ["messages[0].content may have parts"],
        ),
        ("messages", [{"role": "user", "content": "x" * 90}], ["maximum context length is 64 tokens"]),
        ("messages", [{"role": "user", "content": "\ud800"}], ["half of a surrogate pair"]),
        ("continue_final_message", True, ["continue_final_message needs a last message with role assistant"]),
    ],
)
def test_a_wrong_field_is_refused_by_name(served, field, value, parts):
    error = refusal(parse_chat, {"messages": HI, field: value}, served)
    assert error.param == field
    assert all(part in str(error) for part in parts), str(error)
    assert error.body["error"].keys() == {"message", "type", "param", "code"}


def test_another_model_does_not_exist(served):
    error = refusal(parse_chat, {"messages": HI, "model": "gpt"}, served)
    assert error.status == 404 and error.code == "model_not_found" and "'tiny'" in str(error)


@pytest.mark.parametrize("body", [[], "x", 1, None])
def test_a_body_is_an_object(served, body):
    for parse in (parse_chat, parse_completion, parse_generate):
        assert "must be a JSON object" in str(refusal(parse, body, served))


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"\xff", b'{"a": NaN}', b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"]
)
def test_a_body_is_json(raw):
    with pytest.raises(ApiError, match="valid JSON|nested too deeply"):
        parse_json(raw)


def test_fields_become_the_sampling_distribution(served):
    body = {
        "model": "tiny",
        "messages": HI,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "n": 3,
        "stop": "x",
        "stop_token_ids": [5, 2, 5],
        "min_tokens": 2,
        "seed": 11,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "priority": -4,
        "user": "somebody",
        "store": False,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
    }
    ask = parse_chat(body, served, LIMITS)
    s = ask.sampling
    assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p) == (7, 0.5, 0.9, 0, 0.1)
    assert (s.n, s.stop, s.stop_ids, s.min_tokens, s.seed) == (3, ("x",), (2, 5), 2, 11)
    assert ask.top == 3 and s.top_logprobs == 3 and ask.logprobs and ask.completions == 3
    assert ask.stream and ask.include_usage and ask.token_ids and ask.priority == 4
    assert ask.prompts[0] == tiny_tokenizer().chat(HI)
    assert parse_chat({"messages": HI, "ignore_eos": True}, served, LIMITS).sampling.stop_ids == ()


def test_without_a_limit_the_context_is_one(served):
    prompt = len(tiny_tokenizer().chat(HI))
    assert parse_chat({"messages": HI}, served, LIMITS).sampling.max_tokens == 64 - prompt
    assert parse_chat({"messages": HI, "max_tokens": 900}, served, LIMITS).sampling.max_tokens == 64 - prompt
    assert parse_completion({"prompt": "hi"}, served, LIMITS).sampling.max_tokens == 16


def test_requests_without_a_seed_differ(served):
    seeds = {parse_chat({"messages": HI}, served, LIMITS).sampling.seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ([104, 105],)),
        ([7, 8], ([7, 8],)),
        (["a", "b"], ([97], [98])),
        ([[7], [8, 9]], ([7], [8, 9])),
    ],
)
def test_prompts_of_every_form(served, prompt, prompts):
    ask = parse_completion({"prompt": prompt, "n": 2}, served, LIMITS)
    assert ask.prompts == prompts and ask.completions == 2 * len(prompts)


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", [1]], [-1], [True], 5, {}, [128], "", [1.0]])
def test_prompts_of_no_form(served, prompt):
    assert refusal(parse_completion, {"prompt": prompt}, served).param == "prompt"


def test_content_in_parts_and_arguments_of_calls_reach_the_template(bytes_tokenizer, served):
    served = dataclasses.replace(
        served, tokenizer=bytes_tokenizer, vocab_size=bytes_tokenizer.vocab_size, max_context=500
    )
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "how "}, {"type": "text", "text": "is it?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    body = {"messages": messages, "tools": tools, "chat_template_kwargs": {"mark": "!"}}

    def text(**more):
        return bytes_tokenizer.decode(parse_chat(body | more, served, LIMITS).prompts[0], skip_special=False)

    assert text() == (
        "[weather;]<|im_start|>user\nhow is it?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\nRome<|im_start|>assistant\n!"
    )
    assert text(tool_choice="none").startswith("<|im_start|>user")
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    assert text(messages=begun, continue_final_message=True, tools=None).endswith("assistant\nSo")


@pytest.mark.parametrize(
    "arguments,shown",
    [
        ('{"city": "Oslo"}', "Oslo"),
        ('{"city": "Oslo"', '"{"city": "Oslo""'),  # cut off
        ("null", '"null"'),
        ("[1,2]", '"[1,2]"'),
        ("42", '"42"'),
        ("", '""'),
    ],
)
def test_u04_only_objects_are_arguments_of_calls(bytes_tokenizer, served, arguments, shown):
    """Everything else that a model wrote is shown as the text that it is."""
    tokenizer = copy.copy(bytes_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{% set a = c.function.arguments %}"
        "{% if a is string %}\"{{ a }}\"{% else %}{{ a['city'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    served = dataclasses.replace(
        served, tokenizer=tokenizer, vocab_size=tokenizer.vocab_size, max_context=500
    )
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    body = {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert tokenizer.decode(parse_chat(body, served, LIMITS).prompts[0]) == shown


def test_token_ids_in(served):
    inner = {
        "max_tokens": 4,
        "stop_token_ids": [7],
        "logprobs": 1,
        "skip_special_tokens": False,
        "temperature": 1.0,
        "routed_experts_prompt_start": 3,
    }
    body = {"model": "tiny", "token_ids": [1, 5], "sampling_params": inner, "cache_salt": "a", "priority": 3}
    ask = parse_generate(body, served, LIMITS)
    assert ask.prompts == ([1, 5],) and ask.sampling.stop_ids == (2, 7) and ask.sampling.max_tokens == 4
    assert (
        ask.logprobs
        and ask.top == ask.sampling.top_logprobs == 0
        and ask.tokens_as_ids
        and ask.priority == -3
    )
    for change, param in (
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": "hi"}, "token_ids"),
        ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
        ({"sampling_params": []}, "sampling_params"),
        ({"stream": True}, "stream"),
        ({"features": {"image": 1}}, "features"),
        ({"messages": HI}, "messages"),
    ):
        assert refusal(parse_generate, body | change, served).param == param


def test_what_is_said_of_the_prompt(served):
    def completion(**more):
        return parse_completion({"prompt": ["hi", "a"]} | more, served, LIMITS)

    def asked(ask):
        return ask.sampling.prompt_logprobs, ask.sampling.prompt_top_logprobs, ask.sampling.top_logprobs

    assert asked(completion()) == (False, 0, 0) and completion().echo is None
    assert completion(echo=True).echo == ("hi", "a") and asked(completion(echo=True)) == (False, 0, 0)
    assert completion(prompt=[104, 105], echo=True).echo == ("hi",)
    assert asked(completion(echo=True, logprobs=0)) == (True, 0, 0)
    assert asked(completion(echo=True, logprobs=2)) == (True, 2, 2)
    assert asked(completion(logprobs=2)) == (False, 0, 2)
    assert asked(completion(echo=True, logprobs=2, prompt_logprobs=5)) == (True, 5, 2)
    assert asked(parse_chat({"messages": HI, "prompt_logprobs": 0}, served, LIMITS)) == (True, 0, 0)
    score = {"max_tokens": 0, "prompt_logprobs": 3}
    for ask in (
        completion(max_tokens=0, echo=True),
        completion(**score),
        parse_chat({"messages": HI} | score, served, LIMITS),
        parse_generate({"token_ids": [5, 6], "sampling_params": score}, served, LIMITS),
    ):
        assert ask.score_only and ask.sampling.max_tokens == 1
    assert not completion(max_tokens=1, echo=True).score_only
    assert (
        refusal(parse_completion, {"prompt": "a", "max_tokens": 0, "echo": False}, served).param
        == "max_tokens"
    )
    error = refusal(parse_completion, {"prompt": "a", "prompt_logprobs": 0, "stream": True}, served)
    assert error.param == "prompt_logprobs" and "use echo and logprobs" in str(error)
    inner = {"sampling_params": {"max_tokens": 0}, "token_ids": [5]}
    assert refusal(parse_generate, inner, served).param == "sampling_params.max_tokens"


def test_metrics_are_in_the_text_format():
    counter = metrics.Counter("a_total", "Things.", ("kind",))
    counter.add(2, kind='q"\\\n')
    histogram = metrics.Histogram("b_seconds", "Time.", bounds=(0.1, 1.0))
    for value in (0.1, 0.5, 5.0):
        histogram.observe(value)
    page = metrics.render([counter, histogram], {"c": ("gauge", "Now.", 0.25)})
    assert page == (
        "# HELP a_total Things.\n# TYPE a_total counter\n"
        'a_total{kind="q\\"\\\\\\n"} 2\n'
        "# HELP b_seconds Time.\n# TYPE b_seconds histogram\n"
        'b_seconds_bucket{le="0.1"} 1\nb_seconds_bucket{le="1.0"} 2\nb_seconds_bucket{le="+Inf"} 3\n'
        "b_seconds_sum 5.6\nb_seconds_count 3\n"
        "# HELP c Now.\n# TYPE c gauge\nc 0.25\n"
    )
