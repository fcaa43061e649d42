"""Body of `POST /v1/chat/completions`. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator

from router.http.openai.checks import MAX_INT, as_object, bounded, items, shorten
from router.http.openai.shared_fields import MAX_LOGPROBS, CompletionRequestBase

MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 4096
"""Maximum for one message."""


class TextPart(BaseModel):
    """One part of a message's content."""

    model_config = ConfigDict(strict=True, extra="ignore")
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a conversation."""

    model_config = ConfigDict(strict=True, extra="ignore")
    role: Literal["system", "developer", "user", "assistant"]
    content: str
    name: str | None = None

    @field_validator("content", mode="before", json_schema_input_type=str | list[TextPart] | None)
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if value is None:
            return ""
        parts = items(value)
        if parts is None:
            return value
        bounded(parts, MAX_CONTENT_PARTS, "content parts in one message")
        texts: list[str] = []
        for part in parts:
            kind = (as_object(part) or {}).get("type")
            if kind != "text":
                raise ValueError(f"content parts of type {shorten(kind)} are not supported; only 'text' is")
            texts.append(TextPart.model_validate(part).text)
        return "\n".join(texts)

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, value: Any) -> Any:
        if (as_object(value) or {}).get("tool_calls"):
            raise ValueError("tool_calls are not supported yet")
        return value


class ChatRequest(CompletionRequestBase):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _bound_messages(cls, value: Any) -> Any:
        return bounded(value, MAX_MESSAGES, "messages")

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
