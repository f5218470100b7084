"""`jaxrl bench serve`: what it takes for wrong, and a short run against a server in a process of its own."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random

import pytest

from jaxrl_llm import cli
from jaxrl_llm.bench import serve_load
from jaxrl_llm.bench.http import Connection, events_of, split_url
from jaxrl_llm.bench.serve_checks import (
    Choice,
    Model,
    References,
    Sample,
    Task,
    check_choice,
    check_choices,
    check_growth,
    check_refusal,
    check_rest,
    check_usage,
    growth,
    parse_metrics,
)
from jaxrl_llm.bench.serve_load import Load, Target
from jaxrl_llm.bench.serve_tasks import FORMS, Streamed, make_tasks, question, read_choices
from jaxrl_llm.errors import InputError
from jaxrl_llm.tokens.tiny import tiny_tokenizer

EOS = 2
MODEL = Model(tokenizer=tiny_tokenizer(), vocab_size=128, eos_ids=(EOS,), max_context=64)
TASK = Task(prompt=(1, 104, 105), max_tokens=4, seed=3)


def ids(text):
    return tuple(map(ord, text))


def choice(text, reason="length", tokens=None, **more):
    """A right answer, if `reason` is; its tokens are its characters."""
    tokens = ids(text) if tokens is None else tokens
    common = {"index": 0, "finish_reason": reason, "text": text, "tokens": tokens, "version": 1}
    return Choice(**common, **({"logprobs": (-0.5,) * len(tokens)} | more))


def wrong(found, task=TASK, *, logprobs=True, **more):
    return " | ".join(check_choice(found, task, MODEL, logprobs=logprobs, **more))


STOP = dataclasses.replace(TASK, max_tokens=9, stop=("yz", "#"))


@pytest.mark.parametrize(
    "found, task",
    [
        (choice("abcd"), TASK),
        (choice("ab", "stop", (*ids("ab"), EOS)), TASK),
        (choice("abc", "stop", (*ids("abc"), EOS)), TASK),
        (choice("x", "stop", ids("xyz")), STOP),
        (choice("xyxyxyxyx"), STOP),
        (choice("", tokens=(0, EOS, 1, EOS)), dataclasses.replace(TASK, ignore_eos=True)),
        (choice("a" * 61), dataclasses.replace(TASK, max_tokens=100)),  # to the end of the context
        (choice("a", "stop", (EOS, ord("a"), EOS)), dataclasses.replace(TASK, min_tokens=1)),
        (choice("abcd", named=ids("abcd"), versions=(1, 2, 2, 1)), TASK),
        (Choice(index=0, finish_reason="stop", text="ab", logprobs=(0.0, -1.0, -2.0)), TASK),
    ],
)
def test_right_answers_are_right(found, task):
    assert wrong(found, task) == ""


@pytest.mark.parametrize(
    "found, task, message",
    [
        (choice("abcde"), TASK, "5 tokens, at most 4"),
        (choice("abc"), TASK, "length with 3 of 4 tokens"),
        (choice("abcd", "stop"), TASK, "nothing ends it"),
        (choice("abc", "length", (*ids("abc"), EOS)), TASK, "length with 4 of 4 tokens, and it ended"),
        (choice("abc", "stop", (ord("a"), EOS, *ids("bc"))), TASK, "goes on after token 2 of 4"),
        (choice("abcd", "eos"), TASK, "finish_reason is 'eos'"),
        (choice("abcd", None), TASK, "finish_reason is None"),
        (choice("abxd", tokens=ids("abcd")), TASK, "the text is 'abxd', its tokens say 'abcd'"),
        (choice("xyz", "stop", ids("xyz")), STOP, "holds one of its stop strings"),
        (choice("x", "stop", (*ids("xyz"), ord("a"))), STOP, "goes on after token 3 of 4"),
        (choice("xy", "stop", ids("xy#")), dataclasses.replace(STOP, stop=("never",)), "nothing ends it"),
        (choice("abcd", logprobs=(-1.0,) * 3), TASK, "3 log-probs for 4 tokens"),
        (choice("abcd", logprobs=(-1.0, 0.1, -1.0, -1.0)), TASK, "log-probs that are none: [0.1]"),
        (choice("abcd", logprobs=(-1.0, float("nan"), -1.0, -1.0)), TASK, "log-probs that are none"),
        (choice("abcd", logprobs=None), TASK, "log-probs were asked for"),
        (choice("abcd", named=ids("abce")), TASK, "beside the log-probs are not those"),
        (choice("abcd", versions=(1, 1, 1)), TASK, "3 policy versions for 4 tokens"),
        (choice("abcd", versions=(1, 1, 1, 2)), TASK, "policy_version is 1, of the last token 2"),
        (choice("abcd", tokens=(*ids("abc"), 128)), TASK, "outside [0, 128)"),
        (Choice(index=0, finish_reason="length", text="a", logprobs=(-1.0,) * 5), TASK, "5 log-probs for 4"),
    ],
)
def test_wrong_answers_are_told(found, task, message):
    assert message in wrong(found, task)


def test_log_probs_that_nobody_asked_for_and_aborts_that_nobody_ordered():
    assert "log-probs were not asked for" in wrong(choice("abcd"), logprobs=False)
    aborted = choice("ab", "abort")
    assert wrong(aborted, aborted=True) == "" and "finish_reason is 'abort'" in wrong(aborted)


def test_choices_are_counted():
    two = [choice("abcd"), dataclasses.replace(choice("abcd"), index=1)]
    assert check_choices(two, 2) == []
    for found in (two[:1], two[::-1], two + two[1:]):
        assert "2 were asked for" in check_choices(found, 2)[0]


def test_usage_counts_tokens():
    two = [choice("abcd"), choice("ab")]
    right = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert check_usage(right, TASK, two) == []
    for change, message in (
        ({"prompt_tokens": 4, "total_tokens": 10}, "4 tokens of the prompt, it has 3"),
        ({"completion_tokens": 5, "total_tokens": 8}, "5 sampled tokens, there are 6"),
        ({"total_tokens": 10}, "does not add up"),
    ):
        assert [w for w in check_usage(right | change, TASK, two) if message in w]
    assert check_usage(None, TASK, two) == ["usage is None"]


def test_refusals_say_why_and_when_to_come_back():
    body = {"error": {"message": "full"}}
    assert check_refusal(429, {"retry-after": "3"}, body, 429) == []
    assert check_refusal(400, {}, body, 400) == []
    for retry in ({}, {"retry-after": "0"}, {"retry-after": "soon"}, {"retry-after": "1.5"}):
        assert "429 with Retry-After" in check_refusal(429, retry, body, 429)[0]
    assert "status 500 in place of 400" in check_refusal(500, {}, body, 400)[0]
    for silent in ({}, {"error": {}}, {"error": {"message": ""}}, None):
        assert "without an error message" in check_refusal(400, {}, silent, 400)[0]


def test_the_same_question_has_the_same_answer():
    known, first = References(), choice("abcd", logprobs=(-1.0, -2.0, -3.0, -4.0))
    assert known.check(first, TASK, 1) == [] and known.check(first, TASK, 1) == []
    assert known.check(dataclasses.replace(first, tokens=None, logprobs=None), TASK, 1) == []
    assert known.compared == 2
    other = dataclasses.replace(first, logprobs=(-1.0, -2.0, -3.0, -4.0000001))
    assert known.check(other, TASK, 1) == [
        "logprobs differs from the answer before: 1 of 4 places, the first is 3, -4.0 and -4.0000001"
    ]
    assert "'abcd' and 'abce'" in known.check(dataclasses.replace(first, text="abce"), TASK, 1)[0]
    shorter = dataclasses.replace(first, tokens=ids("abc"), logprobs=None)
    assert "tokens differs" in known.check(shorter, TASK, 1)[0]
    # Another version, number or seed is another question; another wording of the prompt is none.
    for index, task, version in (
        (0, TASK, 2),
        (1, TASK, 1),
        (0, dataclasses.replace(TASK, seed=4), 1),
        (0, dataclasses.replace(TASK, seed=None), 1),
    ):
        assert known.check(dataclasses.replace(other, index=index), task, version) == []
    assert known.check(other, dataclasses.replace(TASK, message="hi"), 1) != []


def test_greedy_choices_are_all_the_same():
    known, greedy = References(), dataclasses.replace(TASK, temperature=0.0, seed=None)
    assert known.check(choice("abcd"), greedy, 1) == []
    assert known.check(dataclasses.replace(choice("abce"), index=2), greedy, 1) != []


REST = {
    "jaxrl_requests_in_flight": 1.0,
    "jaxrl_completions_open": 0.0,
    "jaxrl_rows_running": 0.0,
    "jaxrl_rows_queued": 0.0,
    "jaxrl_pages": 80.0,
    "jaxrl_pages_free": 80.0,
    "jaxrl_pages_lost": 0.0,
    "jaxrl_paused": 0.0,
    "jaxrl_tasks": 4.0,
}


def test_a_server_at_rest_holds_nothing():
    assert check_rest(REST, 4) == []
    for name, value in {
        "jaxrl_requests_in_flight": 2,
        "jaxrl_completions_open": 1,
        "jaxrl_rows_running": 1,
        "jaxrl_rows_queued": 3,
        "jaxrl_pages_free": 79,
        "jaxrl_pages_lost": 1,
        "jaxrl_paused": 1,
        "jaxrl_tasks": 5,
    }.items():
        assert len(check_rest(REST | {name: float(value)}, 4)) == 1, name


def test_growth_is_that_of_the_last_quarter_over_the_second():
    def samples(resident):
        return [
            Sample(seconds=float(t), requests=100 * t, resident=resident(t), threads=None, files=None)
            for t in range(41)
        ]

    grown = growth(samples(lambda t: 5000.0 if t < 10 else 1000.0 + 20 * t))
    # Means of 10…19 and 30…40: 14.5 and 35.
    assert grown == pytest.approx((20 * 20.5, 100 * 20.5, 200))
    assert growth(samples(lambda t: 7.0)).bytes == 0
    assert growth([]) is None and growth(samples(lambda t: 7.0)[:1]) is None


def test_memory_and_threads_that_grow_are_told():
    def grown(mib, requests, threads=(9, 9), seconds=160):
        """Growth by so many MiB while so many requests are answered, between the middles of the two quarters."""
        samples = [
            Sample(
                seconds=t * seconds / 40,
                requests=requests * (t > 20),
                resident=2.0**20 * (100 + mib * (t > 20)),
                threads=threads[t > 20],
                files=None,
            )
            for t in range(41)
        ]
        return " | ".join(check_growth(samples, 1.0))

    assert grown(16, 1000) == grown(115, 100_000) == grown(255, 900) == grown(-50, 5000) == ""
    assert "grew by 20.0 MiB" in grown(20, 1000) and "20.00 MiB a thousand requests" in grown(20, 1000)
    assert "beyond 16 MiB" in grown(117, 100_000) and "beyond 256 MiB" in grown(300, 900)
    assert grown(200, 5000, seconds=24) == "" != grown(400, 5000, seconds=24)  # it still compiles
    assert grown(0, 1000, threads=(9, 17)) == grown(0, 1000, threads=(None, None)) == ""
    assert "up to 18 in the second" in grown(0, 1000, threads=(9, 18))


def test_metrics_are_read():
    text = '# HELP a What.\n# TYPE a counter\na{x="1",y="b"} 3\nb_total 2.5\n'
    assert parse_metrics(text) == {'a{x="1",y="b"}': 3.0, "b_total": 2.5}
    with pytest.raises(ValueError, match="/metrics has the line"):
        parse_metrics("a b c")


def test_tasks_repeat_with_their_seed_and_fit_the_context():
    tasks = make_tasks(random.Random("1"), MODEL, 60)
    assert tasks == make_tasks(random.Random("1"), MODEL, 60) != make_tasks(random.Random("2"), MODEL, 60)
    for task in tasks:
        assert task.repeatable and 0 < len(task.prompt) < MODEL.max_context
        assert task.min_tokens <= min(task.max_tokens, MODEL.max_context - len(task.prompt))
        assert not (task.stop and task.min_tokens)
    assert {bool(t.stop) for t in tasks} == {t.temperature == 0 for t in tasks} == {True, False}


@pytest.mark.parametrize(
    "events, message",
    [
        ([{"choices": []}], "no end mark"),
        ([None, None], "after the end mark"),
        ([{"error": {"message": "failed"}}], "ends with an error"),
    ],
)
def test_broken_streams_are_told(events, message):
    def read():
        streamed = Streamed("completion_stream")
        for event in events:
            streamed.push(event)
        return streamed.choices()

    with pytest.raises(ValueError, match=message):
        read()


def test_what_goes_on_after_its_end_is_told():
    streamed = Streamed("completion_stream")
    part = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"}
    assert streamed.push({"choices": [part]})
    with pytest.raises(ValueError, match="choice 0 goes on after its finish_reason"):
        streamed.push({"choices": [part]})


def test_addresses():
    assert split_url("http://localhost:81/v1") == ("localhost", 81)
    odd = ("http://[::1", "http://a b:1", "http://a\nb", "http://h:0")
    for bad in ("localhost:81", "https://localhost", "http://", "http://h:port", *odd):
        with pytest.raises(InputError, match="--url must be like"):
            split_url(bad)
    with pytest.raises(InputError, match="JAXRL_API_KEY") as error:
        split_url("http://me:pa55word@localhost")
    assert "pa55word" not in str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_as_the_server_writes_it(form, scripted):
    async def ask(url, task, n):
        async with contextlib.AsyncExitStack() as stack:
            connection = await stack.enter_async_context(Connection(*split_url(url)))
            for _ in range(2):  # on one connection
                reply = await connection.request("POST", *question(task, form, n=n, logprobs=0))
                assert reply.status == 200
                if not form.endswith("_stream"):
                    body = await reply.json()
                    found = read_choices(form, body), body["usage"]
                    continue
                streamed = Streamed(form)
                async for event in events_of(reply):
                    streamed.push(event)
                found = streamed.choices(), streamed.usage
            return found

    task = Task(
        prompt=tuple(tiny_tokenizer().chat([{"role": "user", "content": "hi"}])), message="hi", max_tokens=4
    )
    with scripted(lambda tokens, index: [*ids("abc"[: 3 - index]), EOS]) as place:
        choices, usage = asyncio.run(ask(place.url, task, 2))
    assert check_choices(choices, 2) == check_usage(usage, task, choices) == []
    for found, text in zip(choices, ("abc", "ab"), strict=True):
        assert wrong(found, task) == ""
        assert found.tokens == found.named == (*ids(text), EOS)
        assert found.logprobs == (-0.5,) * len(found.tokens) and found.version == 0
        assert found.text == (None if form == "generate" else text)


# ------------------------------------------------------------------------------------ against a server


@pytest.fixture
def loading():
    """loading(place, *tasks): a load on a server of `scripted`, of two slots and two places in the queue."""

    def make(place, *tasks):
        host, port = split_url(place.url)
        model = dataclasses.replace(MODEL, max_context=10_000)
        target = Target(host=host, port=port, headers={}, model=model, slots=2, queue=2)
        load = Load(target, tasks or [task_of("hi", max_tokens=3)], clients=1, seed=0)
        return load

    return make


def task_of(message, **more):
    prompt = tiny_tokenizer().chat([{"role": "user", "content": message}])
    return Task(prompt=tuple(prompt), message=message, **{"seed": 1, **more})


def test_answers_that_are_the_same_each_time_are_right(scripted, loading):
    async def ask(load):
        await load.greet()
        await load.ask_alone()
        await load.ask_together()
        await load.ask_alone()

    tasks = [task_of("a", max_tokens=9), task_of("b", max_tokens=2), task_of("c", stop=("bc",))]
    with scripted(lambda tokens, index: [*ids("xabc"[index % 2 :]), EOS]) as place:
        load = loading(place, *tasks)
        asyncio.run(ask(load))
    assert load.faults == [] and load.references.compared == 6
    assert load.answered == 9 and {status for _, status in load.statuses} == {"200"}


def test_an_answer_that_changes_is_told(scripted, loading):
    count = itertools.count()

    async def ask(load):
        await load.greet()
        await load.ask_alone()
        await load.ask_alone()

    with scripted(lambda tokens, index: [ord("a") + next(count), EOS]) as place:
        load = loading(place)
        asyncio.run(ask(load))
    assert load.fault_count == 2 and "text differs from the answer before: 'a' and 'b'" in load.faults[1]


def test_a_burst_while_paused_is_refused_in_part(scripted, loading, eventually):
    with scripted(lambda tokens, index: itertools.repeat(ord("a"))) as place:
        load = loading(place)
        asyncio.run(load.burst_while_paused())
        eventually(lambda: place.service.in_flight == 0 and not place.worker.view.paused)
    assert load.faults == [] and load.refused == 8  # of 12, for 4 places
    assert (
        sum(count for (_, status), count in load.statuses.items() if status == "200") == 4 + 2
    )  # and commands


def test_a_queue_that_is_longer_than_was_said_is_told(scripted, loading, monkeypatch):
    monkeypatch.setattr(serve_load, "_HANG", 0.5)
    with scripted(lambda tokens, index: itertools.repeat(ord("a")), queued=50) as place:
        load = loading(place)
        asyncio.run(load.burst_while_paused())
    assert any("none was refused with 429" in fault for fault in load.faults)


def test_pages_of_a_killed_client_are_free(scripted, loading, eventually):
    with scripted(lambda tokens, index: itertools.repeat(ord("a"))) as place:
        load = loading(place)
        asyncio.run(load.kill())
        eventually(lambda: len(place.engine.cancelled) == 3)
    assert load.faults == [] and len(load.freed) == load.events["kills"] == 1


def test_pages_that_a_killed_client_keeps_are_told(scripted, loading, monkeypatch):
    monkeypatch.setattr(serve_load, "_FREED", 0.2)
    with scripted(lambda tokens, index: itertools.repeat(ord("a"))) as place:
        monkeypatch.setattr(place.worker, "cancel", lambda job: None)
        load = loading(place)
        asyncio.run(load.kill())
    assert (
        load.freed == [] and "0.2 s after a client of" in load.faults[0] and "0 of 2 pages" in load.faults[0]
    )


def test_what_is_wrong_with_the_arguments_is_told(capsys):
    for arguments, message in (
        (["--minutes", "0"], "--minutes and --max-growth must be positive"),
        (["--clients", "5000"], "--clients between 1 and 4096"),
        (["--url", "localhost:8000"], "--url must be like http://127.0.0.1:8000"),
        (["--set", "sampler.slots=4"], "--set changes settings of a config file"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["bench", "serve", *arguments])
        assert end.value.code == 2 and message in capsys.readouterr().err


def test_who_is_no_server_or_not_well_is_told(scripted, loading):
    with scripted(lambda tokens, index: [EOS]) as place:
        load = loading(place)
        place.service.stopping = True
        with pytest.raises(InputError, match="'status': 'stopping'.*must be well"):
            asyncio.run(load.greet())
    with pytest.raises(InputError, match="/health does not answer .*Is the server running"):
        asyncio.run(load.greet())


@pytest.mark.slow
def test_a_server_under_load_is_right_and_leaks_nothing(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["bench", "serve", "--minutes", "0.4", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (end.value.code, result["faults"], result["leaks"], result["ok"]) == (0, [], [], True)
    assert result["kills"] > 0 and result["refused"] > 0 and result["answers_compared"] > 80
    assert result["events/weight updates"] > 1 and result["events/pauses"] > 0
    assert result["freed_seconds/max"] < 15 and result["tokens"] > 1000
