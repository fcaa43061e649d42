"""`/v1/responses`. Runs on the router's event loop."""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import NamedTuple

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from common.base.errors import BadRequest, NotFound
from router.http.client import client_of
from router.http.json_body import Json
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import equivalent_request, validated
from router.http.openapi import OF_BODIES, described, generates
from router.http.response_store import ResponseStore, StoredResponse
from router.http.responses import JsonResponse
from router.http.responses_api.answer_types import DeletedResponse, InputItemList, InputTokens, ResponseObject
from router.http.responses_api.input_items import ItemReference
from router.http.responses_api.item_references import looked_up
from router.http.responses_api.responses_format import ResponsesFormat
from router.http.responses_api.responses_request import ResponsesRequest
from router.http.responses_api.stored_input import answer_messages, item_page
from router.http.serve import count_prompt, format_options, parse_as, prepare_chat, serve
from router.http.services import Services


def add_responses_routes(app: FastAPI, services: Services) -> None:
    """Add all of them to the application."""

    @app.post("/v1/responses", openapi_extra=generates(ResponseObject, ResponsesRequest))
    async def create_response(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like OpenAI's endpoint of the same name."""
        body, earlier, chat_body, size = await _read(request, services)
        model = services.catalog.model_for(chat_body.model, "generate")
        chat = await prepare_chat(request, services, chat_body, size, model)
        options = format_options(request, services, chat_body, model)
        form = ResponsesFormat(options, model.tokenizer, chat.parsers(), body.shown())
        keep = None
        if services.responses is not None and body.store is not False:
            tenant, messages = _tenant_of(request, services), [*earlier, *body.chat_messages()]
            keep = partial(_keep, services.responses, tenant, form, messages)

        def answered(asked: Request) -> Awaitable[Response]:
            stream = bool(body.stream)
            return serve(asked, services, model, [chat.request], form, stream=stream, before_end=keep)

        if not body.background:
            return await answered(request)
        tenant, begun = _tenant_of(request, services), StoredResponse(form.begun(), [*earlier, *body.chat_messages()])
        return JsonResponse(await services.background.start(request, tenant, _store(services), begun, answered))

    @app.post(
        "/v1/responses/input_tokens", openapi_extra=described(InputTokens, body=ResponsesRequest, errors=OF_BODIES)
    )
    async def count_input_tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The number of prompt tokens that `/v1/responses` would use."""
        _, _, chat_body, size = await _read(request, services)
        return await count_prompt(request, services, chat_body, size, {"object": "response.input_tokens"})

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact() -> Response:  # pyright: ignore[reportUnusedFunction]
        raise HTTPException(404)  # not 405, as of a response with this id

    _add_stored_routes(app, services)


def _add_stored_routes(app: FastAPI, services: Services) -> None:
    def stored(request: Request, response_id: str) -> Awaitable[StoredResponse]:
        return _store(services).get(_tenant_of(request, services), response_id)

    @app.get("/v1/responses/{response_id}", openapi_extra=described(ResponseObject, errors=(400, 404, 503)))
    async def get_response(request: Request, response_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """A stored response, whole."""
        if request.query_params.get("stream") == "true":
            raise BadRequest("a stored response is not streamed again; ask without stream", param="stream")
        return JsonResponse((await stored(request, response_id)).response)

    @app.post("/v1/responses/{response_id}/cancel", openapi_extra=described(ResponseObject, errors=(400, 404, 503)))
    async def cancel_response(request: Request, response_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """End a response that is computed in the background."""
        tenant, store = _tenant_of(request, services), _store(services)
        return JsonResponse(await services.background.cancel(tenant, store, response_id))

    @app.get("/v1/responses/{response_id}/input_items", openapi_extra=described(InputItemList, errors=(400, 404, 503)))
    async def list_input_items(request: Request, response_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The input of a stored response, with the turns before, in pages: `order`, `after`, `limit`."""
        return JsonResponse(item_page(await stored(request, response_id), request.query_params))

    @app.delete("/v1/responses/{response_id}", openapi_extra=described(DeletedResponse, errors=(404, 503)))
    async def delete_response(request: Request, response_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Remove a stored response."""
        await _store(services).delete(_tenant_of(request, services), response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})


def _tenant_of(request: Request, services: Services) -> str:
    return client_of(request.scope).name if services.api_keys else "all"


class _Conversation(NamedTuple):
    """A body, the messages before it, the equivalent chat request, and the bytes that bound all work on it."""

    body: ResponsesRequest
    earlier: list[Json]
    chat: ChatRequest
    size: int


async def _read(request: Request, services: Services) -> _Conversation:
    tenant = _tenant_of(request, services)
    body, size = await parse_as(request, services, ResponsesRequest, validated, ids="resp_")
    earlier: list[Json] = []
    if body.previous_response_id is not None:
        stored = await _store(services).get(tenant, body.previous_response_id)
        if stored.response.get("status") == "in_progress":
            raise BadRequest("this response has not ended", param="previous_response_id")
        earlier = stored.messages
        size += stored.size_bytes
    if not isinstance(body.input, str) and any(isinstance(item, ItemReference) for item in body.input):
        items, more = await looked_up(body.input, _store(services), tenant, services.max_body_bytes)
        body, size = body.model_copy(update={"input": items}), size + more
    chat = await services.body_work.run(
        request, size, lambda: equivalent_request(body.chat_request(earlier), ChatRequest)
    )
    return _Conversation(body, earlier, chat, size)


def _store(services: Services) -> ResponseStore:
    if services.responses is None:
        raise NotFound("this router stores no responses; send the whole conversation", code="response_not_found")
    return services.responses


async def _keep(store: ResponseStore, tenant: str, form: ResponsesFormat, messages: list[Json]) -> None:
    """Store an answer with its conversation, if it has ended."""
    if form.response is not None:
        await store.put(tenant, StoredResponse(form.response, [*messages, *answer_messages(form.response)]))
