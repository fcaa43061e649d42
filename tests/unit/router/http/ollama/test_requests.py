"""ollama's bodies, and the chat requests that mean the same."""

from __future__ import annotations

from typing import Any

import pytest

from router.http.ollama.requests import OllamaChatRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import completion_request


def _chat(body: dict[str, Any]) -> ChatRequest:
    return completion_request(OllamaChatRequest.model_validate(body).chat_request(), ChatRequest)


def _call(name: str, **fields: str) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}, **fields}


def test_calls_and_results_without_ids_get_those_that_belong_together() -> None:
    turns = [
        {"role": "assistant", "content": None, "tool_calls": [_call("f"), _call("g"), _call("f")]},
        {"role": "tool", "content": "1", "tool_name": "g"},
        {"role": "tool", "content": "2", "tool_name": "f"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "tool_calls": [_call("f")]},
        {"role": "tool", "content": "4", "tool_name": "f"},
    ]
    messages = _chat({"messages": turns}).messages
    ids = [call.id for message in messages for call in message.tool_calls or ()]
    assert len(set(ids)) == 4
    assert all(call_id and len(call_id) == 9 and call_id.isalnum() for call_id in ids)
    assert [each.tool_call_id for each in messages if each.role == "tool"] == [ids[1], ids[0], ids[2], ids[3]]
    assert [each.name for each in messages if each.role == "tool"] == ["g", "f", None, "f"]


@pytest.mark.parametrize("kind", [{}, {"type": None}, {"type": ""}, {"type": "function"}])
def test_a_tool_needs_no_type(kind: dict[str, Any]) -> None:
    body = _chat({"messages": [{"role": "user", "content": "Hi"}], "tools": [{**kind, "function": {"name": "f"}}]})
    assert [(tool.type, tool.function.name) for tool in body.tools or ()] == [("function", "f")]


def test_ids_of_the_client_are_kept() -> None:
    turns = [
        {"role": "assistant", "tool_calls": [_call("f", id="a"), _call("f", id="b")]},
        {"role": "tool", "content": "1", "tool_call_id": "b"},
        {"role": "tool", "content": "2", "tool_call_id": "a"},
    ]
    answer, *results = _chat({"messages": turns}).messages
    assert [call.id for call in answer.tool_calls or ()] == ["a", "b"]
    assert [each.tool_call_id for each in results] == ["b", "a"]


@pytest.mark.parametrize(
    ("think", "effort", "kwargs"),
    [
        (None, None, None),
        (True, None, {"enable_thinking": True}),
        (False, None, {"enable_thinking": False}),
        ("low", "low", None),
        ("max", "max", None),
    ],
)
def test_think_may_be_an_effort(think: Any, effort: str | None, kwargs: Any) -> None:
    body = _chat({"messages": [{"role": "user", "content": "a"}], "think": think})
    assert (body.reasoning_effort, body.chat_template_kwargs) == (effort, kwargs)


def test_options_may_write_every_number_as_a_float() -> None:
    body = _chat({"messages": [{"role": "user", "content": "a"}], "options": {"top_k": 40.0, "num_predict": 8.0}})
    assert (body.top_k, body.max_tokens) == (40, 8)


@pytest.mark.parametrize(
    ("options", "top_p", "min_p", "top_k"),
    [
        ({"top_p": 0}, 0, None, None),
        ({"top_p": -0.5, "top_k": 40}, 0, None, 40),
        ({"top_p": 0.5, "top_k": 40}, 0.5, None, 40),
        ({"top_p": 1.5, "min_p": 2}, 1, 1, None),
        ({"min_p": -1}, None, 0, None),
    ],
)
def test_thresholds_that_ollama_takes_are_taken(
    options: dict[str, float], top_p: float | None, min_p: float | None, top_k: int | None
) -> None:
    body = _chat({"messages": [{"role": "user", "content": "a"}], "options": options})
    assert (body.top_p, body.min_p, body.top_k) == (top_p, min_p, top_k)


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_a_limit_of_no_tokens_is_none(limit: int) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "options": {"num_predict": limit}}
    assert _chat(asked).max_tokens is None
