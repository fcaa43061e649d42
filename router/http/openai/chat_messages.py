"""The messages of a conversation, as clients send them and as chat templates see them. Pure."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import from_json

from router.http.body_model import BodyModel
from router.http.openai.checks import MAX_CONTENT_PARTS, MAX_TOOL_CALLS, as_object, at_most, bounded, items, shorten
from router.http.openai.past_parts import PartKinds
from router.text.conversation_fit import REASONING_NAMES
from router.text.tool_fit import JsonText

_TEXTS = ("text", "input_text", "output_text")
_REASONING = ("thinking", "redacted_thinking", "reasoning")
PART_KINDS = PartKinds("text", (*_TEXTS, *_REASONING, "refusal", None))


class TextPart(BodyModel):
    """One part of a message's content. Responses' names of texts are taken too: applications keep one history for both calls."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(BodyModel):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class CalledFunction(BodyModel):
    """`arguments`: a JSON object as text; what a model wrote instead is taken as it is."""

    name: str
    arguments: str | dict[str, Any] = "{}"

    @field_validator("arguments", mode="before", json_schema_input_type=str | dict[str, Any] | list[Any] | None)
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return value if as_object(value) is not None else arguments_text(value)


class ToolCall(BodyModel):
    """A tool call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @field_validator("type", mode="before", json_schema_input_type=Literal["function"] | None)
    @classmethod
    def _function_for_null(cls, value: Any) -> Any:
        return "function" if value is None else value


class Message(BodyModel):
    """One turn of a conversation."""

    role: Annotated[str, Field(pattern=r"^[-.\w]{1,64}$")]
    """One of OpenAI's, or another one that the chat template shows."""
    content: str | None = None
    """Null where the client sends none."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], at_most(MAX_TOOL_CALLS, "tool calls in one message")] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Field(exclude=True)] = None
    """Its name in newer versions of vLLM. Answers have both, and clients may send both back."""
    thinking: Annotated[str | None, Field(exclude=True)] = None
    """Its name in the templates of some models."""
    refusal: Annotated[str | None, Field(exclude=True)] = None
    """Text of an assistant that refused, in place of content."""
    function_call: None = None
    """Earlier form of `tool_calls`."""
    audio: None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[str | TextPart] | None)
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        parts = items(value)
        if parts is None:
            return value
        bounded(parts, MAX_CONTENT_PARTS, "content parts in one message")
        texts: list[str] = []
        for part in parts:
            kind = (as_object(part) or {}).get("type")
            if isinstance(part, str):
                texts.append(part)
            elif kind == "refusal":
                texts.append(RefusalPart.model_validate(part).refusal)
            elif kind in _TEXTS:
                texts.append(TextPart.model_validate(part).text)
            elif kind not in _REASONING:  # these are left out
                raise ValueError(f"content parts of type {shorten(kind)} are not supported; only 'text' is")
        return "\n".join(texts)

    @field_validator("function_call", "audio", mode="before")
    @classmethod
    def _only_null(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError("is not supported in a message")
        return value

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        if self.content is None and self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError("content is missing")
        if self.refusal and not self.content:
            self.content = self.refusal
        if self.reasoning or self.thinking:
            self.reasoning_content = self.reasoning_content or self.reasoning or self.thinking
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as Hugging Face passes it to a template: arguments are objects, and a message with calls and null
        content has no content.

        Arguments that are not a JSON object remain text: a model can have written them so.
        """
        if not self.tool_calls and self.reasoning_content is None and self.tool_call_id is None:
            plain = {"role": self.role, "content": self.content or ""}
            return plain if self.name is None else {**plain, "name": self.name}
        shown = self.model_dump(exclude_none=True)
        if self.reasoning_content is not None:
            shown.update(dict.fromkeys(REASONING_NAMES, self.reasoning_content))
        if not self.tool_calls:
            shown.pop("tool_calls", None)  # many templates take an empty list for calls
            shown.setdefault("content", "")
        for call in shown.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = _parsed(function["arguments"])
        return shown


def arguments_text(value: Any) -> Any:
    """A past call's arguments as text: null is no arguments; a list, a number or a boolean is written as JSON."""
    if value is None:
        return "{}"
    return value if isinstance(value, str) else json.dumps(value)


def _parsed(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Arguments as an object, also where they were encoded twice; what is no object stays text."""
    found: Any = arguments
    for _ in range(2):
        if not isinstance(found, str):
            break
        try:
            found = from_json(found or "{}", allow_inf_nan=False, cache_strings=False)
        except ValueError:
            return arguments
    fields = {} if found is None else as_object(found)
    return arguments if fields is None else JsonText(fields)
