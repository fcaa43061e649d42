"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chat request that means the same. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, field_validator, model_validator

from router.http.body_model import BodyModel
from router.http.json_body import Json
from router.http.openai.chat_request import MAX_MESSAGES
from router.http.openai.checks import MAX_CONTENT_PARTS, MAX_INT, as_object, items, type_of
from router.http.openai.past_parts import PartKinds, named, unseen_parts, with_named_parts
from router.http.openai.shared_fields import MAX_STOP_CHARS, MAX_STOPS


class TextBlock(BodyModel):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(BodyModel):
    """Reasoning of an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BodyModel):
    """Reasoning that only Anthropic can read; it is left out."""

    type: Literal["redacted_thinking"]


class SearchResultBlock(BodyModel):
    """A passage that the client found; its text is shown."""

    type: Literal["search_result"]
    title: str = ""
    source: str = ""
    content: Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)]

    @property
    def text(self) -> str:
        return "\n".join([f"{self.title} ({self.source})", *(block.text for block in self.content)])


class ToolUseBlock(BodyModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(BodyModel):
    """What a called tool returned. What is no text, such as an image, is named in its place: it cannot be shown, and the client
    cannot take it back."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _name_others(cls, value: Any) -> Any:
        blocks = items(value)
        if blocks is None or all(type_of(block) in ("text", None) for block in blocks):
            return value
        return [_named(block) for block in blocks]


_Block = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | SearchResultBlock | ToolUseBlock | ToolResultBlock,
    Discriminator("type"),
]
_OF_SERVER_TOOLS = re.compile(r"server_tool_use|mcp_tool_(use|result)|container_upload|compaction|\w+_tool_result")
"""Blocks that tools which Anthropic runs leave in a history; they are left out."""


_PART_KINDS = PartKinds(
    "text",
    ("text", "thinking", "redacted_thinking", "search_result", "tool_use", "tool_result", None),
)


def _named(block: Any) -> Any:
    """The block of a tool's result, as text."""
    block = _document_text(block)
    kind = type_of(block)
    if kind in ("text", None):
        return block
    if kind == "search_result":
        return {"type": "text", "text": SearchResultBlock.model_validate(block).text}
    return {"type": "text", "text": named(kind)}


def _document_text(block: Any) -> Any:
    """A document whose source is text, as text; any other block as it is."""
    fields = as_object(block) or {}
    source = as_object(fields.get("source")) if type_of(block) == "document" else None
    if source is None or source.get("type") not in ("text", "content"):
        return block
    parts = items(source.get("content"))
    texts = (
        [source.get("data") or source.get("content")]
        if parts is None
        else [(as_object(each) or {}).get("text") for each in parts]
    )
    return {"type": "text", "text": "\n".join(text for text in (fields.get("title"), *texts) if isinstance(text, str))}


def _readable_turns(turns: Any) -> Any:
    """The turns with documents that are text as text, and without blocks of server tools."""
    return [_readable_turn(turn) for turn in items(turns) or ()] if isinstance(turns, list) else turns


def _readable_turn(turn: Any) -> Any:
    fields = as_object(turn)
    blocks = None if fields is None else items(fields.get("content"))
    if fields is None or blocks is None:
        return turn
    return {**fields, "content": [_document_text(block) for block in blocks if not _is_left_out(block)]}


def _is_left_out(block: Any) -> bool:
    kind = type_of(block)
    return kind is not None and _OF_SERVER_TOOLS.fullmatch(kind) is not None


_Texts = Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS)]


class InputMessage(BodyModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(max_length=MAX_CONTENT_PARTS)]

    @property
    def blocks(self) -> Sequence[_Block]:
        """The content; a text is one block."""
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class ToolParam(BodyModel):
    """A function that the model may call; Anthropic's own tools are left out beside functions, and refused alone. `strict`:
    its input must follow the schema."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(BodyModel):
    """Whether tools must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("the type 'tool' needs a name")
        return self


class Thinking(BodyModel):
    """Whether the model reasons first, where its chat template knows `enable_thinking`."""

    type: Literal["enabled", "adaptive", "disabled"]


class Metadata(BodyModel):
    """`user_id` is used as `user` is in OpenAI's calls."""

    user_id: str | None = None


