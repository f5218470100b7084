"""The real client of OpenAI's API against a real engine on the tiny model."""

import asyncio
import math
import re
import socket
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxrl_llm.inference import load_weights
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.decoder import forward, head_weight
from jaxrl_llm.models.params import init_params
from jaxrl_llm.ops.logprobs import token_logprobs
from jaxrl_llm.sampler import Engine, decode
from jaxrl_llm.sampler.replicas import Replicas
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


def dense_logprobs(params, tokens):
    """[P, V], what the learner's forward pass says comes in the place of each token; nothing of the first."""
    batch = jnp.asarray(tokens)[None]
    x = forward(params, TINY, batch, jnp.arange(len(tokens))[None], jnp.ones_like(batch))
    logits = np.asarray(x[0, :-1] @ head_weight(params, TINY), np.float64)
    return np.concatenate([np.zeros((1, 128)), logits - np.log(np.exp(logits).sum(-1, keepdims=True))])


TEXT = "a prompt of more than one page, and more"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_shows_the_prompt_and_its_logprobs(client, tiny_params, stream):
    common = {
        "model": "tiny",
        "max_tokens": 5,
        "n": 2,
        "seed": 3,
        "temperature": 0.7,
        "logit_bias": {"2": -100},
    }
    prompts = [TEXT, "hi"]
    plain = client.completions.create(**common, prompt=prompts, logprobs=2)
    answer = client.completions.create(**common, prompt=prompts, logprobs=2, echo=True, stream=stream)
    choices = [c for chunk in answer for c in chunk.choices] if stream else answer.choices
    for index, expected in enumerate(plain.choices):
        text = prompts[index // 2]
        mine = [c for c in choices if c.index == index]
        assert "".join(c.text for c in mine) == text + expected.text
        assert mine[0].text.startswith(text)

        def told(name, mine=mine):
            return [x for c in mine if c.logprobs is not None for x in getattr(c.logprobs, name)]

        tokens = tiny_tokenizer().encode(text, add_bos=True)
        dense = dense_logprobs(tiny_params, tokens)
        P = len(tokens)
        names, own, tops, offsets = map(told, ("tokens", "token_logprobs", "top_logprobs", "text_offset"))
        assert own[0] is None and tops[0] is None and len(own) == P + 5
        assert names == [tiny_tokenizer().token_bytes(t).decode() for t in tokens] + expected.logprobs.tokens
        np.testing.assert_allclose(own[1:P], dense[np.arange(1, P), tokens[1:]], atol=1e-4)
        assert own[P:] == expected.logprobs.token_logprobs and tops[P:] == expected.logprobs.top_logprobs
        for t in range(1, P):
            assert tops[t][names[t]] == own[t] and len(tops[t]) in (2, 3)
            best = sorted(tops[t].values(), reverse=True)[:2]
            np.testing.assert_allclose(best, np.sort(dense[t])[::-1][:2], atol=1e-4)
        assert offsets == list(range(len(text))) + [len(text) + o for o in expected.logprobs.text_offset]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_and_nothing_is_sampled(client, tiny_params, stream):
    tokens = tiny_tokenizer().encode(TEXT, add_bos=True)
    answer = client.completions.create(
        model="tiny",
        prompt=tokens,
        max_tokens=0,
        echo=True,
        logprobs=0,
        stream=stream,
        extra_body={"stream_options": {"include_usage": True}},
    )
    chunks = list(answer) if stream else [answer]
    (choice,) = (c for chunk in chunks for c in chunk.choices)
    assert choice.text == TEXT and choice.finish_reason == "length" and choice.policy_version == 3
    assert len(choice.logprobs.tokens) == len(tokens) and choice.logprobs.top_logprobs is None
    dense = dense_logprobs(tiny_params, tokens)
    expected = dense[np.arange(1, len(tokens)), tokens[1:]]
    np.testing.assert_allclose(choice.logprobs.token_logprobs[1:], expected, atol=1e-4)
    assert chunks[-1].usage.completion_tokens == 0 and chunks[-1].usage.prompt_tokens == len(tokens)
    plain = client.completions.create(model="tiny", prompt="hi", max_tokens=2, echo=True, stream=stream)
    choices = [c for chunk in plain for c in chunk.choices] if stream else plain.choices
    assert "".join(c.text for c in choices).startswith("hi") and choices[0].logprobs is None


@pytest.mark.parametrize("most", [0, 3])
def test_prompt_logprobs_wherever_a_prompt_is_given(place, client, tiny_params, most):
    tokens = tiny_tokenizer().chat(HI)
    more = {"prompt_logprobs": 2}
    chat = client.chat.completions.create(model="tiny", messages=HI, max_tokens=most, extra_body=more)
    both = client.completions.create(
        model="tiny", prompt=[tokens, tokens[:4]], n=2, max_tokens=most, extra_body=more
    )
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": most, "prompt_logprobs": 2}}
    ids = client.post(place.url + "/inference/v1/generate", cast_to=object, body=body)
    assert len(ids["choices"][0]["token_ids"]) == len(ids["choices"][0]["policy_versions"]) <= most
    assert chat.choices[0].message.content is not None and chat.usage.completion_tokens <= most
    dense = dense_logprobs(tiny_params, tokens)
    for entries, P in (
        (chat.prompt_logprobs, len(tokens)),
        (ids["prompt_logprobs"], len(tokens)),
        (both.choices[1].prompt_logprobs, len(tokens)),
        (both.choices[2].prompt_logprobs, 4),
    ):
        assert len(entries) == P and entries[0] is None
        for t, entry in enumerate(entries[1:], 1):
            assert next(iter(entry)) == str(tokens[t]) and len(entry) in (2, 3)
            for id, told in entry.items():
                assert told["decoded_token"] == tiny_tokenizer().token_bytes(int(id)).decode(errors="replace")
                assert told["rank"] == 1 + (dense[t] > dense[t, int(id)] + 1e-6).sum()
                assert abs(told["logprob"] - dense[t, int(id)]) < 1e-4
            assert {told["rank"] for told in entry.values()} >= {1, 2}


@pytest.mark.slow
def test_after_the_warm_up_nothing_is_compiled_for_most_requests(tiny_params, serving):
    tokenizer = tiny_tokenizer()
    engine = Engine(
        TINY, slots=3, pages=25, page_size=16, max_context=64, tokenizer=tokenizer, prefill_rows=3
    )
    print_ = engine.swap(tiny_params, version=0, pages="recompute")
    served = Served(name="tiny", tokenizer=tokenizer, vocab_size=128, eos_ids=TINY.eos_ids, max_context=64)
    with serving(Worker(engine, version=0, fingerprint=print_), served, slots=3, warm_up=True) as place:
        assert place.ready.wait(120)
        programs = [f._cache_size() for f in (decode.prefill, decode._generate, decode.duplicate_pages)]
        with openai.OpenAI(base_url=place.url + "/v1", api_key="any", max_retries=0) as client:
            for more in ({"temperature": 0.5}, {"top_p": 0.5}, {"echo": True, "logprobs": 0}, {"n": 3}):
                client.completions.create(model="tiny", prompt="a text of some length", max_tokens=9, **more)
        assert programs == [
            f._cache_size() for f in (decode.prefill, decode._generate, decode.duplicate_pages)
        ]


@pytest.mark.slow
def test_replicas_answer_as_one_engine_and_keep_conversations(client, tiny_params, serving):
    tokenizer = tiny_tokenizer()
    options = dict(page_size=16, max_context=128, tokenizer=tokenizer, steps_per_dispatch=4, prefill_rows=2)
    engine = Replicas(TINY, jax.devices()[:2], slots=4, pages=33, prefill_chunk=32, **options)
    print_ = engine.swap(tiny_params, version=3, pages="recompute")
    served = Served(name="tiny", tokenizer=tokenizer, vocab_size=128, eos_ids=TINY.eos_ids, max_context=128)
    worker = Worker(engine, version=3, fingerprint=print_)
    with serving(worker, served, slots=8, replicas=2, warm_up=True) as place:
        assert place.ready.wait(120)
        warm = [e.stats.completions for e in engine.engines]
        assert warm == [3, 3]  # each has compiled its programs
        with openai.OpenAI(base_url=place.url + "/v1", api_key="any", max_retries=0) as many:
            common = {"model": "tiny", "prompt": ["a", "b", "c", "d"], "seed": 4, "max_tokens": 8}
            texts = [c.text for c in many.completions.create(**common).choices]
            assert texts == [c.text for c in client.completions.create(**common).choices]
            assert [e.stats.completions - n for e, n in zip(engine.engines, warm, strict=True)] == [2, 2]
            for turn in ("one", "two", "three"):  # texts that have nothing in common
                more = {"prompt_cache_key": "talk"}
                many.completions.create(model="tiny", prompt=turn, max_tokens=2, extra_body=more)
            given = [e.stats.completions - n for e, n in zip(engine.engines, warm, strict=True)]
            assert given == [5, 2]
        assert worker.view.pages == 64 and worker.view.stats.slots == 8


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
    client.completions.create(model="tiny", prompt="xyz", max_tokens=4)
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
