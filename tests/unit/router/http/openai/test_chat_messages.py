"""Messages as templates see them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from router.http.openai.chat_messages import Message

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
READ_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


REASONS = {"reasoning_content": "r", "reasoning": "r", "thinking": "r"}
"""Each template reads one of these names."""


@pytest.mark.parametrize(
    ("sent", "seen"),
    [
        ({"role": "user", "content": "a", "extra": 1}, {"role": "user", "content": "a"}),
        ({"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"}, {"role": "user", "content": "a", "name": "n"}),
        ({"role": "user", "content": ["a", {"type": "input_text", "text": "b"}]}, {"role": "user", "content": "a\nb"}),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "r"}, {"type": "output_text", "text": "a"}]},
            {"role": "assistant", "content": "a"},
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": None, "refusal": "No.", "function_call": None, "audio": None},
            {"role": "assistant", "content": "No."},
        ),
        ({"role": "assistant", "content": "", "refusal": None}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "refusal": "No.", "tool_calls": [CALL]},
            {"role": "assistant", "content": "No.", "tool_calls": [READ_CALL]},
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "a\nNo."},
        ),
        ({"role": "assistant", "content": "a", "tool_calls": []}, {"role": "assistant", "content": "a"}),
        (
            {"role": "assistant", "content": "a", "tool_calls": [], "reasoning": "r"},
            {"role": "assistant", "content": "a", **REASONS},
        ),
        ({"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [READ_CALL]}),
        ({"role": "assistant", "tool_calls": [CALL | {"type": None}]}, {"role": "assistant", "tool_calls": [READ_CALL]}),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "assistant", "content": "", "tool_calls": [READ_CALL]},
        ),
        ({"role": "tool", "content": "20", "tool_call_id": "c1"}, {"role": "tool", "content": "20", "tool_call_id": "c1"}),
        *(
            ({"role": "assistant", "content": "a", name: "r"}, {"role": "assistant", "content": "a", **REASONS})
            for name in REASONS
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": "r", "reasoning": "r"},
            {"role": "assistant", "content": "a", **REASONS},
        ),
        (
            {"role": "assistant", "content": "a", "reasoning_content": None, "reasoning": "r"},
            {"role": "assistant", "content": "a", **REASONS},
        ),
    ],
)  # fmt: skip
def test_messages_keep_what_templates_need(sent: Any, seen: Any) -> None:
    assert Message.model_validate(sent).for_template() == seen


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        *[
            ("", {}),
            (None, {}),
            ("null", {}),
            ("{", "{"),
            ("[1]", "[1]"),
            ([1], "[1]"),
            ("5", "5"),
            ({"a": 1}, {"a": 1}),
        ],
        *[('"{\\"a\\": 1}"', {"a": 1}), ('"text"', '"text"'), ('{"a": 1', '{"a": 1')],
    ],
)
def test_arguments_that_are_no_object_remain_text(arguments: Any, seen: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    message = Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message.for_template()["tool_calls"][0]["function"]["arguments"] == seen


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"role": "user"}, "content is missing"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}, "is not supported"),
        ({"role": "assistant", "audio": {"id": "a"}}, "is not supported"),
        ({"role": "assistant", "tool_calls": [{}] * 129}, "at most 128"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}, "string"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "function"),
    ],
)
def test_malformed_messages_are_refused(sent: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Message.model_validate(sent)