class OutputFormat(BodyModel):
    """The answer follows a JSON schema."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BodyModel):
    """How the answer looks, and how long the model reasons, where its chat template knows `reasoning_effort`."""

    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class CountTokensRequest(BodyModel):
    """Body of `POST /v1/messages/count_tokens`."""

    WITHOUT_EFFECT = frozenset({"cache_control", "container", "context_management", "inference_geo", "speed"})
    KNOWN_WITHIN = {"output_config": frozenset(OutputConfig.model_fields)}
    OWN_NAMES = {
        "response_format": "output_config.format",
        "response_format.json_schema": "output_config.format",
        "tools.*.function": "tools.*",
        "tools.*.function.parameters": "tools.*.input_schema",
    }

    model: Annotated[str, Field(max_length=1024)] | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | _Texts | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The earlier name of `output_config.format`."""

    @staticmethod
    def left_out(body: Json) -> list[str]:
        """The ignored parts of a body: tools that Anthropic runs, if there are also functions, as `tools.KIND`; what such tools left
        in the history, and what the model cannot see of earlier turns, as `messages.KIND`."""
        blocks = (
            block
            for message in items(body.get("messages")) or ()
            for block in items((as_object(message) or {}).get("content")) or ()
        )
        found = [f"messages.{type_of(block)}" for block in blocks if _is_left_out(block)]
        unseen = unseen_parts(_readable_turns(body.get("messages")), _PART_KINDS)
        found += [f"messages.{kind}" for kind in unseen]
        tools = items(body.get("tools")) or []
        if any(_is_function(tool) for tool in tools):
            found += [f"tools.{type_of(tool)}" for tool in tools if not _is_function(tool)]
        return list(dict.fromkeys(found))

    @field_validator("messages", mode="before")
    @classmethod
    def _leave_out(cls, value: Any) -> Any:
        return with_named_parts(_readable_turns(value), _PART_KINDS)

    @field_validator("tools", mode="before")
    @classmethod
    def _leave_out_tools(cls, value: Any) -> Any:
        tools = items(value) or []
        functions = [tool for tool in tools if _is_function(tool)]
        return functions or value

    def chat_request(self) -> Json:
        """The body of the chat call that means the same; validating it checks what is not checked here."""
        body: Json = {"model": self.model, "messages": self._chat_messages()}
        if self.messages[-1].role == "assistant":
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            body["tools"] = [{"type": "function", "function": _function(tool)} for tool in self.tools]
        if self.tool_choice is not None:
            body |= _tool_choice(self.tool_choice)
        body["chat_template_kwargs"] = self._template_variables()
        form = self.output_format if self.output_config is None else self.output_config.format or self.output_format
        if form is not None:
            schema = {"name": "answer", "schema": form.schema_}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return body

    def _template_variables(self) -> Json:
        """The template variables for reasoning; a chat template that does not know them ignores them."""
        variables: Json = {}
        if self.thinking is not None:
            variables["enable_thinking"] = self.thinking.type != "disabled"
        if self.output_config is not None and self.output_config.effort is not None:
            effort = self.output_config.effort
            variables["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort  # what templates know
        return variables

    def _chat_messages(self) -> list[Json]:
        """Messages of one role that follow each other are one turn: many templates want turns that alternate."""
        messages: list[Json] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for role, turn in groupby(self.messages, lambda message: message.role):
            messages += _turn(role, [block for message in turn for block in message.blocks])
        return messages


class MessagesRequest(CountTokensRequest):
    """Body of `POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)]
    """0: only the prompt is computed, so that later requests find it in the caches."""
    stop_sequences: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]], Field(max_length=MAX_STOPS)]
        | None
    ) = None
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] | None = None
    metadata: Metadata | None = None

    def chat_request(self) -> Json:
        body = super().chat_request()
        for name in ("max_tokens", "stream", "temperature", "top_p", "top_k"):
            body[name] = getattr(self, name)
        body["stop"] = self.stop_sequences
        body["user"] = None if self.metadata is None else self.metadata.user_id
        return body


def _is_function(tool: Any) -> bool:
    return type_of(tool) in ("custom", None)


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: ToolParam) -> Json:
    return {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}


def _tool_choice(choice: ToolChoice) -> Json:
    fields: Json = {"tool_choice": {"auto": "auto", "none": "none", "any": "required"}.get(choice.type)}
    if choice.type == "tool":
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _turn(role: str, blocks: Sequence[_Block]) -> list[Json]:
    """The chat messages of one turn: each tool result is a message of its own, in the order of the blocks."""
    turns: list[Json] = []
    for _, neighbours in groupby(blocks, lambda block: isinstance(block, ToolResultBlock)):
        turns += _messages(role, list(neighbours))
    return turns or [{"role": role, "content": ""}]


def _messages(role: str, blocks: Sequence[_Block]) -> list[Json]:
    """Tool results, or blocks of one message. Texts are joined at once: of a body of 4 MB, one by one would take seconds."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    if results:
        return [
            {"role": "tool", "tool_call_id": each.tool_use_id, "content": _text(each.content or "")} for each in results
        ]
    texts = [block.text for block in blocks if isinstance(block, TextBlock | SearchResultBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls: list[Json] = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message: Json = {"role": role, "content": "\n".join(texts) if texts else None}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]
