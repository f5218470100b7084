"""The real client of OpenAI's API against a real engine on the tiny model."""

import asyncio
import math
import re
import socket
import urllib.request

import jax
import numpy as np
import openai
import pytest

from jaxrl_llm.inference import load_weights
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.sampler import Engine
from jaxrl_llm.serve.protocol import Limits, Served
from jaxrl_llm.serve.worker import Worker
from jaxrl_llm.snapshots.store import SnapshotStore, fingerprint
from jaxrl_llm.tokens.tiny import tiny_tokenizer

HI = [{"role": "user", "content": "say something"}]


@pytest.fixture(scope="module")
def place(tiny_params, serving):
    """A server over an engine of 4 slots."""
    tokenizer = tiny_tokenizer()
    engine = Engine(
        TINY,
        slots=4,
        pages=33,
        page_size=16,
        max_context=128,
        tokenizer=tokenizer,
        steps_per_dispatch=4,
        prefill_rows=2,
        prefill_chunk=32,
    )
    print_ = engine.swap(tiny_params, version=3, pages="recompute")
    served = Served(name="tiny", tokenizer=tokenizer, vocab_size=128, eos_ids=TINY.eos_ids, max_context=128)
    worker = Worker(engine, version=3, fingerprint=print_)
    with serving(
        worker,
        served,
        slots=4,
        limits=Limits(queued=60),
        load=lambda path, version: load_weights(path, version, tiny_params),
    ) as place:
        place.engine, place.worker = engine, worker
        yield place


