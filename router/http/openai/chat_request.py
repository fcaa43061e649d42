"""Body of `POST /v1/chat/completions`. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, field_validator, model_validator

from router.http.openai.chat_messages import PART_KINDS, Message
from router.http.openai.checks import MAX_INT, FieldsError, at_most, bounded, shorten
from router.http.openai.past_parts import unseen_parts, with_named_parts
from router.http.openai.shared_fields import CompletionRequestBase, NumLogprobs
from router.http.openai.tools import MAX_TOOLS, AllowedToolChoice, NamedToolChoice, Tool

MAX_MESSAGES = 4096


class ChatRequest(CompletionRequestBase):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = None
    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = False
    """Whether the tokenizer adds special tokens to those of the template."""
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    """The answer continues the last message."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = None
    """A variable of the template; "none": no reasoning."""
    include_reasoning: bool | None = True
    """False: the answer has no `reasoning_content`, although the model reasons."""
    tools: Annotated[list[Tool], at_most(MAX_TOOLS, "tools")] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[NamedToolChoice | AllowedToolChoice, Discriminator("type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = True

    @staticmethod
    def left_out(body: dict[str, Any]) -> list[str]:
        """The parts of earlier turns and of results that the model cannot see, as `messages.KIND`."""
        return [f"messages.{kind}" for kind in unseen_parts(body.get("messages"), PART_KINDS)]

    @field_validator("messages", mode="before")
    @classmethod
    def _bound_messages(cls, value: Any) -> Any:
        return with_named_parts(bounded(value, MAX_MESSAGES, "messages"), PART_KINDS)

    @model_validator(mode="after")
    def _check_chat(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise FieldsError("top_logprobs", "top_logprobs is only allowed with logprobs=true")
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise FieldsError(
                "continue_final_message", "continue_final_message is only allowed with add_generation_prompt=false"
            )
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise FieldsError("tools", "tools: two functions have the same name")
        for chosen in self._chosen or ():
            if chosen not in names:
                raise FieldsError("tool_choice", f"tool_choice: tools has no function {shorten(chosen)}")
        if self.tool_choice == "required" and not names:
            raise FieldsError("tool_choice", "tool_choice: 'required' needs tools")
        return self

    @property
    def _chosen(self) -> list[str] | None:
        """The functions that `tool_choice` names; None: it names none."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedToolChoice):
            return [each.function.name for each in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def offered_tools(self) -> list[Tool]:
        """The functions that the prompt shows."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def may_call(self) -> list[Tool]:
        """The functions that the model may call."""
        chosen = self._chosen
        return [tool for tool in self.offered_tools if chosen is None or tool.function.name in chosen]

    @property
    def must_call(self) -> list[Tool]:
        """The model must call one of these functions; empty: it may also answer in words."""
        choice = self.tool_choice
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice
        return self.may_call if mode == "required" or isinstance(mode, NamedToolChoice) else []

    @property
    def num_logprobs(self) -> int | None:
        return super().num_logprobs or ((self.top_logprobs or 0) if self.logprobs else None)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
