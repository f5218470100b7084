"""The routes for whoever runs the server: its state and figures, pauses, other weights."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jaxrl_llm.errors import InputError
from jaxrl_llm.serve import figures
from jaxrl_llm.serve.metrics import CONTENT_TYPE
from jaxrl_llm.serve.protocol import ApiError, parse_json
from jaxrl_llm.serve.service import RETRY_WARM, Service
from jaxrl_llm.serve.transport import json_response, read_body

__all__ = ["health", "liveness", "metrics", "pause", "resume", "update_weights"]


async def health(service: Service, request: Request) -> Response:
    """GET /health: whether requests would be answered."""
    view, fault = service.worker.view, service.worker.fault
    status = "ok"
    for holds, name in (
        (service.warming, "warming up"),
        (service.stopping, "stopping"),
        (fault is not None, "failed"),
    ):
        status = name if holds else status
    body = {
        "status": status,
        "model": service.served.name,
        "policy_version": view.version,
        "fingerprint": view.fingerprint,
        "paused": view.paused,
    }
    retry = {"retry-after": str(RETRY_WARM)} if status == "warming up" else None
    return json_response(body, 200 if status == "ok" else 503, retry)


async def liveness(service: Service, request: Request) -> Response:
    """GET /liveness: whether the process should be left alone."""
    alive = service.worker.fault is None
    return json_response({"status": "ok" if alive else "failed"}, 200 if alive else 503)


async def pause(service: Service, request: Request) -> Response:
    """POST /pause?mode=keep|abort."""
    mode = request.query_params.get("mode", "keep")
    if mode not in ("keep", "abort"):
        raise ApiError(
            400,
            f"mode must be keep (rows wait where they are) or abort (they end with what they have), got {mode!a}.",
            param="mode",
        )
    await service.control(service.worker.pause(abort=mode == "abort"))
    return _state(service)


async def resume(service: Service, request: Request) -> Response:
    """POST /resume."""
    await service.control(service.worker.resume())
    return _state(service)


def _state(service: Service) -> Response:
    view = service.worker.view
    return json_response({"paused": view.paused, "policy_version": view.version})


async def update_weights(service: Service, request: Request) -> Response:
    """POST /update_weights {"snapshot": RUN, "version": N?, "pages": "recompute"|"keep"?}."""
    body = parse_json(await read_body(request, service.limits))
    snapshot, version, pages = _update(body)
    if service.updating.locked():
        raise ApiError(409, "Another update of the weights is under way; wait for its answer.", code="busy")
    async with service.updating:
        try:
            params, found, expect = await asyncio.to_thread(service.load, snapshot, version)
        except InputError as error:
            raise ApiError(400, str(error), param="snapshot") from None
        fingerprint = await service.control(
            service.worker.swap(params, version=found, pages=pages, expect=expect)
        )
    service.counts.updates.add()
    return json_response({"policy_version": found, "version": found, "fingerprint": fingerprint})


async def metrics(service: Service, request: Request) -> Response:
    """GET /metrics."""
    text = figures.page(
        service.counts,
        service.worker.view,
        in_flight=service.in_flight,
        open_completions=service.open_completions,
    )
    return Response(text, media_type=CONTENT_TYPE)


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
