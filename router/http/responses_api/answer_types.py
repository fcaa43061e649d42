"""The JSON objects of `/v1/responses`, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class OutputItem(TypedDict):
    """A part of an answer: the fields that its type has."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class ResponseUsage(TypedDict):
    """Token counts."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(TypedDict):
    """An answer, and the fields that it repeats from its request."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "failed", "in_progress"]
    model: str
    output: list[OutputItem]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    usage: ResponseUsage | None
    instructions: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    tool_choice: Any
    tools: list[dict[str, Any]]


class DeletedResponse(TypedDict):
    """A response that is no longer stored."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItemList(TypedDict):
    """Items of a stored response's input: the fields that their types have."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(TypedDict):
    """The number of prompt tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
