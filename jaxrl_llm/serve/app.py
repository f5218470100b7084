"""The routes: requests come in, the worker's engine answers them."""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import pathlib
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.errors import InputError
from jaxrl_llm.sampler.base import Completion, as_prompts
from jaxrl_llm.serve import metrics, reply
from jaxrl_llm.serve.protocol import (
    ApiError,
    Ask,
    Limits,
    Served,
    parse_chat,
    parse_completion,
    parse_generate,
    parse_json,
)
from jaxrl_llm.serve.worker import EngineError, Job, Worker

__all__ = ["Service", "build_app", "is_loopback"]

# (snapshot, version or None) -> (params, version, fingerprint or None)
Load = Callable[[str, int | None], tuple[Any, int, str | None]]

_CLOSED = 499  # for the statistics: the client left before it was answered
_OPEN_PATHS = ("/health", "/liveness")
_RETRY_SECONDS = (1, 60)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    return host in ("localhost", "::1") or host.startswith("127.")


class Service:
    """What the routes share; lives in one event loop.

    Args:
      worker: drives the engine.
      served: the model.
      slots: rows that the engine decodes together.
      load: reads the parameters of a snapshot for /update_weights.
      api_key: every request but /health and /liveness must bear it; None: requests must come from this machine.
    """

    def __init__(
        self,
        worker: Worker,
        served: Served,
        *,
        slots: int,
        load: Load,
        limits: Limits | None = None,
        source: str = "",
        api_key: str | None = None,
    ):
        self.worker, self.served, self.load = worker, served, load
        self.limits = limits or Limits()
        self.source, self.api_key = source, api_key
        self.created = int(time.time())
        self.stopping = False
        self.in_flight = 0  # requests
        self._most = slots + self.limits.queued
        self._open = 0  # completions that were asked for and not given
        self._updating = asyncio.Lock()
        self._pace = 0.0  # seconds between two completions, smoothed
        self._last = time.perf_counter()

        counter, histogram = metrics.Counter, metrics.Histogram
        self.requests = counter(
            "jaxrl_requests_total", "Requests by endpoint and status.", ("endpoint", "status")
        )
        self.refused = counter(
            "jaxrl_overload_total", "Requests refused with 429 because the queue was full."
        )
        self.cancelled = counter(
            "jaxrl_cancelled_total", "Completions that were cancelled, by reason.", ("reason",)
        )
        self.ended = counter(
            "jaxrl_completions_total", "Completions given, by finish reason.", ("finish_reason",)
        )
        self.prompt_tokens = counter("jaxrl_prompt_tokens_total", "Tokens of prompts, once a request.")
        self.tokens = counter("jaxrl_completion_tokens_total", "Sampled tokens given.")
        self.rate = metrics.Rate()  # of sampled tokens given
        self.updates = counter("jaxrl_weight_updates_total", "Weight swaps.")
        self.first_token = histogram(
            "jaxrl_time_to_first_token_seconds", "From the request to its first token."
        )
        self.queue_delay = histogram("jaxrl_queue_delay_seconds", "From the request to its first slot.")
        self.latency = histogram("jaxrl_request_seconds", "From the request to its last token.")

    # ------------------------------------------------------------------------------ admission

    def admit(self, ask: Ask) -> Job:
        """A job for a request, or its refusal.

        Raises:
          ApiError: 429 when the queue is full, 503 when the server is stopping or its engine has failed.
        """
        if self.stopping:
            raise ApiError(503, "The server is stopping.", kind="service_unavailable_error", code="stopping")
        if self.worker.fault is not None:
            raise engine_failed(
                EngineError(f"The engine has failed ({self.worker.fault}); restart the server.")
            )
        if ask.completions > self._most:
            raise ApiError(
                400,
                f"n: {ask.completions} completions are more than the {self._most} that this server may hold at a time; send "
                "several requests.",
                param="n",
            )
        if self._open + ask.completions > self._most:
            self.refused.add()
            least, most = _RETRY_SECONDS
            wait = math.ceil(min(max(self._pace * self.limits.queued / 2, least), most))
            raise ApiError(
                429,
                f"The queue is full: {self._open} completions are running or waiting, {self._most} at most. Try again in "
                f"{wait} s.",
                kind="rate_limit_error",
                code="queue_full",
                headers={"retry-after": str(wait)},
            )
        self._open += ask.completions
        return Job(ask.completions, stream=ask.stream)

    def close(self, job: Job, ask: Ask, reason: str) -> None:
        """Ends a job: what it has not finished is cancelled, for `reason`."""
        self._open -= ask.completions
        if job.open:
            self.cancelled.add(job.open, reason=reason)
            self.worker.cancel(job)

    async def start(self, job: Job, ask: Ask) -> None:
        """Gives a job to the engine."""
        self.prompt_tokens.add(sum(map(len, ask.prompts)))
        await self.worker.submit(job, as_prompts(ask.prompts), ask.sampling, ask.priority)

    def record(self, job: Job, completion: Completion) -> None:
        """Counts a completion that ended."""
        now = time.perf_counter()
        self._pace = 0.9 * self._pace + 0.1 * (now - self._last) if self._pace else now - self._last
        self._last = now
        self.ended.add(finish_reason=reply.finish_reason(completion))
        self.tokens.add(len(completion.tokens))
        self.rate.add(len(completion.tokens))
        if "queued" in completion.timings:
            self.queue_delay.observe(completion.timings["queued"])
        if not job.open:
            self.latency.observe(now - job.began)
            if job.first_token is not None:
                self.first_token.observe(job.first_token)

    def answer(self, ask: Ask, prefix: str) -> reply.Answer:
        """Id and names of the answer to a request."""
        return reply.Answer(
            ask=ask,
            id=f"{prefix}-{secrets.token_hex(12)}",
            created=int(time.time()),
            model=self.served.name,
            fingerprint=self.worker.view.fingerprint,
            tokenizer=self.served.tokenizer,
        )

    # ------------------------------------------------------------------------------ routes

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._complete(request, parse_chat, reply.chat, "chatcmpl")

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._complete(request, parse_completion, reply.completion, "cmpl")

    async def generate(self, request: Request) -> Response:
        """POST /inference/v1/generate."""
        return await self._complete(request, parse_generate, reply.generate, "gen")

    async def _complete(
        self,
        request: Request,
        parse: Callable[[Any, Served, Limits], Ask],
        shape: Callable[[reply.Answer, Sequence[Completion], int], dict[str, Any]],
        prefix: str,
    ) -> Response:
        raw = await read_body(request, self.limits)
        # Long texts take a while to tokenise; the loop goes on.
        ask = await asyncio.to_thread(lambda: parse(parse_json(raw), self.served, self.limits))
        job = self.admit(ask)
        reason = "error"
        try:
            async with asyncio.timeout(self.limits.seconds):
                await self.start(job, ask)
                answer = self.answer(ask, prefix)
                if ask.stream:
                    stream = reply.Stream(answer, chat=shape is reply.chat)
                    response: Response = _Streamed(self, job, ask, stream)
                    reason = ""  # the response closes the job
                    return response
                done = await unless_gone(request.receive, self._gather(job))
            if done is None:
                reason = "disconnect"
                return Response(status_code=_CLOSED)
            return _json(shape(answer, done, self.worker.view.version))
        except TimeoutError:
            reason = "timeout"
            raise timed_out(self.limits) from None
        except EngineError as error:
            raise engine_failed(error) from None
        except asyncio.CancelledError:
            reason = "shutdown"
            raise
        finally:
            if reason:
                self.close(job, ask, reason)

    async def _gather(self, job: Job) -> list[Completion]:
        done: dict[int, Completion] = {}
        async for part in job.parts():
            if part.completion is not None:
                done[part.index] = part.completion
                self.record(job, part.completion)
        return [done[index] for index in sorted(done)]

    async def models(self, request: Request) -> Response:
        """GET /v1/models and /v1/models/NAME."""
        name = request.path_params.get("name")
        if name is not None and name != self.served.name:
            raise ApiError(
                404,
                f"the model {name!a} does not exist; this server has {self.served.name!a}.",
                param="model",
                code="model_not_found",
            )
        card = {
            "id": self.served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "jaxrl_llm",
            "root": self.source,
            "max_model_len": self.served.max_context,
            "policy_version": self.worker.view.version,
        }
        return _json(card if name is not None else {"object": "list", "data": [card]})

    async def health(self, request: Request) -> Response:
        """GET /health: whether requests would be answered."""
        view, fault = self.worker.view, self.worker.fault
        status = "failed" if fault is not None else "stopping" if self.stopping else "ok"
        body = {
            "status": status,
            "model": self.served.name,
            "policy_version": view.version,
            "fingerprint": view.fingerprint,
            "paused": view.paused,
        }
        return _json(body, 200 if status == "ok" else 503)

    async def liveness(self, request: Request) -> Response:
        """GET /liveness: whether the process should be left alone."""
        alive = self.worker.fault is None
        return _json({"status": "ok" if alive else "failed"}, 200 if alive else 503)

    async def pause(self, request: Request) -> Response:
        """POST /pause?mode=keep|abort."""
        mode = request.query_params.get("mode", "keep")
        if mode not in ("keep", "abort"):
            raise ApiError(
                400,
                f"mode must be keep (rows wait where they are) or abort (they end with what they have), got {mode!a}.",
                param="mode",
            )
        await self._control(self.worker.pause(abort=mode == "abort"))
        return self._state()

    async def resume(self, request: Request) -> Response:
        """POST /resume."""
        await self._control(self.worker.resume())
        return self._state()

    def _state(self) -> Response:
        view = self.worker.view
        return _json({"paused": view.paused, "policy_version": view.version})

    async def update_weights(self, request: Request) -> Response:
        """POST /update_weights {"snapshot": RUN, "version": N?, "pages": "recompute"|"keep"?}."""
        body = parse_json(await read_body(request, self.limits))
        snapshot, version, pages = _update(body)
        if self._updating.locked():
            raise ApiError(
                409, "Another update of the weights is under way; wait for its answer.", code="busy"
            )
        async with self._updating:
            try:
                params, found, expect = await asyncio.to_thread(self.load, snapshot, version)
            except InputError as error:
                raise ApiError(400, str(error), param="snapshot") from None
            fingerprint = await self._control(
                self.worker.swap(params, version=found, pages=pages, expect=expect)
            )
        self.updates.add()
        return _json({"policy_version": found, "version": found, "fingerprint": fingerprint})

    async def end_all(self) -> None:
        """Ends what runs and waits with what it has, for the stop of the server."""
        try:
            await self.worker.abort()
        except EngineError:  # it has failed, and its requests have been told
            return

    async def _control(self, command: Awaitable[Any]) -> Any:
        try:
            return await command
        except EngineError as error:
            raise engine_failed(error) from None

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        view = self.worker.view
        stats = view.stats
        used = 1 - view.free_pages / view.pages if view.pages else 0.0
        unfilled = 1 - view.filled_share if view.filled_share else 0.0
        prompts = stats.reused_tokens + stats.prefilled_tokens
        now: dict[str, tuple[str, str, float]] = {
            "jaxrl_requests_in_flight": ("gauge", "Requests that are not answered yet.", self.in_flight),
            "jaxrl_completions_open": ("gauge", "Completions that clients wait for.", self._open),
            "jaxrl_rows_queued": ("gauge", "Completions that wait for a slot.", view.queued),
            "jaxrl_rows_running": ("gauge", "Completions that are being sampled.", view.running),
            "jaxrl_pages": ("gauge", "Pages of the K/V cache.", view.pages),
            "jaxrl_pages_free": ("gauge", "Pages that hold nothing.", view.free_pages),
            "jaxrl_pages_lost": (
                "gauge",
                "Pages held though no row is left, and of no kept prompt; told when idle.",
                view.lost_pages,
            ),
            "jaxrl_tasks": (
                "gauge",
                "Tasks of the event loop, that of this answer too.",
                len(asyncio.all_tasks()),
            ),
            "jaxrl_pages_used_ratio": ("gauge", "Share of the pages in use.", used),
            "jaxrl_pages_fragmentation_ratio": (
                "gauge",
                "Share of the room in the pages of running rows that holds no token yet.",
                unfilled,
            ),
            "jaxrl_tokens_per_second": (
                "gauge",
                "Sampled tokens of completions given in the last minute, a second.",
                self.rate.per_second(),
            ),
            "jaxrl_batch_occupancy_ratio": (
                "gauge",
                "Live rows over slots, mean over all decode steps.",
                stats.occupancy,
            ),
            "jaxrl_prefix_hit_ratio": (
                "gauge",
                "Share of the tokens of prompts that was found in pages instead of computed.",
                stats.reused_tokens / prompts if prompts else 0.0,
            ),
            "jaxrl_slots": ("gauge", "Rows that are decoded together.", stats.slots),
            "jaxrl_policy_version": ("gauge", "Train steps done by the policy that is served.", view.version),
            "jaxrl_paused": ("gauge", "1 between /pause and /resume.", view.paused),
            "jaxrl_prefix_hits_total": (
                "counter",
                "Completions whose prompt was already in the pages.",
                stats.prefix_hits,
            ),
            "jaxrl_prefilled_tokens_total": (
                "counter",
                "Tokens computed by prefill.",
                stats.prefilled_tokens,
            ),
            "jaxrl_reused_tokens_total": (
                "counter",
                "Tokens of prompts found in pages that other prompts had filled.",
                stats.reused_tokens,
            ),
            "jaxrl_page_evictions_total": (
                "counter",
                "Pages of prompts given up for others.",
                stats.evictions,
            ),
            "jaxrl_resumptions_total": ("counter", "Preempted rows that came back.", stats.resumptions),
            "jaxrl_preemptions_total": (
                "counter",
                "Rows that lost their slot for a while.",
                stats.preemptions,
            ),
            "jaxrl_dispatches_total": ("counter", "Calls of the decode program.", stats.dispatches),
            "jaxrl_decode_steps_total": ("counter", "Decode steps.", stats.decode_steps),
            "jaxrl_decoded_tokens_total": (
                "counter",
                "Tokens sampled by live rows, cancelled ones too.",
                stats.decoded_tokens,
            ),
        }
        resident = _resident_bytes()
        if resident is not None:
            now["process_resident_memory_bytes"] = ("gauge", "Memory of this process.", resident)
        counted = (
            self.requests,
            self.refused,
            self.cancelled,
            self.ended,
            self.prompt_tokens,
            self.tokens,
            self.updates,
            self.first_token,
            self.queue_delay,
            self.latency,
        )
        return Response(metrics.render(counted, now), media_type=metrics.CONTENT_TYPE)


