"""Which tools a chat request offers, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.base.errors import BadRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import parse_body


def _tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def _request(**fields: Any) -> ChatRequest:
    return parse_body(json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode(), ChatRequest)


def _nested(depth: int) -> dict[str, Any]:
    return {"a": _nested(depth - 1)} if depth else {}


def _allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_tool(name) for name in names]}}


def test_the_tool_choice_tells_what_may_and_what_must_be_called() -> None:
    def names(**fields: Any) -> tuple[list[str], ...]:
        body = _request(tools=[_tool("f"), _tool("g")], **fields)
        return tuple(
            [each.function.name for each in tools] for tools in (body.offered_tools, body.may_call, body.must_call)
        )

    assert names() == names(tool_choice="auto") == (["f", "g"], ["f", "g"], [])
    assert names(tool_choice="none") == ([], [], [])
    assert names(tool_choice="required") == (["f", "g"], ["f", "g"], ["f", "g"])
    assert names(tool_choice=_tool("g")) == (["f", "g"], ["g"], ["g"])
    assert names(tool_choice=_allowed("auto", "g")) == (["f", "g"], ["g"], [])
    assert names(tool_choice=_allowed("required", "g")) == (["f", "g"], ["g"], ["g"])
    assert names(tool_choice=_allowed("required", "g", "f")) == (["f", "g"], ["f", "g"], ["f", "g"])


def test_templates_see_a_tool_in_the_usual_order_and_without_strict() -> None:
    tool = {"function": {"strict": True, "parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function", "x": 1}
    (shown,) = [tool.for_template() for tool in _request(tools=[tool]).offered_tools]
    assert json.dumps(shown) == '{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}'


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [_tool("f")] * 2}, "two functions have the same name"),
        ({"tools": [{}]}, "type"),
        ({"tools": [_tool("f")] * 1025}, "at most 1024 tools"),
        ({"tools": [_tool("f b")]}, "pattern"),
        ({"tools": [_tool("f", parameters=[])]}, "parameters"),
        ({"tools": [_tool("f", parameters=_nested(40))]}, "nested deeper than 32"),
        ({"tools": [_tool("f", parameters={"enum": [0] * 10_001})]}, "at most 10000 values"),
        ({"tool_choice": "required"}, "needs tools"),
        ({"tool_choice": _tool("g"), "tools": [_tool("f")]}, "no function 'g'"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": _allowed("auto", "f", "g"), "tools": [_tool("f")]}, "no function 'g'"),
        ({"tool_choice": _allowed("auto"), "tools": [_tool("f")]}, "at least 1 item"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [_tool("f")]}, "allowed_tools: Field required"),
        ({"functions": [{"name": "f"}]}, "not supported"),
        ({"function_call": {"name": "f"}}, "not supported"),
    ],
)
def test_wrong_tools_are_refused(fields: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        _request(**fields)
