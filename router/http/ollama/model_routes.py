"""ollama's `/api/tags`, `/api/ps`, `/api/show` and `/api/version`. Runs on the router's event loop."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.http.error_shapes import OllamaError
from router.http.json_body import Json
from router.http.ollama.answer_types import OllamaModel, OllamaModels, OllamaVersion
from router.http.ollama.requests import ShowRequest
from router.http.openai.parse_body import validated
from router.http.openapi import OF_BODIES, described
from router.http.operator_routes import is_served
from router.http.responses import JsonResponse
from router.http.serve import parse_as, warnings_of
from router.http.services import Services
from router.models.served_model import ServedModel

_VERSION = "0.11.0"
"""The first ollama with all that its calls take here (efforts in `think`): clients ask what they may send."""
_NEVER = datetime(2318, 1, 1, tzinfo=UTC).isoformat()
"""About ollama's value for a model that stays loaded."""


def add_ollama_model_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""
    catalog, nodes = services.catalog, services.dispatcher.nodes

    @app.get("/api/tags", openapi_extra=described(OllamaModels, error=OllamaError))
    async def ollama_tags() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The served models, under each of their names."""
        cards = [{**_card(model), "modified_at": _changed(model)} for model in catalog.models]
        return JsonResponse({"models": cards})

    @app.get("/api/ps", openapi_extra=described(OllamaModels, error=OllamaError))
    async def ollama_ps() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The models that can answer now, under each of their names."""
        running = [model for model in catalog.models if is_served(nodes, model)]
        kept: Json = {"expires_at": _NEVER, "size_vram": 0}
        return JsonResponse(
            {"models": [{**_card(model), **kept, "context_length": model.max_model_len} for model in running]}
        )

    @app.post("/api/show", openapi_extra=described(OllamaModel, body=ShowRequest, errors=OF_BODIES, error=OllamaError))
    async def ollama_show(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Describe a model, like ollama's endpoint of the same name."""
        body, _ = await parse_as(request, services, ShowRequest, validated, ids="ollama-")
        model = catalog.model_for(body.wanted, "generate", "embed", "score")
        return JsonResponse(_shown(model), headers=warnings_of(request))

    @app.get("/api/version", openapi_extra=described(OllamaVersion, error=OllamaError))
    async def ollama_version() -> Response:  # pyright: ignore[reportUnusedFunction]
        """The version of ollama whose calls these are; `/version` has the router's."""
        return JsonResponse({"version": _VERSION})


def _card(model: ServedModel) -> Json:
    return {
        "name": model.name,
        "model": model.name,
        "size": 0,
        "digest": model.tokenizer_digest,
        "details": _details(model),
    }


def _details(model: ServedModel) -> Json:
    family = _family(model)
    return {
        "parent_model": "" if model.adapter is None else model.root,
        "format": "gguf" if model.path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family] if family else None,
        "parameter_size": "",
        "quantization_level": "",
    }


def _shown(model: ServedModel) -> Json:
    family = _family(model) or "unknown"
    about: Json = {
        "general.architecture": family,
        "general.basename": model.name,
        f"{family}.context_length": model.max_model_len,
        f"{family}.vocab_size": model.vocab_size,
    }
    if model.hidden_size:
        about[f"{family}.embedding_length"] = model.hidden_size
    return {
        "modelfile": f"FROM {model.name}",
        "parameters": f"num_ctx {model.max_model_len}",
        "template": model.tokenizer.template_source,
        "license": "",
        "modified_at": _changed(model),
        "details": _details(model),
        "model_info": about,
        "capabilities": _capabilities(model),
    }


def _capabilities(model: ServedModel) -> list[str]:
    """The model's capabilities in ollama's terms."""
    if model.task != "generate":
        return ["embedding"] if model.task == "embed" else []
    formats = model.output_formats
    tools = ["tools"] if formats.tools is not None and not formats.assumed and model.tokenizer.takes_tools else []
    return ["completion", *tools, *(["thinking"] if formats.separate_reasoning else [])]


def _family(model: ServedModel) -> str:
    """The model family, for example `llama` for `LlamaForCausalLM`; empty if unknown."""
    return re.sub(r"(Model|LMHeadModel|For[A-Z]\w*)$", "", model.architecture).lower()


def _changed(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.changed_s, UTC).isoformat()