def _resident_bytes() -> int | None:
    """Memory of this process; None where the system does not say."""
    try:
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _update(body: Any) -> tuple[str, int | None, str]:
    if not isinstance(body, dict):
        raise ApiError(400, 'the body must be {"snapshot": RUN, "version": N}.')
    unknown = sorted(body.keys() - {"snapshot", "version", "pages"})
    if unknown:
        raise ApiError(
            400,
            f"{unknown[0]} is not a field of this request; it has snapshot, version and pages.",
            param=unknown[0],
        )
    snapshot, version, pages = body.get("snapshot"), body.get("version"), body.get("pages") or "recompute"
    if not isinstance(snapshot, str) or not snapshot.strip() or "\0" in snapshot:
        raise ApiError(400, "snapshot must be a run folder, or one version in it.", param="snapshot")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
        raise ApiError(400, f"version must be a count of train steps, got {version!a}.", param="version")
    if pages not in ("keep", "recompute"):
        raise ApiError(
            400,
            "pages must be recompute (rows go on as if the new weights had read their text: exact) or keep (they attend "
            "to what the old weights computed: cheap).",
            param="pages",
        )
    return snapshot, version, pages


# ------------------------------------------------------------------------------------ answers


def _json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(reply.encode(body), status, headers=headers, media_type="application/json")


