"""Body of `POST /v1/completions`. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from common.control.messages import WHOLE_VOCABULARY
from router.http.openai.checks import MAX_INT, FieldsError, texts_or_token_ids
from router.http.openai.shared_fields import CompletionRequestBase, NumLogprobs

MAX_PROMPTS = 64


class CompletionRequest(CompletionRequestBase):
    """Body of `POST /v1/completions`. `prompt` is a list of prompts once validated."""

    prompt: list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_INT)] | None = 16
    logprobs: NumLogprobs | None = None
    add_special_tokens: bool | None = True
    suffix: str | None = None
    """Text after the answer, for models with fill-in-the-middle tokens."""

    @field_validator("prompt", mode="before", json_schema_input_type=str | list[int] | list[str] | list[list[int]])
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        prompts = texts_or_token_ids(value, MAX_PROMPTS, "prompts in one request")
        if not prompts or [] in prompts:  # an empty text can have tokens: the tokenizer's, or those around a suffix
            raise ValueError("must not be empty")
        return prompts

    @model_validator(mode="after")
    def _check_suffix(self) -> CompletionRequest:
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise FieldsError("suffix", "suffix is only allowed with prompts that are strings")
        if self.suffix and self.truncate_prompt_tokens is not None:
            raise FieldsError("suffix", "suffix is not allowed with truncate_prompt_tokens")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return super().num_logprobs or self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        shown = [each for each in (self.prompt_logprobs, self.logprobs if self.echo else None) if each is not None]
        return WHOLE_VOCABULARY if WHOLE_VOCABULARY in shown else max(shown, default=None)
