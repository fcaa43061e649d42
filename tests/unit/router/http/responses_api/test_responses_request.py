"""Responses bodies as the chat requests that mean the same."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from common.base.errors import BadRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import completion_request, validated
from router.http.openai.unknown_fields import unknown_fields
from router.http.responses_api.input_items import OTHER_ITEMS
from router.http.responses_api.responses_request import ResponsesRequest
from router.structured.relaxed import Relaxed

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOLS = [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}]


def _chat(earlier: list[Any] | None = None, **fields: Any) -> ChatRequest:
    body = validated({"input": "x", **fields}, ResponsesRequest).chat_request(earlier or [])
    return completion_request(body, ChatRequest)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_tool_choice_forces_the_same_functions(choice: Any) -> None:
    chat = _chat(tools=TOOLS, tool_choice=choice)
    assert [(tool.function.name, tool.function.strict) for tool in chat.must_call] == [("f", True)]


def test_other_tools_are_left_out_beside_functions_and_refused_alone() -> None:
    search = {"type": "web_search", "external_web_access": False}
    body = validated({"input": "x", "tools": [search, *TOOLS, {"type": "namespace", "tools": TOOLS}]}, ResponsesRequest)
    assert [tool["name"] for tool in body.shown()["tools"]] == ["f"]
    assert [tool["function"]["name"] for tool in body.chat_request([])["tools"]] == ["f"]
    with pytest.raises(BadRequest, match=r"tools.0.type: Input should be 'function' \(got 'web_search'\)"):
        _chat(tools=[search])
    with pytest.raises(BadRequest, match="tool_choice"):
        _chat(tools=[search, *TOOLS], tool_choice={"type": "web_search"})


@pytest.mark.parametrize("tool", ["f", None, {"name": "g"}, {"type": None, "name": "g"}, {"type": ["function"]}])
def test_a_tool_without_a_type_is_refused_beside_functions(tool: Any) -> None:
    with pytest.raises(BadRequest, match=r"tools\.1"):
        _chat(tools=[*TOOLS, tool, {"type": "web_search"}])


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_functions_only_may_be_allowed(mode: str) -> None:
    tools = [*TOOLS, {"type": "function", "name": "g"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "g"}]}
    chat = _chat(tools=tools, tool_choice=choice)
    assert [[tool.function.name for tool in some] for some in (chat.offered_tools, chat.may_call)] == [
        ["f", "g"],
        ["g"],
    ]
    assert bool(chat.must_call) is (mode == "required")
    assert validated({"input": "x", "tool_choice": choice}, ResponsesRequest).shown()["tool_choice"] == choice


def test_other_tools_that_are_allowed_are_left_out_beside_functions() -> None:
    search, function = {"type": "web_search"}, {"type": "function", "name": "f"}
    choice = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [search, function, {"type": "mcp", "server_label": "x"}],
    }
    chat = _chat(tools=[search, *TOOLS, {"type": "function", "name": "g"}], tool_choice=choice)
    assert [tool.function.name for tool in chat.may_call] == ["f"]
    for tools in ([search], [function, {"name": "g"}]):
        with pytest.raises(BadRequest, match="tool_choice"):
            _chat(tools=TOOLS, tool_choice={**choice, "tools": tools})


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "f"}])
def test_a_forced_call_needs_tools(choice: Any, tools: Any) -> None:
    with pytest.raises(BadRequest, match="tool_choice"):
        _chat(tools=tools, tool_choice=choice)
    assert not _chat(tools=tools, tool_choice="auto").must_call


def test_a_text_format_is_a_response_format() -> None:
    chat = _chat(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}})
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert (chat.response_format.json_schema.name, chat.response_format.json_schema.schema_) == ("n", SCHEMA)


def test_instructions_come_first_then_the_turns_before() -> None:
    chat = _chat([{"role": "user", "content": "before"}], instructions="Be brief", max_output_tokens=7)
    assert [(message.role, message.content) for message in chat.messages] == [
        ("system", "Be brief"),
        ("user", "before"),
        ("user", "x"),
    ]
    assert chat.token_limit == 7


def test_sampling_fields_of_the_chat_call_are_taken_and_no_others() -> None:
    chat = _chat(top_k=5, seed=7, n=3, messages=[], logprobs=True)
    assert (chat.top_k, chat.seed, chat.num_samples, chat.logprobs) == (5, 7, 1, False)


def test_reasoning_text_and_calls_in_a_row_are_one_message() -> None:
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    answer, result = _chat(input=items).messages
    assert (answer.reasoning_content, answer.content, len(answer.tool_calls or [])) == ("hm", "I look.", 2)
    assert (result.role, result.tool_call_id, result.content) == ("tool", "1", "sun")


def test_encrypted_reasoning_and_results_of_hosted_tools_may_be_asked_for_and_are_never_there() -> None:
    _chat(include=["reasoning.encrypted_content"])
    _chat(include=["web_search_call.action.sources", "file_search_call.results", "code_interpreter_call.outputs"])


def test_a_field_that_would_change_the_answer_is_refused() -> None:
    for fields in (
        {"thinking_token_budget": 4},
        {"background": True, "store": False},
        {"truncation": "auto"},
        {"use_beam_search": True},
        {"include": ["message.output_audio.logprobs"]},
    ):
        with pytest.raises(BadRequest):
            _chat(**fields)


def test_log_probabilities_are_asked_for_by_include_or_their_number() -> None:
    assert _chat().num_logprobs is None
    assert _chat(include=["message.output_text.logprobs"]).num_logprobs == 0
    assert _chat(top_logprobs=3).num_logprobs == 3
    assert _chat(logprob_token_ids=[1, 2]).num_logprobs == 2


def test_fields_of_the_chat_call_count_and_are_not_reported_as_unknown() -> None:
    fields = {"top_k": 3, "structured_outputs": {"choice": ["a"]}, "include_stop_str_in_output": True}
    chat = _chat(**fields)
    assert (chat.top_k, chat.include_stop_str_in_output) == (3, True)
    assert chat.grammar_source(Relaxed()) is not None
    assert unknown_fields({**fields, "input": "x", "top_kk": 1}, ResponsesRequest) == ["top_kk"]


def test_items_of_another_type_are_refused_with_those_that_are_supported() -> None:
    with pytest.raises(BadRequest) as refusal:
        validated({"input": [{"type": "computer_cal", "id": "x"}]}, ResponsesRequest)
    assert refusal.value.message == (
        "input.0: items of this type are not supported; supported are message, function_call, function_call_output, "
        "reasoning and item_reference "
        "(got {'id': 'x', 'type': 'computer_cal'})"
    )


def _literals(hint: Any) -> set[str]:
    """The strings in a type."""
    return {hint} if isinstance(hint, str) else {text for inner in get_args(hint) for text in _literals(inner)}


_KINDS = {kind for item in get_args(ResponseInputItemParam) for kind in _literals(get_type_hints(item)["type"])}


def test_every_kind_of_item_that_another_server_may_have_left_is_shown_or_left_out() -> None:
    ours = {"message", "function_call", "function_call_output", "reasoning", "item_reference"}
    assert _KINDS - ours == OTHER_ITEMS
    for kind in OTHER_ITEMS:
        item = {"type": kind, "id": "i", "call_id": "c", "name": "f", "input": "in", "arguments": "{}", "output": "out"}
        body = {"input": [{"role": "user", "content": "u"}, item]}
        chat = _chat(input=body["input"])
        shown = [call.function.name for message in chat.messages for call in message.tool_calls or ()]
        assert shown == (["f"] if kind in ("custom_tool_call", "mcp_call") else []), kind
        is_shown = kind in ("custom_tool_call", "custom_tool_call_output", "mcp_call")
        assert unknown_fields(body, ResponsesRequest) == ([] if is_shown else [f"input.{kind}"])
    with pytest.raises(BadRequest, match="items of this type"):
        _chat(input=[{"type": "web_serch_call"}])
    with pytest.raises(BadRequest, match="input"):
        _chat(input=[{"type": "web_search_call", "id": "w", "status": "completed"}])


def test_calls_of_other_kinds_keep_their_text() -> None:
    calls = [
        {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a = 1"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "mcp_call", "id": "m", "server_label": "s", "name": "g", "arguments": '{"x": 1}', "output": "7"},
        {"type": "function_call", "call_id": "n", "name": "h", "arguments": None},
    ]
    messages = [message.for_template() for message in _chat(input=[{"role": "user", "content": "u"}, *calls]).messages]
    made = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    assert made == [
        {"name": "f", "arguments": {"input": "a = 1"}},
        {"name": "g", "arguments": {"x": 1}},
        {"name": "h", "arguments": {}},
    ]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["done", "7"]
