"""The application: who may enter, and which route answers."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxrl_llm.errors import InputError
from jaxrl_llm.serve import admin, completing
from jaxrl_llm.serve.protocol import ApiError
from jaxrl_llm.serve.service import Service
from jaxrl_llm.serve.transport import CLOSED, json_response, shown_error

__all__ = ["Service", "build_app", "is_loopback"]

_OPEN_PATHS = ("/health", "/liveness")


def is_loopback(host: str) -> bool:
    """Whether a host name or address is this machine's own."""
    return host in ("localhost", "::1") or host.startswith("127.")


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
        status = CLOSED

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
                await json_response(error.body, error.status, error.headers)(scope, receive, sending)
        finally:
            service.in_flight -= 1
            service.counts.requests.add(endpoint=endpoint, status=str(status))

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
    answers: tuple[tuple[str, str, Callable[[Service, Request], Awaitable[Response]]], ...] = (
        ("GET", "/health", admin.health),
        ("GET", "/liveness", admin.liveness),
        ("GET", "/metrics", admin.metrics),
        ("GET", "/v1/models", completing.models),
        ("GET", "/v1/models/{name:path}", completing.models),
        ("POST", "/v1/chat/completions", completing.chat),
        ("POST", "/v1/completions", completing.completions),
        ("POST", "/inference/v1/generate", completing.generate),
        ("POST", "/pause", admin.pause),
        ("POST", "/resume", admin.resume),
        ("POST", "/update_weights", admin.update_weights),
    )
    routes = [Route(path, partial(answer, service), methods=[method]) for method, path, answer in answers]
    kinds: tuple[type[Exception], ...] = (ApiError, InputError, HTTPException, ClientDisconnect, Exception)
    app = Starlette(routes=routes, exception_handlers={kind: shown_error for kind in kinds})
    return _Gate(app, service, [route.path for route in routes])
