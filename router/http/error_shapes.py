"""Errors in the shapes of other APIs than OpenAI's, by path. Pure."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from common.base.errors import KvRelayError, PromptTooLong
from router.http.json_body import Json, error_body

MESSAGES_PATH = "/v1/messages"
"""Path prefix of Anthropic's calls."""
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicErrorDetails(TypedDict):
    """What went wrong."""

    type: str
    message: str


class AnthropicError(TypedDict):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetails


class OllamaError(TypedDict):
    """An error in ollama's shape."""

    error: str


def anthropic_error(error: KvRelayError) -> Json:
    """An error, also as the event that ends a stream."""
    status = error.http_status
    kind = _KINDS.get(status, "invalid_request_error" if 400 <= status < 500 else "api_error")
    message = error.message or error.code
    if isinstance(error, PromptTooLong):  # in the words by which clients know that they must shorten the conversation
        message = f"prompt is too long: {error.tokens} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


def shaped_error(path: str, error: KvRelayError) -> Json:
    """An error in the shape of the API that the path belongs to; OpenAI's if none."""
    if path.startswith(MESSAGES_PATH):
        return anthropic_error(error)
    if path.startswith("/api/"):
        return {"error": error.message or error.code}
    return error_body(error)
