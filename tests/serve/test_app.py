"""The server over HTTP, on an engine whose every step is known: overload, leaving clients, pauses, faults, keys."""

import asyncio
import itertools
import json
import socket
import threading
import time
import urllib.error
import urllib.request
import warnings

import pytest

from jaxrl_llm.serve.metrics import Rate
from jaxrl_llm.serve.run import Settings, listen, make_server


def endless(prompt, index):
    return itertools.repeat(97)


def hello(prompt, index):
    return [*b"hello", 2]


def call(url, body=None, headers=None, method=None, raw=None):
    """(status, headers, value of the JSON body)."""
    data = raw if raw is not None else None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers or {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, json.loads(error.read())


def later(*arguments, **more):
    """A call in a thread; `.result` when it has ended."""

    def run():
        thread.result = call(*arguments, **more)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def post_and_leave(url, body):
    """Sends a request and closes the connection once an answer has begun, or after a moment."""
    host, port = url.removeprefix("http://").split("/")[0].split(":")
    data = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST /{url.split('/', 3)[3]} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        connection.settimeout(0.3)
        try:
            connection.recv(100)
        except TimeoutError:
            pass


def test_overload_is_answered_with_429_and_passes(scripted, eventually):
    with scripted(endless, slots=2, queued=1) as place:
        url = place.url + "/v1/completions"
        call(place.url + "/pause", method="POST")
        waiting = [later(url, {"prompt": "a", "max_tokens": 3}) for _ in range(3)]
        eventually(lambda: place.worker.view.queued == 3)
        status, headers, body = call(url, {"prompt": "a", "max_tokens": 3})
        assert status == 429 and 1 <= int(headers["retry-after"]) <= 60
        assert body["error"]["code"] == "queue_full" and "3 at most" in body["error"]["message"]
        status, _, body = call(url, {"prompt": "a", "n": 4})
        assert status == 400 and body["error"]["param"] == "n"  # it would never fit
        call(place.url + "/resume", method="POST")
        for thread in waiting:
            thread.join(20)
            assert thread.result[0] == 200 and thread.result[2]["choices"][0]["text"] == "aaa"
        assert call(url, {"prompt": "a", "max_tokens": 3})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(scripted, eventually, stream):
    with scripted(endless) as place:
        body = {"prompt": "a", "max_tokens": 9000, "n": 3, "stream": stream}
        post_and_leave(place.url + "/v1/completions", body)
        eventually(lambda: len(place.engine.cancelled) == 3 and not place.engine.busy)
        assert place.engine.free_pages == place.engine.slots
        eventually(lambda: place.service.in_flight == 0)
        with urllib.request.urlopen(place.url + "/metrics") as answer:
            page = answer.read().decode()
        assert 'jaxrl_cancelled_total{reason="disconnect"} 3' in page and "jaxrl_completions_open 0" in page


def test_a_request_that_takes_too_long(scripted, eventually):
    with scripted(endless, limits={"seconds": 0.3}) as place:
        status, _, body = call(place.url + "/v1/completions", {"prompt": "a", "max_tokens": 9000})
        assert status == 504 and body["error"]["code"] == "timeout"
        request = urllib.request.Request(
            place.url + "/v1/completions",
            json.dumps({"prompt": "a", "max_tokens": 9000, "stream": True}).encode(),
        )
        with urllib.request.urlopen(request, timeout=20) as answer:
            last = answer.read().decode().strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        eventually(lambda: len(place.engine.cancelled) == 2 and not place.engine.busy)


def test_pause_keeps_rows_or_ends_them(scripted, eventually):
    with scripted(endless) as place:
        thread = later(place.url + "/v1/completions", {"prompt": "a", "max_tokens": 2000})
        eventually(lambda: place.worker.view.stats.tokens > 3)
        assert call(place.url + "/pause?mode=keep&clear_cache=false", method="POST")[2]["paused"]
        tokens = place.worker.view.stats.tokens
        time.sleep(0.1)
        assert place.worker.view.stats.tokens == tokens < 2000 and thread.is_alive()
        assert call(place.url + "/health")[2]["paused"]
        assert not call(place.url + "/resume", method="POST")[2]["paused"]
        eventually(lambda: place.worker.view.stats.tokens > tokens)
        call(place.url + "/pause?mode=abort", method="POST")
        thread.join(20)
        (choice,) = thread.result[2]["choices"]
        assert choice["finish_reason"] == "abort" and 0 < len(choice["text"]) < 2000
        assert call(place.url + "/pause?mode=stop", method="POST")[0] == 400


def test_the_name_of_a_conversation_reaches_the_engine(scripted):
    with scripted(hello) as place:
        call(place.url + "/v1/completions", {"prompt": "a", "prompt_cache_key": "talk"})
        message = {"role": "user", "content": "a"}
        call(place.url + "/v1/chat/completions", {"messages": [message], "prompt_cache_key": "chat"})
        call(place.url + "/inference/v1/generate", {"token_ids": [5], "prompt_cache_key": "ids"})
        call(place.url + "/v1/completions", {"prompt": "a"})
        assert place.engine.sessions == ["talk", "chat", "ids", None]
        status, _, body = call(place.url + "/v1/completions", {"prompt": "a", "prompt_cache_key": 5})
        assert status == 400 and body["error"]["param"] == "prompt_cache_key"


def test_while_it_warms_up_it_is_alive_and_not_ready(scripted):
    with scripted(hello, warm_up=True) as place:
        assert call(place.url + "/liveness")[0] == 200
        status, headers, body = call(place.url + "/health")
        assert status == 503 and body["status"] == "warming up" and int(headers["retry-after"]) > 0
        for path, request in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
            ("/inference/v1/generate", {"token_ids": [5]}),
        ):
            status, headers, body = call(place.url + path, request)
            assert status == 503 and body["error"]["code"] == "warming_up" and int(headers["retry-after"]) > 0
        assert call(place.url + "/v1/models")[0] == 200 and not place.ready.is_set()
        place.engine.may_step.set()
        assert place.ready.wait(20)
        assert call(place.url + "/health")[2]["status"] == "ok"
        assert call(place.url + "/v1/completions", {"prompt": "a"})[2]["choices"][0]["text"] == "hello"
        with urllib.request.urlopen(place.url + "/metrics") as answer:
            assert "jaxrl_completion_tokens_total 6" in answer.read().decode()  # those of clients


