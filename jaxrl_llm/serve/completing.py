"""The routes that complete prompts: OpenAI's, and token-in/token-out generation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxrl_llm.sampler.base import Completion
from jaxrl_llm.serve import reply
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
from jaxrl_llm.serve.service import Service, engine_failed, timed_out
from jaxrl_llm.serve.transport import CLOSED, json_response, read_body, unless_gone
from jaxrl_llm.serve.worker import EngineError, Job

__all__ = ["chat", "completions", "generate", "models"]


async def chat(service: Service, request: Request) -> Response:
    """POST /v1/chat/completions."""
    return await _complete(service, request, parse_chat, reply.chat, "chatcmpl")


async def completions(service: Service, request: Request) -> Response:
    """POST /v1/completions."""
    return await _complete(service, request, parse_completion, reply.completion, "cmpl")


async def generate(service: Service, request: Request) -> Response:
    """POST /inference/v1/generate."""
    return await _complete(service, request, parse_generate, reply.generate, "gen")


async def _complete(
    service: Service,
    request: Request,
    parse: Callable[[Any, Served, Limits], Ask],
    shape: Callable[[reply.Answer, Sequence[Completion], int], dict[str, Any]],
    prefix: str,
) -> Response:
    raw = await read_body(request, service.limits)
    # Long texts take a while to tokenise; the loop goes on.
    ask = await asyncio.to_thread(lambda: parse(parse_json(raw), service.served, service.limits))
    job = service.admit(ask)
    reason = "error"
    try:
        async with asyncio.timeout(service.limits.seconds):
            await service.start(job, ask)
            answer = service.answer(ask, prefix)
            if ask.stream:
                stream = reply.Stream(answer, chat=shape is reply.chat)
                response: Response = _Streamed(service, job, ask, stream)
                reason = ""  # the response closes the job
                return response
            done = await unless_gone(request.receive, service.gather(job, ask))
        if done is None:
            reason = "disconnect"
            return Response(status_code=CLOSED)
        version = service.worker.view.version
        if ask.sampling.prompt_logprobs:  # what is said of a long prompt may be megabytes
            return await asyncio.to_thread(lambda: json_response(shape(answer, done, version)))
        return json_response(shape(answer, done, version))
    except TimeoutError:
        reason = "timeout"
        raise timed_out(service.limits) from None
    except EngineError as error:
        raise engine_failed(error) from None
    except asyncio.CancelledError:
        reason = "shutdown"
        raise
    finally:
        if reason:
            service.close(job, ask, reason)


async def models(service: Service, request: Request) -> Response:
    """GET /v1/models and /v1/models/NAME."""
    name = request.path_params.get("name")
    if name is not None and name != service.served.name:
        raise ApiError(
            404,
            f"the model {name!a} does not exist; this server has {service.served.name!a}.",
            param="model",
            code="model_not_found",
        )
    card = {
        "id": service.served.name,
        "object": "model",
        "created": service.created,
        "owned_by": "jaxrl_llm",
        "root": service.source,
        "max_model_len": service.served.max_context,
        "policy_version": service.worker.view.version,
    }
    return json_response(card if name is not None else {"object": "list", "data": [card]})


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
                async for part in service.parts(job, self._ask):
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
