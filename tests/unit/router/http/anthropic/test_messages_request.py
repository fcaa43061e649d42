"""Messages bodies as the chat requests that mean the same."""

from __future__ import annotations

import time
from typing import Any

import pytest

from common.base.errors import BadRequest
from router.http.anthropic.messages_request import MessagesRequest
from router.http.openai.chat_request import ChatRequest
from router.http.openai.parse_body import completion_request, validated

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TOOLS = [{"name": "f", "input_schema": SCHEMA}]


def _chat(**fields: Any) -> ChatRequest:
    body = {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}], **fields}
    return completion_request(validated(body, MessagesRequest).chat_request(), ChatRequest)


@pytest.mark.parametrize(
    ("choice", "forced"), [({"type": "any"}, ["f"]), ({"type": "tool", "name": "f"}, ["f"]), ({"type": "auto"}, [])]
)
def test_a_tool_choice_forces_the_same_functions(choice: Any, forced: list[str]) -> None:
    chat = _chat(tools=TOOLS, tool_choice=choice)
    assert [tool.function.name for tool in chat.must_call] == forced
    assert [tool.function.name for tool in chat.offered_tools] == ["f"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "^tool_choice: the type 'tool' needs a name"),
        ({"stop_sequences": ["a", ""]}, r"^stop_sequences\.1: "),
        ({"stop_sequences": ["a"] * 65}, "^stop_sequences: "),
    ],
)
def test_errors_name_the_fields_that_the_client_sent(fields: Any, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        _chat(**fields)


def test_no_tools_are_offered_with_the_choice_none_and_one_call_where_parallel_ones_are_disabled() -> None:
    assert not _chat(tools=TOOLS, tool_choice={"type": "none"}).offered_tools
    single = _chat(tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert single.parallel_tool_calls is False


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_strict_tool_is_a_strict_function(strict: bool | None) -> None:
    (tool,) = _chat(tools=[{**TOOLS[0], "strict": strict}]).offered_tools
    assert tool.function.strict is strict


@pytest.mark.parametrize(
    "fields",
    [{"output_config": {"format": FORMAT}}, {"output_format": FORMAT}, {"output_config": {}, "output_format": FORMAT}],
)
def test_a_schema_and_the_users_id_are_taken_over(fields: Any) -> None:
    chat = _chat(**fields, metadata={"user_id": "u"})
    assert chat.response_format is not None
    assert chat.response_format.json_schema is not None
    assert chat.response_format.json_schema.schema_ == SCHEMA
    assert chat.user == "u"


def test_a_conversation_that_ends_with_the_assistant_is_continued() -> None:
    chat = _chat(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}])
    assert chat.continue_final_message
    assert chat.add_generation_prompt is False


def test_messages_of_one_role_that_follow_each_other_are_one_turn() -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "rain"}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    chat = _chat(
        system="Be brief",
        messages=[
            {"role": "user", "content": "x"},
            {"role": "user", "content": [{"type": "text", "text": "y"}]},
            {"role": "assistant", "content": "I look."},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
            {"role": "user", "content": "And?"},
            {"role": "user", "content": ""},
        ],
    )
    shown = [(message.role, message.content) for message in chat.messages]
    assert shown == [
        ("system", "Be brief"),
        ("user", "x\ny"),
        ("assistant", "I look."),
        ("tool", "rain"),
        ("user", "And?\n"),
    ]
    assert [call.function.name for call in chat.messages[2].tool_calls or ()] == ["f"]


@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_a_tool_result_may_have_no_content(nothing: Any) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", **nothing}
    use = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    chat = _chat(messages=[{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}])
    assert (chat.messages[-1].role, chat.messages[-1].content) == ("tool", "")


def test_a_turn_of_thousands_of_texts_is_joined_at_once() -> None:
    text = "x" * 900
    body = validated({"max_tokens": 3, "messages": [{"role": "user", "content": text}] * 4096}, MessagesRequest)
    begun_s = time.process_time()
    (turn,) = body.chat_request()["messages"]
    assert time.process_time() - begun_s < 1.0
    assert turn["content"] == "\n".join([text] * 4096)


def test_thinking_sets_the_templates_variable() -> None:
    assert _chat(thinking={"type": "disabled"}).chat_template_kwargs == {"enable_thinking": False}
    assert _chat(thinking={"type": "enabled", "budget_tokens": 1024}).chat_template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(("effort", "shown"), [("low", "low"), ("high", "high"), ("xhigh", "high"), ("max", "high")])
def test_the_effort_is_a_variable_of_the_template(effort: str, shown: str) -> None:
    assert _chat(output_config={"effort": effort}).chat_template_kwargs == {"reasoning_effort": shown}
    both = _chat(output_config={"effort": effort}, thinking={"type": "disabled"})
    assert both.chat_template_kwargs == {"reasoning_effort": shown, "enable_thinking": False}


def test_tools_that_anthropic_runs_are_left_out_beside_functions_with_their_history() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    used = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [used, found, {"type": "text", "text": "a"}]},
        {
            "role": "user",
            "content": [
                {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "b"}]}
            ],
        },
    ]
    body = {"max_tokens": 3, "messages": turns, "tools": [search, *TOOLS]}
    chat = _chat(**body)
    assert [tool.function.name for tool in chat.offered_tools] == ["f"]
    assert [message.content for message in chat.messages] == ["x", "a", "T (S)\nb"]
    assert MessagesRequest.left_out(body) == [
        "messages.server_tool_use",
        "messages.web_search_tool_result",
        "tools.web_search_20250305",
    ]
    with pytest.raises(BadRequest, match=r"tools\.0\.type"):
        _chat(tools=[search])


def test_what_a_tool_returned_beside_text_is_named() -> None:
    shown = [{"type": "text", "text": "a"}, {"type": "image", "source": {"type": "base64", "data": "x"}}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": shown}
    called = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [result]},
    ]
    assert _chat(messages=turns).messages[-1].content == "a\n[image, which this model cannot see]"
