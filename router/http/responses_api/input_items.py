"""The input of `/v1/responses`: items, and the chat messages that mean the same. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag, field_validator

from router.http.body_model import BodyModel
from router.http.json_body import Json
from router.http.openai.chat_messages import arguments_text
from router.http.openai.checks import MAX_CONTENT_PARTS, as_object, items
from router.http.openai.past_parts import PartKinds, unseen_parts, with_named_parts


class InputText(BodyModel):
    """Text of a message or of a tool's output. Images, files and audio are not supported."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class Refusal(BodyModel):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


_Parts = Annotated[list[Annotated[InputText | Refusal, Discriminator("type")]], Field(max_length=MAX_CONTENT_PARTS)]


class InputMessage(BodyModel):
    """One turn of a conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | _Parts


class FunctionCallItem(BodyModel):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = "{}"

    @field_validator("arguments", mode="before", json_schema_input_type=str | None)
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return arguments_text(value)


class FunctionOutputItem(BodyModel):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


class ReasoningItem(BodyModel):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: _Parts | None = None
    content: _Parts | None = None


class ItemReference(BodyModel):
    """An item of a stored answer."""

    type: Literal["item_reference"]
    id: Annotated[str, Field(max_length=64)]


OTHER_ITEMS = frozenset(
    {
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "compaction"),
        *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output", "shell_call"),
        *("shell_call_output", "apply_patch_call", "apply_patch_call_output", "tool_search_call", "tool_search_output"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call", "program", "program_output"),
        *("additional_tools", "configuration_update", "compaction_trigger", "custom_tool_call"),
        "custom_tool_call_output",
    }
)
"""Items that another server's models and tools leave in a history. Those that hold a call and its output as text are shown to
the model as calls of functions; the others are left out."""


_PART_KINDS = PartKinds("input_text", (*get_args(InputText.model_fields["type"].annotation), "refusal", None))


def readable_items(value: Any) -> Any:
    """A list of items without `OTHER_ITEMS`, as far as they cannot be shown, and with names in place of parts that the model
    cannot see."""
    return with_named_parts(_without_others(value), _PART_KINDS)


def _without_others(value: Any) -> Any:
    listed = items(value)
    return value if listed is None else [shown for item in listed for shown in _readable(item)]


def left_out_items(value: Any) -> list[str]:
    """The kinds of items and parts that `readable_items` leaves out, each once."""
    kinds = [_kind(item) for item in items(value) or () if not _readable(item)]
    return list(dict.fromkeys([*kinds, *unseen_parts(_without_others(value), _PART_KINDS)]))


def _readable(item: Any) -> list[Any]:
    kind, fields = _kind(item), as_object(item) or {}
    if kind not in OTHER_ITEMS:
        return [item]
    if kind == "custom_tool_call":
        given = json.dumps({"input": fields.get("input")})
        return [{**fields, "type": "function_call", "arguments": given}]
    if kind == "custom_tool_call_output":
        return [{**fields, "type": "function_call_output"}]
    if kind == "mcp_call":
        call: Json = {"call_id": fields.get("id"), "name": fields.get("name"), "arguments": fields.get("arguments")}
        answer = fields.get("output") or str(fields.get("error") or "")
        return [
            {"type": "function_call", **call},
            {"type": "function_call_output", "call_id": fields.get("id"), "output": answer},
        ]
    return []


def _kind(item: Any) -> str:
    fields = as_object(item)
    if fields is None:
        return str(getattr(item, "type", "message"))
    return str(fields.get("type") or "message")


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(
        _kind,
        custom_error_type="unsupported_item",
        custom_error_message="items of this type are not supported; supported are message, function_call, "
        "function_call_output, reasoning and item_reference",
    ),
]


def chat_messages(listed: Sequence[InputItem]) -> list[Json]:
    """The chat messages of these items, which hold no references. Reasoning, text and calls of the model that follow each
    other become one message.
    """
    messages: list[Json] = []
    answer: Json | None = None
    for item in listed:
        match item:
            case ReasoningItem():
                answer = _append(messages, reasoning_content=_text(item.content or item.summary or []))
            case InputMessage(role="assistant"):
                if answer is None or answer["content"] is not None or "tool_calls" in answer:
                    answer = _append(messages)
                answer["content"] = _text(item.content)
            case FunctionCallItem():
                if answer is None:
                    answer = _append(messages)
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
            case InputMessage():
                messages.append({"role": item.role, "content": _text(item.content)})
                answer = None
            case FunctionOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
                answer = None
            case ItemReference():
                raise AssertionError("a reference that was not looked up")
    return messages


def _append(messages: list[Json], **fields: str) -> Json:
    messages.append({"role": "assistant", "content": None, **fields})
    return messages[-1]


def _text(content: str | Sequence[InputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)
