"""Chat chunks: the end with its last token, and what output parsers find."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from common.control.identities import pack_ids
from router.http.format import FormatOptions
from router.http.openai.chat_format import ChatFormat
from router.output.base import ParsedDelta, Text, ToolCallDelta
from router.requests.request import Delta, Outcome

ENDED = cast("Any", SimpleNamespace(outcome=Outcome("stop"), decision=None, served=None, request_id="r"))


class CallAfterBar:
    """Text before `|` is content; what follows are the arguments of one call."""

    def __init__(self) -> None:
        self._open = False

    def push(self, text: str) -> ParsedDelta:
        content, bar, arguments = ("", "", text) if self._open else text.partition("|")
        calls: list[ToolCallDelta] = []
        if bar:
            self._open = True
            calls.append(ToolCallDelta(0, "id", "f"))
        if arguments:
            calls.append(ToolCallDelta(0, arguments=arguments))
        return ParsedDelta([*([Text(content)] if content else []), *calls])

    def finish(self) -> ParsedDelta:
        return ParsedDelta([ToolCallDelta(0, arguments="}")] if self._open else [])


def _form(*parsers: CallAfterBar) -> ChatFormat:
    return ChatFormat(FormatOptions("r", "m"), cast("Any", None), parsers)


def test_the_last_token_and_the_reason_are_in_one_chunk() -> None:
    (chunk,) = _form().closing(ENDED, 0, Delta("end", [7], None))
    assert chunk["choices"] == [
        {"index": 0, "delta": {"content": "end"}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]


def test_a_stream_with_a_call_has_its_arguments_in_pieces_and_ends_with_tool_calls() -> None:
    form = _form(CallAfterBar())
    assert not form.text_only
    first = form.delta(Delta("well|{", [1], None), 0)[0]["choices"][0]["delta"]
    assert first["content"] == "well"
    assert first["tool_calls"] == [
        {"index": 0, "id": "id", "type": "function", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": "{"}},
    ]
    last = form.closing(ENDED, 0, Delta(" ", [2], None))
    pieces = [chunk["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for chunk in last]
    assert pieces == [" ", "}"]
    assert last[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_whole_answer_with_a_call_has_its_arguments_joined() -> None:
    generation = cast(
        "Any",
        SimpleNamespace(
            outcome=Outcome("stop"),
            completion_tokens=2,
            cached_tokens=0,
            request=SimpleNamespace(engine=SimpleNamespace(prompt_ids=pack_ids([1]), prediction=pack_ids()), echo=""),
        ),
    )
    body = _form(CallAfterBar()).whole([generation], [[Delta("|{", [1], None), Delta(" ", [2], None)]])
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["tool_calls"] == [
        {"id": "id", "type": "function", "function": {"name": "f", "arguments": "{ }"}}
    ]
