"""Requests and answers as bytes: bodies with their limits, JSON, errors, clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from jaxrl_llm.errors import InputError
from jaxrl_llm.serve import reply
from jaxrl_llm.serve.protocol import ApiError, Limits

__all__ = ["CLOSED", "json_response", "read_body", "shown_error", "unless_gone"]

CLOSED = 499  # for the statistics: the client left before it was answered


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(reply.encode(body), status, headers=headers, media_type="application/json")


async def shown_error(request: Request, error: Exception) -> Response:
    """The answer to a request that an exception ended."""
    if isinstance(error, ApiError):
        return json_response(error.body, error.status, error.headers)
    if isinstance(error, InputError):  # a check of the engine
        return json_response(ApiError(400, str(error)).body, 400)
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}. See GET /v1/models, POST /v1/chat/completions."
        return json_response(
            ApiError(error.status_code, message, code="not_found").body, error.status_code, error.headers
        )
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLOSED)
    # A fault of ours: uvicorn logs it, the client learns no more than that.
    return json_response(
        ApiError(500, "The server failed; its log says more.", kind="server_error").body, 500
    )


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
