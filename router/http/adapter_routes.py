"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, like vLLM's. Runs on the router's event loop."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from common.base.errors import BadRequest
from router.http.body_model import BodyModel
from router.http.client import client_of
from router.http.openai.parse_body import read_object, validated
from router.http.openapi import OF_BODIES, described
from router.http.serve import read_and
from router.http.services import Services

_Text = Annotated[str, Field(min_length=1, max_length=1024)]
_described = partial(described, errors=(*OF_BODIES, 403), media_type="text/plain")


class _Request(BodyModel):
    lora_name: _Text


class LoadAdapterRequest(_Request):
    """Body of `POST /v1/load_lora_adapter`."""

    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Folder of the adapter, below the router's `--lora-dir`."""
    base_model_name: _Text | None = None
    load_inplace: bool | None = False


class UnloadAdapterRequest(_Request):
    """Body of `POST /v1/unload_lora_adapter`."""


def add_adapter_routes(app: FastAPI, services: Services) -> None:
    """Add both to the application."""

    @app.post("/v1/load_lora_adapter", openapi_extra=_described(body=LoadAdapterRequest))
    async def load_lora_adapter(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Load a LoRA adapter at every node of a model; answers when all have it."""
        body, _ = await read_and(request, services, lambda data: validated(read_object(data), LoadAdapterRequest))
        if body.load_inplace:
            raise BadRequest("load_inplace is not supported: unload the adapter first", param="load_inplace")
        await services.adapters.load(body.lora_name, body.lora_path, body.base_model_name, _owner(request, services))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=_described(body=UnloadAdapterRequest))
    async def unload_lora_adapter(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Unload a LoRA adapter from every node; requests that run finish with it."""
        body, _ = await read_and(request, services, lambda data: validated(read_object(data), UnloadAdapterRequest))
        await services.adapters.unload(body.lora_name, _owner(request, services))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _owner(request: Request, services: Services) -> str:
    """Whom an adapter belongs to: the API key, or everybody where there are none."""
    return client_of(request.scope).name if services.api_keys else ""