@pytest.fixture(scope="module")
def client(place):
    with openai.OpenAI(base_url=place.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def learner_logprobs(params, prompt, completion, temperature=1.0):
    """Log-probs of the completion's tokens, as the learner computes them."""
    tokens = np.zeros((1, 128), np.int32)  # one length, so that one program is compiled
    end = len(prompt) + len(completion)
    tokens[0, :end] = [*prompt, *completion]
    return np.asarray(token_logprobs(params, TINY, tokens, temperature=temperature))[0, len(prompt) : end]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.max_model_len == 128 and model.policy_version == 3
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.models.retrieve("gpt")


def test_chat_with_logprobs_of_the_policy(client, tiny_params):
    answer = client.chat.completions.with_raw_response.create(
        model="tiny",
        messages=HI,
        max_completion_tokens=12,
        n=2,
        seed=5,
        temperature=0.7,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    assert answer.headers["x-policy-version"] == "3"
    done = answer.parse()
    assert done.policy_version == 3 and len(done.choices) == 2
    prompt = done.prompt_token_ids
    assert prompt == tiny_tokenizer().chat(HI) and done.usage.prompt_tokens == len(prompt)
    assert done.usage.completion_tokens == sum(len(c.token_ids) for c in done.choices)
    assert done.choices[0].token_ids != done.choices[1].token_ids
    for choice in done.choices:
        entries = choice.logprobs.content
        assert choice.message.content == tiny_tokenizer().decode(choice.token_ids)
        expected = learner_logprobs(tiny_params, prompt, choice.token_ids, temperature=0.7)
        np.testing.assert_allclose([e.logprob for e in entries], expected, atol=1e-4)
        assert [bytes(e.bytes) for e in entries] == [
            tiny_tokenizer().token_bytes(t) for t in choice.token_ids
        ]
        assert all(len(e.top_logprobs) == 2 for e in entries)
        for e in entries:
            best = [t.logprob for t in e.top_logprobs]
            assert best == sorted(best, reverse=True) and best[0] >= e.logprob - 1e-5
        assert choice.finish_reason == ("stop" if choice.token_ids[-1] == 2 else "length")
        assert choice.policy_version == 3


def test_a_stream_says_what_the_whole_answer_says(client):
    common = {"model": "tiny", "messages": HI, "max_tokens": 20, "seed": 8, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**common)
    chunks = list(
        client.chat.completions.create(
            **common,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_tokens_as_token_ids": True},
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index, choice in enumerate(whole.choices):
        mine = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
        entries = [e for c in mine if c.logprobs for e in c.logprobs.content]
        assert [e.logprob for e in entries] == [e.logprob for e in choice.logprobs.content]
        assert all(re.fullmatch(r"token_id:\d+", e.token) for e in entries)
        assert len(mine) > 3


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_cut_the_text(client, stream):
    common = {"model": "tiny", "prompt": "begin", "max_tokens": 30, "seed": 1, "logit_bias": {"2": -100}}
    text = client.completions.create(**common).choices[0].text
    assert len(text) == 30
    stop = text[9:12]
    answer = client.completions.create(**common, stop=["nowhere", stop], stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    assert "".join(c.text for c in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


def test_completions_of_many_prompts_in_order(client, tiny_params):
    prompts = [[1, 104, 105], [1, 106], [1, 107, 108, 109]]
    done = client.completions.create(
        model="tiny",
        prompt=prompts,
        n=2,
        max_tokens=6,
        seed=2,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    assert [c.index for c in done.choices] == list(range(6))
    for choice in done.choices:
        prompt = prompts[choice.index // 2]
        assert choice.prompt_token_ids == prompt
        lists = choice.logprobs
        expected = learner_logprobs(tiny_params, prompt, choice.token_ids)
        np.testing.assert_allclose(lists.token_logprobs, expected, atol=1e-4)
        assert len(lists.tokens) == len(lists.text_offset) == len(lists.top_logprobs) == len(choice.token_ids)
        assert lists.text_offset[0] == 0 and all(len(top) in (2, 3) for top in lists.top_logprobs)
        assert all(lists.tokens[t] in top for t, top in enumerate(lists.top_logprobs))


def test_a_seed_repeats_and_none_does_not(client):
    def text(**more):
        common = {"model": "tiny", "prompt": "x", "max_tokens": 16}
        return client.completions.create(**common, **more).choices[0].text

    assert text(seed=4) == text(seed=4) != text(seed=5)
    assert text() != text()
    assert text(temperature=0) == text(temperature=0)


def test_logit_bias_and_min_tokens(client):
    common = {"model": "tiny", "prompt": "x", "max_tokens": 9}
    assert client.completions.create(**common, logit_bias={str(ord("z")): 100}).choices[0].text == "z" * 9
    biased = client.completions.create(**common, logit_bias={"2": 100}, extra_body={"min_tokens": 4})
    assert biased.usage.completion_tokens == 5 and biased.choices[0].finish_reason == "stop"


def test_what_clients_make_of_errors(client):
    with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens") as caught:
        client.completions.create(model="tiny", prompt="x" * 200)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="temperature must be 0") as caught:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=HI)


def test_tools_and_other_fields_of_openai_are_taken(client):
    function = {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}}
    done = client.chat.completions.create(
        model="tiny",
        messages=HI,
        max_tokens=3,
        tools=[{"type": "function", "function": function}],
        tool_choice="auto",
        user="me",
        metadata={"a": "b"},
        parallel_tool_calls=True,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert done.choices[0].message.tool_calls is None and done.usage.completion_tokens <= 3


def check_generated(choice):
    """What the train client of verifiers demands of each choice, or it refuses the whole answer."""
    ids = choice["token_ids"]
    content = choice["logprobs"]["content"]
    assert isinstance(content, list) and len(content) == len(ids) > 0
    for token, entry in zip(ids, content, strict=True):
        assert entry["token"] == f"token_id:{token}"
        assert type(entry["logprob"]) is float and math.isfinite(entry["logprob"])
        assert entry["logprob"] != -9999.0
    assert choice["finish_reason"] in ("stop", "length")


def test_token_ids_in_and_out(place, client, tiny_params):
    prompt = [1, 104, 105]
    body = {
        "model": "tiny",
        "token_ids": prompt,
        "sampling_params": {
            "max_tokens": 20,
            "stop_token_ids": [2],
            "logprobs": 1,
            "skip_special_tokens": False,
            "n": 2,
            "seed": 3,
        },
        "cache_salt": "0",
    }
    answer = client.post(place.url + "/inference/v1/generate", cast_to=object, body=body)
    assert answer["request_id"] and answer["policy_version"] == 3 and "prompt_token_ids" not in answer
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        check_generated(choice)
        assert set(choice["policy_versions"]) == {3} and len(choice["kv_versions"]) == len(
            choice["token_ids"]
        )
        expected = learner_logprobs(tiny_params, prompt, choice["token_ids"])
        np.testing.assert_allclose([e["logprob"] for e in choice["logprobs"]["content"]], expected, atol=1e-4)
    body |= {"return_token_ids": True, "sampling_params": {"max_tokens": 2}}
    answer = client.post(place.url + "/inference/v1/generate", cast_to=object, body=body)
    assert answer["prompt_token_ids"] == prompt and answer["choices"][0]["logprobs"] is None


def test_many_clients_at_once_get_their_own_answers(place):
    async def ask(client, seed):
        done = await client.completions.create(model="tiny", prompt=f"n{seed}", max_tokens=24, seed=seed)
        return done.choices[0].text

    async def ask_all(seeds):
        async with openai.AsyncOpenAI(base_url=place.url + "/v1", api_key="x", max_retries=0) as client:
            together = await asyncio.gather(*(ask(client, seed) for seed in seeds))
            return together, [await ask(client, seed) for seed in seeds]

    together, alone = asyncio.run(ask_all(range(12)))
    assert together == alone and len(set(alone)) == 12


def test_too_many_completions_are_refused_and_clients_see_a_rate_limit(place, client):
    call = {"model": "tiny", "prompt": "x", "max_tokens": 4, "n": 50}
    with urllib.request.urlopen(urllib.request.Request(place.url + "/pause", method="POST")):
        pass

    async def ask():
        async with openai.AsyncOpenAI(base_url=place.url + "/v1", api_key="x", max_retries=0) as client:
            first = asyncio.create_task(client.completions.create(**call))
            while place.worker.view.queued < 50:
                await asyncio.sleep(0.01)
            with pytest.raises(openai.RateLimitError) as caught:
                await client.completions.create(**call)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            await client.post(place.url + "/resume", cast_to=object)
            return await first

    assert len(asyncio.run(ask()).choices) == 50
    assert len(client.completions.create(**call).choices) == 50


def test_a_killed_client_frees_its_pages(place, eventually):
    before = place.engine.stats.cancelled
    host, port = place.url.removeprefix("http://").split(":")
    body = b'{"prompt": "x", "max_tokens": 120, "n": 4, "stream": true, "ignore_eos": true}'
    with urllib.request.urlopen(urllib.request.Request(place.url + "/pause", method="POST")):
        pass
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        eventually(lambda: place.worker.view.queued == 4)
    eventually(lambda: place.engine.stats.cancelled == before + 4 and not place.engine.busy)
    with urllib.request.urlopen(urllib.request.Request(place.url + "/resume", method="POST")):
        pass
    assert place.engine.free_pages == place.engine.pages and place.engine.running == 0


@pytest.mark.slow
def test_weights_of_a_snapshot_are_served_while_rows_run(place, client, tiny_params, tmp_path, eventually):
    other = init_params(TINY, jax.random.key(9))
    with SnapshotStore(tmp_path / "run" / "snapshots") as store:
        for version, params in ((10, other), (20, tiny_params)):
            meta = {"fingerprint": fingerprint(params), "config": {"objective": "grpo"}}
            store.save(version, {"params": params}, meta)
        store.wait()

    def update(**body):
        return client.post(place.url + "/update_weights", cast_to=object, body=body)

    assert update(snapshot=str(tmp_path / "run"), version=10) == {
        "policy_version": 10,
        "version": 10,
        "fingerprint": fingerprint(other),
    }
    generate = {
        "token_ids": [1, 70],
        "sampling_params": {"max_tokens": 100, "logprobs": 1, "ignore_eos": True},
    }
    answer = client.post(place.url + "/inference/v1/generate", cast_to=object, body=generate)
    (choice,) = answer["choices"]
    assert set(choice["policy_versions"]) == {10}
    expected = learner_logprobs(other, [1, 70], choice["token_ids"])
    np.testing.assert_allclose([e["logprob"] for e in choice["logprobs"]["content"]], expected, atol=1e-4)

    async def swap_under_way():
        async with openai.AsyncOpenAI(base_url=place.url + "/v1", api_key="x", max_retries=0) as client:
            steps = place.worker.view.stats.decode_steps
            path, body = place.url + "/inference/v1/generate", generate
            under_way = asyncio.create_task(client.post(path, cast_to=object, body=body))
            while place.worker.view.stats.decode_steps < steps + 8:
                await asyncio.sleep(0.001)
            await client.post(place.url + "/pause", cast_to=object)
            done = {"snapshot": str(tmp_path / "run"), "pages": "recompute"}
            assert (await client.post(place.url + "/update_weights", cast_to=object, body=done))[
                "version"
            ] == 20
            await client.post(place.url + "/resume", cast_to=object)
            return await under_way

    (choice,) = asyncio.run(swap_under_way())["choices"]
    versions, tokens = np.array(choice["policy_versions"]), choice["token_ids"]
    assert set(versions) == {10, 20} and choice["policy_version"] == 20
    expected = np.where(
        versions == 10,
        learner_logprobs(other, [1, 70], tokens),
        learner_logprobs(tiny_params, [1, 70], tokens),
    )
    np.testing.assert_allclose([e["logprob"] for e in choice["logprobs"]["content"]], expected, atol=1e-4)
    assert client.models.list().data[0].policy_version == 20
    with pytest.raises(openai.BadRequestError, match="There is no snapshot 11"):
        update(snapshot=str(tmp_path / "run"), version=11)
    with pytest.raises(openai.BadRequestError, match="No snapshot at"):
        update(snapshot=str(tmp_path / "nowhere"))


_SAMPLE = re.compile(r'([a-z_]+)(\{[a-z_]+="[^"]*"(?:,[a-z_]+="[^"]*")*\})? ([0-9.e+-]+)')


def test_metrics_can_be_scraped(place, client):
    client.completions.create(model="tiny", prompt="x", max_tokens=4)
    with urllib.request.urlopen(place.url + "/metrics") as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = answer.read().decode().splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    values = {}
    for line in lines:
        if not line.startswith("#"):
            name, labels, value = _SAMPLE.fullmatch(line).groups()
            assert re.sub(r"_(bucket|sum|count)$", "", name) in kinds or name in kinds
            values[name + (labels or "")] = float(value)
    assert values['jaxrl_requests_total{endpoint="/v1/completions",status="200"}'] >= 1
    for name in (
        "completion_tokens_total",
        "prompt_tokens_total",
        "prefilled_tokens_total",
        "pages",
        "slots",
    ):
        assert values[f"jaxrl_{name}"] > 0
    for name in ("time_to_first_token_seconds", "queue_delay_seconds", "request_seconds"):
        assert values[f"jaxrl_{name}_count"] == values[f'jaxrl_{name}_bucket{{le="+Inf"}}'] > 0
    assert values["jaxrl_pages_free"] == values["jaxrl_pages"] and values["jaxrl_completions_open"] == 0
    assert values["jaxrl_pages_lost"] == 0 and values["jaxrl_tasks"] >= 1
    assert values["jaxrl_policy_version"] == place.worker.view.version
    assert kinds["jaxrl_rows_running"] == "gauge"
