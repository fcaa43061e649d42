"""`/v1/responses`. Runs on the router's event loop."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from pydantic import TypeAdapter
from starlette.responses import Response

from common.base.errors import BadRequest, NotFound
from router.http.client import client_of
from router.http.json_body import Json
from router.http.on_thread import maybe_on_thread
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import as_far_as_there_is_room, completion_request, validated
from router.http.openapi import OF_GENERATION, described
from router.http.response_store import ResponseStore, StoredResponse
from router.http.responses import JsonResponse
from router.http.responses_api.answer_types import DeletedResponse, ResponseObject
from router.http.responses_api.input_items import InputItem, ItemReference, chat_messages
from router.http.responses_api.item_references import looked_up
from router.http.responses_api.responses_format import ResponsesFormat
from router.http.responses_api.responses_request import ResponsesRequest
from router.http.serve import assign_ids, format_options, parse_as, prepare_chat, serve
from router.http.services import Services

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])


def add_responses_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""

    def tenant_of(request: Request) -> str:
        return client_of(request.scope).name if services.api_keys else "all"

    @app.post(
        "/v1/responses",
        openapi_extra=described(
            ResponseObject, body=ResponsesRequest, errors=OF_GENERATION, stream="text/event-stream"
        ),
    )
    async def create_response(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like OpenAI's endpoint of the same name."""
        assign_ids(request, "resp_")
        body, size = await parse_as(request, services, ResponsesRequest, validated)
        earlier: list[Json] = []
        if body.previous_response_id is not None:
            stored = await _store(services).get(tenant_of(request), body.previous_response_id)
            earlier = stored.messages
            size += stored.size_bytes
        if not isinstance(body.input, str) and any(isinstance(item, ItemReference) for item in body.input):
            items, more = await looked_up(body.input, _store(services), tenant_of(request), services.max_body_bytes)
            body, size = body.model_copy(update={"input": items}), size + more
        chat_body = await maybe_on_thread(size, lambda: completion_request(body.chat_request(earlier), ChatRequest))
        as_far_as_there_is_room(chat_body)
        chat = await prepare_chat(request, services, chat_body, size)
        options = format_options(request, chat_body, chat.model)
        form = ResponsesFormat(options, chat.model.tokenizer, chat.parsers(), body.shown())
        keep = None
        if services.responses is not None and body.store is not False:
            keep = partial(_keep, services.responses, tenant_of(request), form, [*earlier, *body.chat_messages()])
        return await serve(
            request, services, chat.model, [chat.generation.request], form, stream=bool(body.stream), before_end=keep
        )

    @app.get("/v1/responses/{response_id}", openapi_extra=described(ResponseObject, errors=(400, 404, 503)))
    async def get_response(request: Request, response_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """A stored response, whole."""
        if request.query_params.get("stream") == "true":
            raise BadRequest("a stored response is not streamed again; ask without stream", param="stream")
        return JsonResponse((await _store(services).get(tenant_of(request), response_id)).response)

    @app.delete("/v1/responses/{response_id}", openapi_extra=described(DeletedResponse, errors=(404, 503)))
    async def delete_response(request: Request, response_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Remove a stored response."""
        await _store(services).delete(tenant_of(request), response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})


def _store(services: Services) -> ResponseStore:
    if services.responses is None:
        raise NotFound("this router stores no responses; send the whole conversation", code="response_not_found")
    return services.responses


async def _keep(store: ResponseStore, tenant: str, form: ResponsesFormat, messages: list[Json]) -> None:
    """Store an answer with its conversation, if it has ended."""
    if form.response is not None:
        answer = chat_messages(_ITEMS.validate_python(form.response["output"]))
        await store.put(tenant, StoredResponse(form.response, [*messages, *answer]))
