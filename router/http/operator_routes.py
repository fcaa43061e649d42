"""All routes except the two completion calls: models, health, version, metrics. Runs on the router's event loop."""

from __future__ import annotations

import importlib.metadata
import time

from fastapi import FastAPI
from starlette.responses import Response

from router.http.responses import JsonResponse
from router.http.services import Services
from router.model_catalog import ServedModel

_STARTED_S = int(time.time())


def version() -> str:
    """Version of the installed distribution."""
    try:
        return importlib.metadata.version("kvrelay")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def add_operator_routes(app: FastAPI, services: Services) -> None:
    nodes = services.dispatcher.nodes

    @app.get("/v1/models")
    async def models() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The served model."""
        model = services.catalog.model
        data = [] if model is None else [_model_card(model)]
        return JsonResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The served model, by name."""
        return JsonResponse(_model_card(services.catalog.get(name)))

    @app.get("/health")
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 if requests can be served, else 503; the body says more."""
        prefill, decode = len(nodes.usable("prefill")), len(nodes.usable("decode"))
        ready = decode > 0 and services.catalog.model is not None
        degraded = services.degraded()
        body = {
            "status": ("degraded" if degraded else "ok") if ready else "unavailable",
            "prefill": prefill,
            "decode": decode,
            "prefill_mode": "relayed" if prefill else "local: no prefill node, decode nodes compute prompts themselves",
            "degraded": bool(degraded),
            "redis": degraded or "ok",
        }
        return JsonResponse(body, 200 if ready else 503)

    @app.get("/ping")
    async def ping() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 as long as the router's event loop runs."""
        return Response(status_code=200)

    @app.get("/version")
    async def show_version() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The router's version."""
        return JsonResponse({"version": version()})

    @app.get("/metrics")
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prometheus metrics."""
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _model_card(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "kvrelay",
        "root": model.folder.name,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
    }
