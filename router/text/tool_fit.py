"""Shows tools, and calls of the past, to a model whose chat template does not. Pure.

What a template shows is seen by rendering a small conversation with a tool, a call of it and a result, once. Tools that it does
not show are described in the system message; calls and results that it does not show become text of the assistant and of the
user. Each message is changed by itself, but for results that follow each other: earlier turns are rendered as before when a
conversation grows, and prefix hits stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple, Protocol, cast

from common.base.errors import BadRequest

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
WriteCalls = Callable[[Sequence[tuple[str, Mapping[str, Any]]]], str]
"""The text of calls, in the model's format."""


class JsonText(dict[str, Any]):
    """A JSON object that joins texts as JSON: some templates take a call's arguments for the text that clients send."""

    def __add__(self, other: str) -> str:
        return json.dumps(self, ensure_ascii=False) + other

    def __radd__(self, other: str) -> str:
        return other + json.dumps(self, ensure_ascii=False)


_SHOWN = ("name_of_tool", "value_of_argument", "result_of_tool")
_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _SHOWN[0],
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"argument": {"type": "string", "description": "An argument."}}},
    },
}
_CALL: Mapping[str, Any] = {
    "id": "call00001",  # the form that Mistral's templates demand
    "type": "function",
    "function": {"name": _SHOWN[0], "arguments": JsonText({"argument": _SHOWN[1]})},
}
_USER: Message = {"role": "user", "content": "Hello"}
_CALLED: Sequence[Message] = (
    _USER,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": _SHOWN[2], "tool_call_id": "call00001", "name": _SHOWN[0]},
)


class _Render(Protocol):
    def __call__(self, messages: Sequence[Message], *, tools: Sequence[Tool] | None = None) -> str: ...


class FittedTools(NamedTuple):
    """The messages and tools to render, and what was changed, in words."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    changes: tuple[str, ...] = ()


class ToolFit:
    """What one template shows of tools. `render` raises BadRequest if the template refuses. Any thread."""

    def __init__(self, render: _Render, *, names_tools: bool) -> None:
        """`names_tools`: the template mentions tools at all."""
        self._render = render
        self._names_tools = names_tools

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the template shows the tools that a request offers."""
        return self._names_tools and self._shows([_USER], _SHOWN[:1])

    @cached_property
    def shows_calls(self) -> bool:
        """Whether the template shows calls of the past and their results."""
        return self._shows(_CALLED, _SHOWN)

    def _shows(self, messages: Sequence[Message], texts: Sequence[str]) -> bool:
        tools = [_TOOL] if self._names_tools else None
        try:
            shown = self._render(messages, tools=tools)
        except BadRequest:
            return False
        # The name may come from the list of tools; the argument's value and the result cannot.
        return all(text in shown for text in texts)

    def fit(self, messages: Sequence[Message], tools: Sequence[Tool], write: WriteCalls) -> FittedTools:
        """The messages and tools in a form of which the template shows everything."""
        changes: list[str] = []
        if any(_is_of_tools(message) for message in messages) and not self.shows_calls:
            messages = _as_text(messages, write)
            changes.append("calls of tools and their results shown as text")
        if tools and not self.shows_tools:
            messages = _described(messages, tools, write)
            tools = ()
            changes.append("tools described in the system message")
        return FittedTools(messages, tools, tuple(changes))


def _is_of_tools(message: Message) -> bool:
    return message.get("role") == "tool" or bool(message.get("tool_calls"))


def _as_text(messages: Sequence[Message], write: WriteCalls) -> list[Message]:
    """Calls as text of the assistant, and results, those that follow each other together, as a turn of the user."""
    fitted: list[Message] = []
    for is_result, neighbours in groupby(messages, lambda message: message.get("role") == "tool"):
        if not is_result:
            fitted += [_with_written_calls(message, write) for message in neighbours]
            continue
        results = [f"<tool_response>\n{message.get('content') or ''}\n</tool_response>" for message in neighbours]
        fitted.append({"role": "user", "content": "\n".join(results)})
    return fitted


def _with_written_calls(message: Message, write: WriteCalls) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    written = write([(each["name"], _as_object(each.get("arguments"))) for each in functions])
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": "\n".join(text for text in (message.get("content"), written) if text)}


def _as_object(arguments: Any) -> Mapping[str, Any]:
    """Text that is no JSON object, which a model wrote as its arguments, is one argument."""
    return cast("Message", arguments) if isinstance(arguments, dict) else {"arguments": arguments}


def _described(messages: Sequence[Message], tools: Sequence[Tool], write: WriteCalls) -> list[Message]:
    """The messages, in whose first system message the tools are described."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write([("NAME", {"PARAMETER": "value"})])
    text = (
        f"You may call the following functions, each described by a line of JSON:\n{listed}\n"
        f"To call a function, write its name and its arguments in this form:\n{example}\n"
        "Its result follows between <tool_response> and </tool_response>."
    )
    first, *others = messages or [{"role": "user", "content": ""}]
    if first.get("role") in ("system", "developer"):
        return [{**first, "content": "\n\n".join(part for part in (first.get("content"), text) if part)}, *others]
    return [{"role": "system", "content": text}, *messages]
