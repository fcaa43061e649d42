"""Routes for operators and tools: models, health, readiness, version, load, metrics. Runs on the router's event loop."""

from __future__ import annotations

import functools
import importlib.metadata
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, Response
from starlette.types import Scope

from common.control.messages import Role
from common.model.hub import model_name
from router.http.answer_types import Health, Load, ModelCard, ModelList, Ready, ServerInfo, Version
from router.http.anthropic.answer_types import AnthropicModel, AnthropicModelList
from router.http.openapi import described
from router.http.request_headers import header
from router.http.responses import JsonResponse
from router.http.services import Services
from router.models.served_model import ServedModel
from router.nodes.node_table import NodeTable

_STARTED_S = int(time.time())
_DOCS_PAGE = Path(__file__).parent / "docs.html"


@functools.cache
def version() -> str:
    """Version of the distribution that was installed when it was first asked for, at the start of the router."""
    try:
        return importlib.metadata.version("kvrelay")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def add_operator_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""
    _add_model_routes(app, services)
    _add_state_routes(app, services)

    @app.get("/version", openapi_extra=described(Version))
    async def show_version() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The router's version."""
        return JsonResponse({"version": version()})

    @app.get("/metrics", openapi_extra=described(media_type="text/plain"))
    async def metrics() -> Response:  # pyright: ignore[reportUnusedFunction]
        """Prometheus metrics."""
        return Response(services.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:  # pyright: ignore[reportUnusedFunction]
        return FileResponse(_DOCS_PAGE, media_type="text/html; charset=utf-8")


def _add_model_routes(app: FastAPI, services: Services) -> None:
    @app.get("/v1/models/", include_in_schema=False)
    @app.get("/v1/models", openapi_extra=described(ModelList | AnthropicModelList))
    async def models(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The served models, under each of their names; in Anthropic's shape with the header `anthropic-version`."""
        if _is_of_anthropic(request.scope):
            return JsonResponse(_anthropic_page(services.catalog.models))
        return JsonResponse({"object": "list", "data": [_model_card(model) for model in services.catalog.models]})

    @app.get("/v1/models/{name:path}", openapi_extra=described(ModelCard | AnthropicModel, errors=(404, 503)))
    async def one_model(request: Request, name: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """A served model, by name; in Anthropic's shape with the header `anthropic-version`."""
        model = services.catalog.get(name)
        return JsonResponse(_anthropic_model(model) if _is_of_anthropic(request.scope) else _model_card(model))


def _add_state_routes(app: FastAPI, services: Services) -> None:
    nodes = services.dispatcher.nodes

    def is_ready() -> bool:
        if services.dispatcher.draining:
            return False
        return any(is_served(nodes, model) for model in services.catalog.models)

    @app.get("/health", openapi_extra=described(Health, also=(503,)))
    async def health() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 if requests can be served, else 503; the body says more."""
        ready, degraded = is_ready(), services.degraded()
        body = {
            "status": ("degraded" if degraded else "ok") if ready else "unavailable",
            "prefill": len(nodes.usable("prefill")),
            "decode": len(nodes.usable("decode")),
            "pooling": nodes.num_pooling,
            "prefill_mode": _prefill_mode(nodes),
            "degraded": bool(degraded),
            "redis": degraded or "ok",
            "refused": services.catalog.refusals,
            "ignored_nodes": services.catalog.ignored_nodes,
        }
        return JsonResponse(body, 200 if ready else 503)

    @app.get("/ready", openapi_extra=described(Ready, also=(503,)))
    async def ready() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 if requests can be served, else 503: for load balancers, like `/health`, with no details."""
        found = is_ready()
        return JsonResponse({"ready": found}, 200 if found else 503)

    @app.get("/ping", openapi_extra=described())
    async def ping() -> Response:  # pyright: ignore[reportUnusedFunction]
        """200 as long as the router's event loop runs."""
        return Response(status_code=200)

    @app.get("/load", openapi_extra=described(Load))
    async def load() -> Response:  # pyright: ignore[reportUnusedFunction]
        """`server_load`: the generations of this router that have not ended."""
        return JsonResponse({"server_load": services.dispatcher.running})

    @app.get("/server_info", openapi_extra=described(ServerInfo))
    async def server_info() -> Response:  # pyright: ignore[reportUnusedFunction]
        """What this router serves and how it is set up."""
        cards = [_model_card(model) for model in services.catalog.models]
        counts = {role: len(nodes.usable(role)) for role in ("prefill", "decode")} | {"pooling": nodes.num_pooling}
        return JsonResponse({"version": version(), "models": cards, "nodes": counts, "settings": services.settings})


def _prefill_mode(nodes: NodeTable) -> str:
    if nodes.usable("prefill"):
        return "relayed"
    if nodes.num_pooling and not nodes.usable("decode"):
        return "none: no node generates"
    return "local: no prefill node, decode nodes compute prompts themselves"


def is_served(nodes: NodeTable, model: ServedModel) -> bool:
    """Whether there is a node that can answer requests for the model alone."""
    role: Role = "decode" if model.task == "generate" else "prefill"
    return len(nodes.fleets(model.base).by_role[role]) > 0


def _model_card(model: ServedModel) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": _STARTED_S,
        "owned_by": "kvrelay",
        "root": model_name(model.folder) if model.adapter is None else model.adapter_path or model.name,
        "parent": None if model.adapter is None else model.root,
        "max_model_len": model.max_model_len,
        "vocab_size": model.vocab_size,
    }


def _is_of_anthropic(scope: Scope) -> bool:
    """Whether a request comes from an Anthropic client, which always sends the version of the API."""
    return header(scope, b"anthropic-version") != ""


def _anthropic_model(model: ServedModel) -> AnthropicModel:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(_STARTED_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def _anthropic_page(models: Sequence[ServedModel]) -> AnthropicModelList:
    """All models on one page, regardless of `limit`: clients ask for no further page if `has_more` is false."""
    return {
        "data": [_anthropic_model(model) for model in models],
        "has_more": False,
        "first_id": models[0].name if models else None,
        "last_id": models[-1].name if models else None,
    }
