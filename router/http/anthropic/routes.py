"""`/v1/messages` and `/v1/messages/count_tokens`. Runs on the router's event loop."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from router.http.anthropic.answer_types import AnthropicMessage, TokenCount
from router.http.anthropic.messages_format import MessagesFormat
from router.http.anthropic.messages_request import CountTokensRequest, MessagesRequest
from router.http.error_shapes import AnthropicError
from router.http.json_body import Json
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import equivalent_request, validated
from router.http.openapi import OF_BODIES, described, generates
from router.http.response_headers import OF_MESSAGES
from router.http.serve import count_prompt, parse_as, serve_chat
from router.http.services import Services


def add_anthropic_routes(app: FastAPI, services: Services) -> None:
    """Add both to the application."""

    @app.post("/v1/messages", openapi_extra=generates(AnthropicMessage, MessagesRequest, error=AnthropicError))
    async def messages(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """Answer a conversation, like Anthropic's endpoint of the same name."""
        body, size = await parse_as(request, services, MessagesRequest, _chat_request, ids=OF_MESSAGES)
        return await serve_chat(request, services, body, size, MessagesFormat)

    @app.post(
        "/v1/messages/count_tokens",
        openapi_extra=described(TokenCount, body=CountTokensRequest, errors=OF_BODIES, error=AnthropicError),
    )
    async def count_tokens(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        """The number of prompt tokens that `/v1/messages` would use."""
        body, size = await parse_as(request, services, CountTokensRequest, _chat_request, ids=OF_MESSAGES)
        return await count_prompt(request, services, body, size, {})


def _chat_request(fields: Json, kind: type[CountTokensRequest]) -> ChatRequest:
    return equivalent_request(validated(fields, kind).chat_request(), ChatRequest)