def timed_out(limits: Limits) -> ApiError:
    """The request took longer than it may."""
    return ApiError(
        504,
        f"The request took longer than {limits.seconds:g} s. Ask for fewer tokens or completions, or start the server "
        "with a longer --timeout.",
        kind="server_error",
        code="timeout",
    )


def engine_failed(error: EngineError) -> ApiError:
    """The engine could not finish."""
    return ApiError(503, str(error), kind="service_unavailable_error", code="engine_error")


async def _shown_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ApiError):
        return _json(error.body, error.status, error.headers)
    if isinstance(error, InputError):  # a check of the engine
        return _json(ApiError(400, str(error)).body, 400)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}. See GET /v1/models, POST /v1/chat/completions."
        return _json(
            ApiError(error.status_code, message, code="not_found").body, error.status_code, error.headers
        )
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLOSED)
    # A fault of ours: uvicorn logs it, the client learns no more than that.
    return _json(ApiError(500, "The server failed; its log says more.", kind="server_error").body, 500)


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request.

    Raises:
      ApiError: it is too large, or did not arrive in time.
    """
    too_large = ApiError(413, f"The body is larger than {limits.body} bytes; send less.", code="too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limits.body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.upload_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body:
                    raise too_large
    except TimeoutError:
        raise ApiError(
            408, f"The body did not arrive within {limits.upload_seconds:g} s.", code="timeout"
        ) from None
    return bytes(body)


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of `work`; None, and the work is cancelled, when the client leaves before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Streamed(Response):
    """Server-sent events; a client that leaves, in whatever way, frees its rows."""

    def __init__(self, service: Service, job: Job, ask: Ask, stream: reply.Stream):
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        del self.headers["content-length"]
        self._service, self._job, self._ask, self._stream = service, job, ask, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = "error"
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if await unless_gone(receive, self._send(send)) is None:
                reason = "disconnect"
        except OSError:
            reason = "disconnect"
        except asyncio.CancelledError:
            reason = "shutdown"
            raise
        finally:
            self._service.close(self._job, self._ask, reason)

    async def _send(self, send: Send) -> bool:
        """Sends all events; True when nothing is left to send, an error included."""

        async def event(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        service, job = self._service, self._job
        left = service.limits.seconds - (time.perf_counter() - job.began)
        try:
            async with asyncio.timeout(left):
                for chunk in self._stream.opening(service.worker.view.version):
                    await event(reply.sse(chunk))
                async for part in job.parts():
                    if part.completion is not None:
                        service.record(job, part.completion)
                    told = self._stream.push(part, service.worker.view.version)
                    if told is not None:
                        await event(reply.sse(told))
                for chunk in self._stream.closing(service.worker.view.version):
                    await event(reply.sse(chunk))
        except TimeoutError:
            await event(reply.sse(timed_out(service.limits).body))
        except EngineError as error:
            await event(reply.sse(engine_failed(error).body))
        else:
            await event(reply.DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return True


# ------------------------------------------------------------------------------------ the application


class _Gate:
    """In front of every route: who may enter, the version on every answer, the count of requests."""

    def __init__(self, app: ASGIApp, service: Service, endpoints: Sequence[str]):
        self._app, self._service, self._endpoints = app, service, frozenset(endpoints)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        service, path = self._service, scope["path"]
        endpoint = path if path in self._endpoints else "other"
        status = _CLOSED

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-policy-version"] = str(service.worker.view.version)
            await send(message)

        service.in_flight += 1
        try:
            error = None if path in _OPEN_PATHS else self._refusal(Headers(scope=scope))
            if error is None:
                await self._app(scope, receive, sending)
            else:
                await _json(error.body, error.status, error.headers)(scope, receive, sending)
        finally:
            service.in_flight -= 1
            service.requests.add(endpoint=endpoint, status=str(status))

    def _refusal(self, headers: Headers) -> ApiError | None:
        key = self._service.api_key
        if key is not None:
            given = headers.get("authorization", "").encode("latin-1")  # as it came
            if hmac.compare_digest(given, b"Bearer " + key.encode()):
                return None
            return ApiError(
                401,
                "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        # Without a key, the pages of other sites that a browser on this machine shows must not get through.
        host = urlsplit(f"//{headers.get('host', '')}").hostname or ""
        if "origin" in headers or not is_loopback(host):
            return ApiError(
                403,
                "Without an API key, only programs on this machine are served, at its loopback address. Start the server "
                "with --api-key.",
                kind="permission_error",
                code="forbidden",
            )
        return None


def build_app(service: Service) -> ASGIApp:
    """The ASGI application of a service."""
    routes = [
        Route("/health", service.health),
        Route("/liveness", service.liveness),
        Route("/metrics", service.show_metrics),
        Route("/v1/models", service.models),
        Route("/v1/models/{name:path}", service.models),
        Route("/v1/chat/completions", service.chat, methods=["POST"]),
        Route("/v1/completions", service.completions, methods=["POST"]),
        Route("/inference/v1/generate", service.generate, methods=["POST"]),
        Route("/pause", service.pause, methods=["POST"]),
        Route("/resume", service.resume, methods=["POST"]),
        Route("/update_weights", service.update_weights, methods=["POST"]),
    ]
    kinds: tuple[type[Exception], ...] = (ApiError, InputError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers={kind: _shown_error for kind in kinds})
    return _Gate(app, service, [route.path for route in routes])
