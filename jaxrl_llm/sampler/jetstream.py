"""Serving with JetStream: a real `jetstream.engine.engine_api.Engine`, its orchestrator and its gRPC server.

google-jetstream 0.2.2 is the last release on PyPI; its repository is archived. What it needs is installed by

    pip install 'jaxrl-llm[jetstream]'
    pip install --no-deps google-jetstream==0.2.2

(its own list of dependencies brings TensorFlow, which it does not use; the package called `jetstream` is another one).

What a client gets through it: token ids and text of completions, sampled as the server was told to. What it cannot get,
because neither the orchestrator nor the protocol carries it: log-probs, policy versions, the stop id (dropped at the
end), sampling parameters of its own. RL rollouts therefore use `Sampler`, which runs the same programs.

What is mended here from outside, each of which ended the whole process by SIGKILL:

- `orchestrator.delete_pytree` calls `jax.tree_map`, which JAX no longer has;
- a prompt of token ids with `session_cache` set has no shape, an empty one is a list of floats;
- the generate thread asserts that a slot is taken, while another thread may just have given the last one back;
- any exception in a thread of the orchestrator: it now ends the server, `ServerHandle.wait` raises it, and the process
  lives on.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib.util
import logging
import socket
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import flax.struct
import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sampler.base import SamplingParams, is_integer
from jaxrl_llm.sampler.jetstream_engine import BOS_MARK, Contract, PagedEngine, ParamsBox, Request
from jaxrl_llm.tokens.stream import TextStream
from jaxrl_llm.tokens.tokenizer import Tokenizer

__all__ = [
    "ParamsBox",
    "ServerHandle",
    "contract_of",
    "jetstream_engine",
    "require_jetstream",
    "start_grpc_server",
]

_LOG = logging.getLogger(__name__)


# ------------------------------------------------------------------------------------ the package


def _stub(name: str, **classes: tuple[str, ...]) -> None:
    """Puts modules with empty classes in the place of a package that is not installed."""
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        return
    for path, members in ((path.replace("__", "."), members) for path, members in classes.items()):
        module = sys.modules.setdefault(path, types.ModuleType(path))
        for member in members:
            setattr(module, member, type(member, (), {}))


@functools.cache
def _package() -> types.SimpleNamespace:
    """The modules of google-jetstream, imported once, without what the import does besides, and mended.

    Raises:
      InputError: it is not installed, or one of its light dependencies is not.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    # It imports two classes of seqio (0.3.0 also one of transformers) for tokenizers that are not used here.
    _stub("seqio", seqio=(), seqio__vocabularies=("Vocabulary", "SentencePieceVocabulary"))
    _stub("transformers", transformers=("AutoTokenizer",))
    try:
        from jetstream.core import orchestrator, server_lib
        from jetstream.core.proto import jetstream_pb2
        from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2
    except ImportError as error:
        raise InputError(
            f"JetStream is not installed ({error}). Run both: pip install 'jaxrl-llm[jetstream]' and pip install --no-deps "
            "google-jetstream==0.2.2 (not the package called jetstream, which is another one)."
        ) from error
    finally:  # the import sets the root logger to DEBUG and makes it print
        root.setLevel(level)
        for handler in set(root.handlers) - set(handlers):
            root.removeHandler(handler)
    for module in (orchestrator, server_lib, token_utils):
        module.logging = logging.getLogger("jetstream")  # not the root logger, which it would give a handler
    # Prefixes hold no arrays of their own: nothing is to be deleted after an insert.
    orchestrator.delete_pytree = lambda prefix: None
    pad = token_utils.pad_tokens
    token_utils.pad_tokens = lambda tokens, *args, **more: pad(np.asarray(tokens, np.int32), *args, **more)
    return types.SimpleNamespace(
        orchestrator=orchestrator,
        server_lib=server_lib,
        jetstream_pb2=jetstream_pb2,
        engine_api=engine_api,
        token_utils=token_utils,
        tokenizer_api=tokenizer_api,
        tokenizer_pb2=tokenizer_pb2,
    )


def require_jetstream() -> None:
    """Raises InputError, with the commands that install it, unless google-jetstream can be imported."""
    _package()


# ------------------------------------------------------------------------------------- the engine


