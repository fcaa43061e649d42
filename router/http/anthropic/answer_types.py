"""The JSON objects that Anthropic's calls answer with, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class AnthropicBlock(TypedDict):
    """A part of an answer: the fields that its type has."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class AnthropicUsage(TypedDict):
    """Token counts; those read from caches are not among the input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(TypedDict):
    """The answer to a conversation."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(TypedDict):
    """The number of prompt tokens."""

    input_tokens: int


class AnthropicModel(TypedDict):
    """A served model under one of its names."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class AnthropicModelList(TypedDict):
    """The served models, all on one page; the ids are null if there are none."""

    data: list[AnthropicModel]
    has_more: Literal[False]
    first_id: str | None
    last_id: str | None