@pytest.mark.parametrize("fails", [False, True])
def test_a_warm_up_that_is_stopped_or_fails_ends_the_server(scripted, fails, capfd):
    with scripted(hello, warm_up=True) as place:
        assert call(place.url + "/health")[0] == 503
        if fails:
            place.engine.fail = ValueError("no such program")
            place.engine.may_step.set()
        else:
            place.server.stop_soon()
        place.thread.join(20)
        assert not place.thread.is_alive() and not place.ready.is_set()
        place.engine.may_step.set()
    assert ("ValueError: no such program" in capfd.readouterr().err) == fails


def test_when_nobody_can_be_told_that_it_is_ready_it_ends(scripted):
    def told():
        raise BrokenPipeError

    with scripted(hello) as place, listen("127.0.0.1", 0) as sock:
        server = make_server(place.service, Settings(warm_up=False), told)
        with pytest.raises(BrokenPipeError):
            asyncio.run(asyncio.wait_for(server.serve(sockets=[sock]), 20))


def test_of_what_never_began_the_prompt_has_no_logprobs(scripted, eventually):
    with scripted(endless) as place:
        call(place.url + "/pause", method="POST")
        body = {"prompt": "ab", "max_tokens": 9, "prompt_logprobs": 1, "logprobs": 1, "echo": True}
        thread = later(place.url + "/v1/completions", body)
        eventually(lambda: place.worker.view.queued == 1)
        call(place.url + "/pause?mode=abort", method="POST")
        thread.join(20)
        (choice,) = thread.result[2]["choices"]
        assert choice["finish_reason"] == "abort" and choice["text"] == "ab"
        assert choice["prompt_logprobs"] is None and choice["logprobs"]["token_logprobs"] == [None, None]
        assert choice["logprobs"]["top_logprobs"] == [None, None]


