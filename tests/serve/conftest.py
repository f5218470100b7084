"""A server in a thread, over the real engine or over one whose every step the test decides."""

import asyncio
import contextlib
import threading
import time
import types

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl_llm.sampler.base import Completion, SamplerStats
from jaxrl_llm.serve.app import Service
from jaxrl_llm.serve.protocol import Limits, Served
from jaxrl_llm.serve.run import Settings, listen, make_server
from jaxrl_llm.serve.worker import Worker
from jaxrl_llm.tokens.tiny import tiny_tokenizer
from jaxrl_llm.tokens.tokenizer import Tokenizer
from jaxrl_llm.types import StopReason

TEXT = [
    "The quick brown fox jumps over the lazy dog.",
    "Äpfel, naïve café, 東京, Привет, 🙂 and more words.",
] * 20
CHATML = (
    "{% if tools %}[{% for tool in tools %}{{ tool.function.name }};{% endfor %}]{% endif %}"
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{{ mark or '' }}"
)


@pytest.fixture(scope="session")
def bytes_tokenizer():
    """A byte-level BPE that cuts most characters beyond ASCII into several tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=262, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(TEXT, trainer)
    roles = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return Tokenizer(backend.to_str(), special=roles, chat_template=CHATML)


class ScriptedEngine:
    """Answers with the tokens of `script`, one a step, for ever if it does not end; one page a running row."""

    def __init__(self, tokenizer, script, *, slots=2, eos=2):
        self.tokenizer, self.script, self.slots, self.eos = tokenizer, script, slots, eos
        self.pages = slots
        self.stats = SamplerStats(slots=slots)
        self.waiting, self.active = [], []
        self.cancelled, self.swapped, self.sessions = [], [], []
        self.version, self.next_id, self.fail = 0, 0, None
        self.may_step = threading.Event()
        self.may_step.set()

    busy = property(lambda self: bool(self.waiting or self.active))
    queued = property(lambda self: len(self.waiting))
    running = property(lambda self: len(self.active))
    free_pages = property(lambda self: self.slots - len(self.active))
    lost_pages = 0
    filled_share = property(lambda self: 0.75 if self.active else 0.0)

    def settle_reading(self):
        """It has no pages to read."""

    def swap(self, params, *, version, pages="keep", expect=None):
        self.version = version
        self.swapped.append((params, version, pages, expect))
        return f"fingerprint-{version}"

    def submit(self, prompt, sampling, *, priority=0, session=None):
        self.sessions.append(session)
        ids = []
        for index in range(sampling.n):
            row = types.SimpleNamespace(
                id=self.next_id, prompt=prompt, sampling=sampling, index=index, tokens=[], versions=[]
            )
            row.script = iter(self.script(prompt.tokens.tolist(), index))
            self.waiting.append(row)
            ids.append(row.id)
            self.next_id += 1
        return ids

    def _completion(self, row, stop):
        text = self.tokenizer.decode(row.tokens)
        if stop is StopReason.STOP_STRING:
            text = text[: min(text.find(s) for s in row.sampling.stop if s in text)]
        return Completion(
            prompt=row.prompt,
            index=row.index,
            tokens=np.array(row.tokens, np.int32),
            logprobs=np.full(len(row.tokens), -0.5, np.float32),
            stop=stop,
            versions=np.array(row.versions, np.int32),
            kv_versions=np.array(row.versions, np.int32),
            text=text,
            timings={"queued": 0.01, "sampled": 0.02},
        )

    def cancel(self, id):
        for rows in (self.waiting, self.active):
            for row in rows:
                if row.id == id:
                    rows.remove(row)
                    self.cancelled.append(id)
                    return self._completion(row, StopReason.CANCELLED)
        return None

    def step(self):
        assert self.may_step.wait(20)
        if self.fail is not None:
            raise self.fail
        time.sleep(0.001)
        while self.waiting and len(self.active) < self.slots:
            self.active.append(self.waiting.pop(0))
        events = []
        for row in list(self.active):
            token, stop = next(row.script), None
            row.tokens.append(token)
            row.versions.append(self.version)
            if token == self.eos:
                stop = StopReason.EOS
            elif any(s in self.tokenizer.decode(row.tokens) for s in row.sampling.stop):
                stop = StopReason.STOP_STRING
            elif len(row.tokens) >= row.sampling.max_tokens:
                stop = StopReason.LENGTH
            if stop is not None:
                self.active.remove(row)
            self.stats.tokens += 1
            events.append(
                types.SimpleNamespace(
                    id=row.id,
                    tokens=np.array([token], np.int32),
                    logprobs=np.array([-0.5], np.float32),
                    top_ids=None,
                    top_logprobs=None,
                    prompt_scores=None,
                    completion=None if stop is None else self._completion(row, stop),
                )
            )
        return events


@contextlib.contextmanager
def running(
    worker, served, *, slots, replicas=1, limits=None, grace=5.0, load=None, api_key=None, warm_up=False
):
    """A server that listens, in a thread: (address, service, server, ready); while it may still warm up, if it does."""
    service = Service(
        worker,
        served,
        slots=slots,
        replicas=replicas,
        load=load or (lambda path, version: ({}, 0, None)),
        limits=limits,
        api_key=api_key,
    )
    sock = listen("127.0.0.1", 0)
    ready = threading.Event()
    server = make_server(service, Settings(grace=grace, warm_up=warm_up), ready.set)
    worker.on_fault = server.stop_soon
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
    thread.start()
    try:
        assert warm_up or ready.wait(20)
        yield types.SimpleNamespace(
            url=f"http://127.0.0.1:{sock.getsockname()[1]}",
            service=service,
            server=server,
            thread=thread,
            ready=ready,
        )
    finally:
        server.stop_soon()
        server.force_exit = True
        thread.join(20)
        assert worker.stop(20) and not thread.is_alive()


@pytest.fixture(scope="session")
def serving():
    """`running`, for test modules."""
    return running


@pytest.fixture
def scripted():
    """scripted(script, **changes) -> a context manager of a server over a `ScriptedEngine`, which is `.engine`."""

    @contextlib.contextmanager
    def start(script, *, slots=2, queued=2, tokenizer=None, limits=None, **more):
        tokenizer = tokenizer or tiny_tokenizer()
        engine = ScriptedEngine(tokenizer, script, slots=slots)
        if more.get("warm_up"):
            engine.may_step.clear()
        worker = Worker(engine, version=0, fingerprint="fingerprint-0")
        served = Served(
            name="tiny",
            tokenizer=tokenizer,
            vocab_size=tokenizer.vocab_size,
            eos_ids=(2,),
            max_context=10_000,
        )
        limits = Limits(queued=queued, **(limits or {}))
        with running(worker, served, slots=slots, limits=limits, **more) as place:
            place.engine, place.worker = engine, worker
            yield place

    return start


@pytest.fixture(scope="session")
def eventually():
    """eventually(condition): waits until it holds, ten seconds at most."""

    def wait(condition, what="the condition"):
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, f"{what} did not come about"
            time.sleep(0.005)

    return wait