def contract_of(engine_api: Any) -> Contract:
    """Which of the two contracts a module `jetstream.engine.engine_api` has, with results as it wants them."""

    @flax.struct.dataclass
    class Results(engine_api.ResultTokens):
        """`ResultTokens` with what it has no place for; the stock orchestrator reads the base class only."""

        log_prob: Any = None  # f32[B, 1], under the distribution drawn from; raw for greedy decoding
        version: Any = None  # i32[B, 1], of the weights that sampled the token; -1 without a token
        kv_version: Any = None  # i32[B, 1], oldest version whose keys and values it attended to

        def convert_to_numpy(self) -> Results:
            """Itself: everything is on the host."""
            return self

    def results(data: np.ndarray, log_prob: np.ndarray, version: np.ndarray, kv_version: np.ndarray) -> Any:
        return Results(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=1,
            log_prob=log_prob,
            version=version,
            kv_version=kv_version,
        )

    return Contract(results=results, first_at_prefill=hasattr(engine_api.Engine, "prefill_multisampling"))


@functools.cache
def _classes() -> types.SimpleNamespace:
    """The classes that have JetStream's as a base."""
    jet: Any = _package()

    class TokenizerOfModel(jet.tokenizer_api.Tokenizer):
        """Our tokenizer in JetStream's form; never raises, since an exception would end the process."""

        def __init__(self, tokenizer: Tokenizer | None, stop_ids: frozenset[int]):
            self._tokenizer, self._stop_ids = tokenizer, stop_ids

        def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray, int]:
            """Padded ids, with a mark in front, and their number. No ids where text cannot be encoded: refused later."""
            ids: list[int] = []
            try:
                if self._tokenizer is not None:
                    ids = self._tokenizer.encode(s, add_bos=kwargs.get("is_bos", True))
            except InputError as error:
                _LOG.warning("jetstream: %s", error)
            return jet.token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **kwargs)

        def decode(self, token_ids: list[int], **kwargs: Any) -> str:
            """Text of ids."""
            return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

        @property
        def pad_id(self) -> int:
            """What is put behind prompts; never read."""
            return 0

        @property
        def bos_id(self) -> int:
            """The mark that the engine takes away."""
            return BOS_MARK

        @property
        def eos_id(self) -> int:
            """The first stop id, or -1."""
            return min(self._stop_ids, default=-1)

        @property
        def stop_tokens(self) -> set[int]:
            """All stop ids; not the padding id, which may be an ordinary token."""
            return set(self._stop_ids)

    class JetStreamEngine(PagedEngine, jet.engine_api.Engine):
        """`PagedEngine` as an engine of JetStream, with the model's tokenizer."""

        def __init__(self, config: ModelConfig, box: ParamsBox, tokenizer: Tokenizer | None, **more: Any):
            known = None if tokenizer is None else tokenizer.vocab_size
            super().__init__(config, box, contract=contract_of(jet.engine_api), known_ids=known, **more)
            self.tokenizer = tokenizer

        def get_tokenizer(self) -> Any:
            """A name only: `build_tokenizer` needs none of it."""
            return jet.tokenizer_pb2.TokenizerParameters(path="tokenizer.json", extra_ids=0)

        def build_tokenizer(self, metadata: Any) -> Any:
            """The model's tokenizer."""
            return TokenizerOfModel(self.tokenizer, self.stop_ids)

    class CheckedOrchestrator(jet.orchestrator.LLMOrchestrator):
        """The orchestrator's gRPC service. Refuses what cannot be answered before a thread sees it, and makes the text.

        Text is encoded here, and ids go on, so that characters whose bytes are spread over tokens come out whole.
        """

        engine: JetStreamEngine
        most_queued: int

        async def Decode(self, request: Any, context: Any = None) -> AsyncIterator[Any]:
            """Streams one completion. INVALID_ARGUMENT: see the message. RESOURCE_EXHAUSTED: too many requests wait."""
            code = jet.orchestrator.grpc.StatusCode
            abort = jet.orchestrator._abort_or_raise
            if self._driver._prefill_backlog.qsize() >= self.most_queued:
                await abort(
                    context, code.RESOURCE_EXHAUSTED, f"{self.most_queued} requests wait; try again later."
                )
            tokens, problem = self._tokens(request)
            problem = problem or self.engine.problem(tokens)
            if problem is not None:
                await abort(context, code.INVALID_ARGUMENT, problem)
            asked = Request(max_tokens=request.max_tokens)
            if context is not None:
                context.add_done_callback(lambda _: setattr(asked, "cancelled", True))
            marked = jet.jetstream_pb2.DecodeRequest(
                max_tokens=request.max_tokens,
                priority=request.priority,
                token_content=jet.jetstream_pb2.DecodeRequest.TokenContent(
                    token_ids=[self.engine.announce(asked), *tokens]
                ),
            )
            wants_text = request.WhichOneof("content") == "text_content"
            text = TextStream(self.engine.tokenizer) if wants_text and self.engine.tokenizer else None
            async for response in super().Decode(marked, context):
                if text is not None:
                    for sample in response.stream_content.samples:
                        sample.text = "".join(map(text.push, sample.token_ids))
                yield response
            rest = "" if text is None else text.finish()
            if rest:
                yield jet.jetstream_pb2.DecodeResponse(
                    stream_content=jet.jetstream_pb2.DecodeResponse.StreamContent(
                        samples=[jet.jetstream_pb2.DecodeResponse.StreamContent.Sample(text=rest)]
                    )
                )

        def _tokens(self, request: Any) -> tuple[list[int], str | None]:
            """(ids of the prompt, what is wrong with the request). BOS precedes text that begins a session."""
            kind = request.WhichOneof("content")
            if kind == "token_content":
                return list(request.token_content.token_ids), None
            if kind is None:
                return [], "the request has no content; set text_content or token_content."
            if self.engine.tokenizer is None:
                return [], "the model has no tokenizer; send token_content."
            text = request.text_content.text
            return self.engine.tokenizer.encode(text, add_bos=not request.session_cache), None

    class Driver(jet.orchestrator.Driver):
        """The orchestrator's driver, whose generate thread survives a race of its own."""

        def _generate_thread(self, idx: int) -> None:
            """Begins again where the thread found no slot taken, because the last one was just given back.

            Nothing is lost: it had taken no prompt, and the engine holds the state.
            """
            while self.live:
                try:
                    return super()._generate_thread(idx)
                except AssertionError:
                    if not self._generate_slots[idx].full():
                        raise

    return types.SimpleNamespace(engine=JetStreamEngine, service=CheckedOrchestrator, driver=Driver)


