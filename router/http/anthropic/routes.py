"""`/v1/messages` and `/v1/messages/count_tokens`. Runs on the router's event loop."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.http.anthropic.answer_types import AnthropicMessage, TokenCount
from router.http.anthropic.messages_format import MessagesFormat
from router.http.anthropic.messages_request import CountTokensRequest, MessagesRequest
from router.http.error_shapes import AnthropicError
from router.http.json_body import Json
from router.http.openai.build_request import chat_prompt
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import as_far_as_there_is_room, completion_request, validated
from router.http.openapi import OF_BODIES, OF_GENERATION, described
from router.http.response_headers import OF_MESSAGES
from router.http.responses import JsonResponse
from router.http.serve import assign_ids, format_options, parse_as, prepare_chat, serve, warnings_of
from router.http.services import Services


def add_anthropic_routes(app: FastAPI, services: Services) -> None:
    """Add both to the application."""

    @app.post(
        "/v1/messages",
        openapi_extra=described(
            AnthropicMessage,
            body=MessagesRequest,
            errors=OF_GENERATION,
            error=AnthropicError,
            stream="text/event-stream",
        ),
    )
    async def messages(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like Anthropic's endpoint of the same name."""
        assign_ids(request, OF_MESSAGES)
        body, size = await parse_as(request, services, MessagesRequest, _chat_request)
        chat = await prepare_chat(request, services, body, size)
        form = MessagesFormat(format_options(request, services, body, chat.model), chat.model.tokenizer, chat.parsers())
        return await serve(request, services, chat.model, [chat.generation.request], form, stream=bool(body.stream))

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=described(TokenCount, body=CountTokensRequest, errors=OF_BODIES, error=AnthropicError),
    )
    async def count_tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The number of prompt tokens that `/v1/messages` would use."""
        ids = assign_ids(request, OF_MESSAGES)
        body, size = await parse_as(request, services, CountTokensRequest, _chat_request)
        model = services.catalog.get(body.model)
        tokens = await services.body_work.run(
            request, size, lambda: model.tokenizer.encode_chat(chat_prompt(body, model).text)
        )
        return JsonResponse({"input_tokens": len(tokens)}, headers=ids.headers() + warnings_of(request))


def _chat_request(fields: Json, kind: type[CountTokensRequest]) -> ChatRequest:
    return as_far_as_there_is_room(completion_request(validated(fields, kind).chat_request(), ChatRequest))