def test_weights_change_between_two_tokens_and_each_token_tells(scripted, eventually):
    loads = []

    def load(path, version):
        loads.append((path, version))
        return "weights", 7 if version is None else version, "digest"

    with scripted(endless, load=load) as place:
        url = place.url + "/update_weights"
        body = {"token_ids": [1], "sampling_params": {"max_tokens": 1000, "logprobs": 1}}
        thread = later(place.url + "/inference/v1/generate", body)
        eventually(lambda: place.worker.view.stats.tokens > 3)
        status, headers, body = call(url, {"snapshot": "run"})
        assert status == 200 and body == {"policy_version": 7, "version": 7, "fingerprint": "fingerprint-7"}
        assert headers["x-policy-version"] == "7" and loads == [("run", None)]
        assert place.engine.swapped == [("weights", 7, "recompute", "digest")]
        thread.join(20)
        (choice,) = thread.result[2]["choices"]
        assert set(choice["policy_versions"]) == {0, 7} and choice["policy_version"] == 7
        assert (
            choice["policy_versions"] == sorted(choice["policy_versions"])
            and len(choice["token_ids"]) == 1000
        )
        assert call(url, {"snapshot": "run", "version": 3, "pages": "keep"})[2]["version"] == 3
        assert place.engine.swapped[-1] == ("weights", 3, "keep", "digest")
        for wrong, param in (
            ({}, "snapshot"),
            ({"snapshot": 5}, "snapshot"),
            ({"snapshot": "a", "version": -1}, "version"),
            ({"snapshot": "a", "pages": "drop"}, "pages"),
            ({"snapshot": "a", "path": "b"}, "path"),
        ):
            status, _, body = call(url, wrong)
            assert status == 400 and body["error"]["param"] == param


def test_a_stop_string_that_spans_tokens_is_not_streamed(scripted):
    with scripted(lambda prompt, index: iter(b"so END")) as place:
        body = {
            "prompt": "a",
            "stop": ["END"],
            "stream": True,
            "max_tokens": 50,
            "stream_options": {"include_usage": True},
        }
        request = urllib.request.Request(place.url + "/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-policy-version"] == "0"
            events = answer.read().decode().strip().split("\n\n")
        assert events.pop() == "data: [DONE]"
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert [c["text"] for chunk in chunks for c in chunk["choices"]] == ["s", "o", " ", ""]
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
        assert chunks[-1]["usage"] == {"prompt_tokens": 1, "completion_tokens": 6, "total_tokens": 7}
        assert all(chunk["policy_version"] == 0 for chunk in chunks)


def test_an_engine_that_fails_is_told_and_ends_the_server(scripted, eventually, capfd):
    with scripted(endless) as place:
        thread = later(place.url + "/v1/completions", {"prompt": "a", "max_tokens": 9000})
        eventually(lambda: place.engine.active)
        place.engine.fail = ValueError("out of pages")
        thread.join(20)
        assert thread.result[0] == 503 and "out of pages" in thread.result[2]["error"]["message"]
        place.thread.join(20)
        assert not place.thread.is_alive() and isinstance(place.worker.fault, ValueError)
    assert "ValueError: out of pages" in capfd.readouterr().err


def test_a_stop_lets_running_requests_finish(scripted, eventually):
    with scripted(endless, grace=20.0) as place:
        thread = later(place.url + "/v1/completions", {"prompt": "a", "max_tokens": 200})
        eventually(lambda: place.engine.active)
        place.server.stop_soon()
        thread.join(20)
        assert thread.result[0] == 200 and len(thread.result[2]["choices"][0]["text"]) == 200
        place.thread.join(20)
        assert not place.thread.is_alive()


@pytest.mark.parametrize("paused", [False, True])
def test_a_stop_ends_what_does_not_finish(scripted, eventually, paused):
    with scripted(endless, grace=20.0 if paused else 0.1) as place:
        thread = later(place.url + "/v1/completions", {"prompt": "a", "max_tokens": 9000})
        eventually(lambda: place.engine.active)
        if paused:
            call(place.url + "/pause", method="POST")
        place.server.stop_soon()
        thread.join(10)
        assert thread.result[2]["choices"][0]["finish_reason"] == "abort"
        place.thread.join(10)
        assert not place.thread.is_alive()


