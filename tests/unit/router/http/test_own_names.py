"""Errors of calls that become chat requests, by the names that their own fields have."""

from __future__ import annotations

from typing import Any

import pytest

from common.base.errors import BadRequest
from router.http.anthropic.messages_request import MessagesRequest
from router.http.body_model import BodyModel
from router.http.openai.chat_request import ChatRequest
from router.http.own_names import by_own_name, note_names
from router.http.responses_api.responses_request import ResponsesRequest


@pytest.mark.parametrize(
    ("kind", "message", "param", "told", "own"),
    [
        (ResponsesRequest, "tools.1.function.parameters: nested", "tools", "tools.1.parameters: nested", "tools"),
        (ResponsesRequest, "tools: two functions", "tools", "tools: two functions", "tools"),
        (ResponsesRequest, "tool_choice.function.name: no", "tool_choice", "tool_choice.name: no", "tool_choice"),
        (ResponsesRequest, "response_format: the grammar", "response_format", "text.format: the grammar", "text"),
        (
            ResponsesRequest,
            "response_format.json_schema.schema: nested",
            "response_format",
            "text.format.schema: nested",
            "text",
        ),
        (ResponsesRequest, "messages.3.tool_calls: at most", "messages", "input: at most", "input"),
        (ResponsesRequest, "reasoning_effort has no effect", "reasoning_effort", "reasoning.effort has no effect", "reasoning"),
        (ResponsesRequest, "the prompt is empty", "messages", "the prompt is empty", "input"),
        (ResponsesRequest, "stop: too long", "stop", "stop: too long", "stop"),
        (MessagesRequest, "tools.0.function.parameters: nested", "tools", "tools.0.input_schema: nested", "tools"),
        (MessagesRequest, "tools.0.function.name: no", "tools", "tools.0.name: no", "tools"),
        (ChatRequest, "tools.0.function.name: no", "tools", "tools.0.function.name: no", "tools"),
    ],
)  # fmt: skip
def test_errors_name_the_field_of_their_own_call(
    kind: type[BodyModel], message: str, param: str, told: str, own: str
) -> None:
    scope: dict[str, Any] = {}
    note_names(scope, kind)
    error = by_own_name(BadRequest(message, param=param), scope)
    assert isinstance(error, BadRequest)
    assert (error.message, error.param) == (told, own)