def jetstream_engine(
    config: ModelConfig,
    box: ParamsBox,
    tokenizer: Tokenizer | None = None,
    *,
    slots: int = 8,
    page_size: int = 64,
    max_context: int | None = None,
    prefill_chunk: int = 64,
    sampling: SamplingParams | None = None,
    on_swap: Literal["keep", "recompute"] = "keep",
) -> Any:
    """A `jetstream.engine.engine_api.Engine` on our pages and programs, for interleaved mode. Arguments: `PagedEngine`.

    Raises:
      InputError: google-jetstream is not installed, or an argument is wrong.
    """
    return _classes().engine(
        config,
        box,
        tokenizer,
        slots=slots,
        page_size=page_size,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        sampling=sampling,
        on_swap=on_swap,
    )


# ------------------------------------------------------------------------------------- the server


@dataclasses.dataclass(eq=False)
class ServerHandle:
    """A server that runs. `box.swap(params, version)` exchanges its weights between two decode steps."""

    engine: Any
    box: ParamsBox
    driver: Any
    host: str
    port: int
    _server: Any
    _failure: _Failure

    @property
    def address(self) -> str:
        """For `grpc.insecure_channel`."""
        return f"{self.host}:{self.port}"

    def wait(self) -> None:
        """Until the server is stopped.

        Raises:
          RuntimeError: a thread of the orchestrator failed; its exception is the cause.
        """
        self._failure.ended.wait()
        if self._failure.error is not None:
            raise RuntimeError(
                f"jetstream: {self._failure.thread} failed, and the server has stopped."
            ) from self._failure.error

    def stop(self, grace: float = 5.0) -> None:
        """Takes no more requests, lets those that run end within `grace` seconds, and ends all threads."""
        if self._server is None:
            return
        server, self._server = self._server, None
        _stop_calls(server, grace).result()  # before the driver, which would leave them unanswered
        server.stop()
        server._executor.shutdown()
        self.engine.reset()
        self._failure.ended.set()

    def __enter__(self) -> ServerHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Failure:
    """Why the threads of an orchestrator ended."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self.thread = ""
        self.driver: Any = None
        self.server: Any = None

    def report(self, error: BaseException) -> None:
        """Ends the calls of the clients, who would wait for ever."""
        _LOG.error("jetstream: a thread of the orchestrator failed", exc_info=error)
        if self.error is None:
            self.error, self.thread = error, threading.current_thread().name
        if self.driver is not None:
            self.driver.live = False
        if self.server is not None:
            _stop_calls(self.server, 0)
        self.ended.set()


def _stop_calls(server: Any, grace: float) -> Any:
    async def stop() -> None:
        await server._grpc_server.stop(grace)

    return asyncio.run_coroutine_threadsafe(stop(), server._loop)


@contextlib.contextmanager
def _replaced(module: Any, **values: Any) -> Iterator[None]:
    """Names of a module that stand for something else inside."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _free_port(host: str, port: int) -> int:
    """The port to listen on. Asked first, because gRPC shares a port that another server listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(
                f"jetstream: cannot listen on {host} port {port} ({error.strerror or error}). Choose another, or 0 for any "
                "free one."
            ) from error
        return int(probe.getsockname()[1])


def start_grpc_server(
    config: ModelConfig,
    model: Any,
    *,
    port: int = 0,
    slots: int = 8,
    host: str = "127.0.0.1",
    credentials: Any = None,
    max_queued: int = 1024,
    version: int = 0,
    page_size: int = 64,
    max_context: int | None = None,
    prefill_chunk: int = 64,
    sampling: SamplingParams | None = None,
    on_swap: Literal["keep", "recompute"] = "keep",
) -> ServerHandle:
    """Serves a model with JetStream's orchestrator and gRPC server; returns once requests are taken.

    Args:
      config: of the model, usually `model.config`.
      model: has `params` and `tokenizer`; without a tokenizer only prompts of token ids are answered.
      port: 0 = any free one (`ServerHandle.port`).
      host: there is no authentication: only this machine by default.
      credentials: `grpc.ServerCredentials`; None: unencrypted.
      max_queued: requests that may wait for a slot; more get RESOURCE_EXHAUSTED.
      version: of the params.
      slots, page_size, max_context, prefill_chunk, sampling, on_swap: see `PagedEngine`.

    Raises:
      InputError: google-jetstream is not installed, the port is taken, or an argument is wrong.
    """
    if not is_integer(max_queued) or max_queued < 1:
        raise InputError(f"jetstream: max_queued must be at least 1 (an integer), got {max_queued!r}.")
    if not is_integer(port) or not 0 <= port < 2**16:
        raise InputError(f"jetstream: port must be in [0, 65535], got {port!r}.")
    jet: Any = _package()
    classes: Any = _classes()
    box = ParamsBox(model.params, config, version)
    engine = jetstream_engine(
        config,
        box,
        model.tokenizer,
        slots=slots,
        page_size=page_size,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        sampling=sampling,
        on_swap=on_swap,
    )
    engine.warm_up()
    port = _free_port(host, int(port))
    failure = _Failure()

    class Thread(threading.Thread):
        """In the place of JetThread, which kills the process."""

        def run(self) -> None:
            """Reports any exception."""
            try:
                super().run()
            except BaseException as error:
                failure.report(error)

    class Service(classes.service):
        """The service of this server."""

    Service.engine, Service.most_queued = engine, max_queued
    with _replaced(jet.orchestrator, JetThread=Thread):
        driver = failure.driver = classes.driver(
            prefill_engines=[engine],
            generate_engines=[engine],
            prefill_params=[engine.load_params()],
            generate_params=[engine.load_params()],
            interleaved_mode=True,
            jax_padding=False,
        )
    insecure = jet.orchestrator.grpc.insecure_server_credentials()
    bracketed = f"[{host}]" if ":" in host else host
    with (
        _replaced(jet.server_lib, _HOST=bracketed),
        _replaced(jet.orchestrator, LLMOrchestrator=Service),
    ):
        server = jet.server_lib.JetStreamServer(driver, max(slots, 64), port, credentials or insecure)
    failure.server = server
    server.start()
    return ServerHandle(
        engine=engine, box=box, driver=driver, host=bracketed, port=port, _server=server, _failure=failure
    )