def test_a_key_is_asked_for_everywhere_but_for_health(scripted):
    with scripted(hello, api_key="secrét") as place:
        for path in ("/v1/models", "/metrics", "/v1/completions", "/update_weights", "/nowhere"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secrét"}):
                status, _, body = call(place.url + path, headers=headers)
                assert status == 401 and body["error"]["code"] == "invalid_api_key"
        key = {"Authorization": "Bearer secrét".encode().decode("latin1")}
        assert call(place.url + "/v1/models", headers=key | {"Origin": "http://a.b"})[0] == 200
        assert call(place.url + "/health")[0] == call(place.url + "/liveness")[0] == 200


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Host": "evil.example:8000"}])
def test_without_a_key_other_sites_in_a_browser_are_refused(scripted, headers):
    with scripted(hello) as place:
        status, _, body = call(place.url + "/pause", headers=headers, method="POST")
        assert status == 403 and body["error"]["code"] == "forbidden"
        assert not place.worker.view.paused


def test_bodies_that_are_no_request(scripted):
    with scripted(hello, limits={"body": 1000, "upload_seconds": 0.2}) as place:
        url = place.url + "/v1/completions"
        assert call(url, raw=b"{")[0] == 400
        assert call(url, raw=b" " * 1001)[0] == 413
        status, headers, body = call(place.url + "/v1/nothing", method="POST")
        assert status == 404 and body["error"]["code"] == "not_found" and "x-policy-version" in headers
        assert call(url, method="GET")[0] == 405
        assert call(url, {"prompt": "hi"})[2]["choices"][0]["text"] == "hello"
        host, port = place.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
            assert b" 408 " in slow.recv(100)


def test_nothing_is_left_behind_by_many_clients(scripted, eventually):
    with scripted(hello, slots=4, queued=100) as place, warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        threads = [later(place.url + "/v1/completions", {"prompt": "a"}) for _ in range(30)]
        for thread in threads:
            thread.join(20)
        assert {t.result[2]["choices"][0]["text"] for t in threads} == {"hello"}
        eventually(lambda: place.service.in_flight == 0)
        assert place.service.open_completions == 0 and not place.worker._rows and not place.engine.busy


def test_metrics_tell_speed_latency_pages_and_reuse(scripted, eventually):
    with scripted(endless, slots=2, queued=4) as place:

        def figures():
            with urllib.request.urlopen(place.url + "/metrics") as answer:
                lines = answer.read().decode().splitlines()
            return {k: float(v) for k, v in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

        idle = figures()
        assert idle["jaxrl_tokens_per_second"] == idle["jaxrl_pages_fragmentation_ratio"] == 0
        assert call(place.url + "/v1/completions", {"prompt": "a", "max_tokens": 7})[0] == 200
        place.engine.stats.reused_tokens, place.engine.stats.prefilled_tokens = 30, 10
        place.engine.stats.slot_steps, place.engine.stats.decoded_tokens = 20, 15
        assert place.worker.view.running == 0  # who has the answer sees what it freed
        thread = later(place.url + "/v1/completions", {"prompt": "a", "max_tokens": 2000})
        eventually(lambda: place.worker.view.running == 1)
        call(place.url + "/pause", method="POST")
        found = figures()
        assert 0 < found["jaxrl_tokens_per_second"] and found["jaxrl_completion_tokens_total"] == 7
        assert found["jaxrl_pages_fragmentation_ratio"] == 0.25 and found["jaxrl_prefix_hit_ratio"] == 0.75
        assert found["jaxrl_batch_occupancy_ratio"] == 0.75
        assert 0 < found["jaxrl_pages_used_ratio"] < 1 and found["jaxrl_slots"] == 2
        for name in ("time_to_first_token", "queue_delay", "request"):
            assert (
                found[f"jaxrl_{name}_seconds_count"]
                == found[f'jaxrl_{name}_seconds_bucket{{le="+Inf"}}']
                == 1
            )
        assert found["jaxrl_preemptions_total"] == found["jaxrl_page_evictions_total"] == 0
        call(place.url + "/pause?mode=abort", method="POST")
        thread.join(20)
        assert thread.result[0] == 200


def test_a_rate_forgets_what_is_older_than_its_window():
    now = [100.0]
    rate = Rate(window=10.0, clock=lambda: now[0])
    assert rate.per_second() == 0
    now[0] = 105.0
    rate.add(50)
    assert rate.per_second() == 10  # over the 5 seconds since the start
    now[0] = 114.0
    rate.add(30)
    assert rate.per_second() == 8
    now[0] = 116.0
    assert rate.per_second() == 3
    now[0] = 200.0
    assert rate.per_second() == 0
