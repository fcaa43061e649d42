"""Request bodies of the two completion calls: their fields, their limits, and their `SamplingParams`.

Pure. Bodies are bounded and checked here, before any tokenization. Fields of OpenAI or vLLM that would change the
answer but are not supported are refused by name. Unknown fields are ignored, because clients send many of them.
Every field of a body that reaches the wire protocol is validated here.
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from common.base.errors import BadRequest
from common.control.messages import SamplingParams
from router.sampling_defaults import NEUTRAL, SamplingDefaults

MAX_PROMPTS = 64
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 4096
MAX_REQUEST_ID = 256
MAX_PRIORITY = 1000
"""Allowed range: -MAX_PRIORITY to MAX_PRIORITY."""
MAX_CONTENT_PARTS = 4096
"""Maximum for one message."""
_ECHO_CHARS = 200
"""Error messages quote at most this much of the client's input."""

_MAX_INT = 2**31 - 1
"""Upper limit for all integers except the seed: those of JSON are unbounded, those of the wire protocol are not."""

_excerpt = reprlib.Repr()
_excerpt.maxlevel = 3
_excerpt.maxlist = _excerpt.maxdict = 8
_excerpt.maxlong = 40


def shorten(value: object) -> str:
    """`value` as error messages show it. The cost does not depend on its size."""
    text = repr(value[: _ECHO_CHARS + 1]) if isinstance(value, str) else _excerpt.repr(value)
    return text if len(text) <= _ECHO_CHARS else text[:_ECHO_CHARS] + "..."


def _items(value: Any) -> list[Any] | None:
    """`value` if it is a list."""
    return cast("list[Any]", value) if isinstance(value, list) else None


def _object(value: Any) -> dict[str, Any] | None:
    """`value` if it is a JSON object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _bounded(value: Any, limit: int, what: str) -> Any:
    """`value`, unless it is too long a list. Checked before the items, because each wrong item creates an error object."""
    if len(_items(value) or ()) > limit:
        raise ValueError(f"at most {limit} {what} are allowed")
    return value


def _absent(value: Any) -> bool:
    return value is None or value is False or value == [] or value == {} or value == ""


def _only(*harmless: Any) -> Callable[[Any], bool]:
    return lambda value: value is None or any(value == each and type(value) is not bool for each in harmless)


_UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    # field -> whether this value has no effect, and is accepted
    "n": _only(1),
    "best_of": _only(1),
    "length_penalty": _only(1),
    "response_format": lambda value: value is None or value == {"type": "text"},
    "tool_choice": _only("none", "auto"),
    "function_call": _only("none", "auto"),
    "modalities": lambda value: value is None or value == ["text"],
    **dict.fromkeys(
        (
            "tools",
            "functions",
            "echo",
            "suffix",
            "audio",
            "prediction",
            "web_search_options",
            "reasoning_effort",
            "verbosity",
            "use_beam_search",
            "include_stop_str_in_output",
            "truncate_prompt_tokens",
            "prompt_logprobs",
            "allowed_token_ids",
            "bad_words",
            "logits_processors",
            "continue_final_message",
            "chat_template",
            "documents",
            "mm_processor_kwargs",
            "structured_outputs",
            "guided_json",
            "guided_regex",
            "guided_choice",
            "guided_grammar",
            "structural_tag",
            "prompt_embeds",
            "kv_transfer_params",
        ),
        _absent,
    ),
}


class StreamOptions(BaseModel):
    """What a stream contains in addition to the answer."""

    model_config = ConfigDict(strict=True, extra="ignore")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CompletionRequestBase(BaseModel):
    """Fields that both calls share."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Annotated[str, Field(max_length=1024)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    stop: list[str] = Field(default_factory=lambda: [])
    stop_token_ids: list[Annotated[int, Field(ge=0, le=_MAX_INT)]] | None = None
    ignore_eos: bool | None = False
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_INT)] | None = 0
    skip_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Lower is served earlier."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(max_length=MAX_REQUEST_ID)] | None = None
    """The client's own id of the request. It is echoed, never used as a key."""

    @field_validator("stop", mode="before")
    @classmethod
    def _check_stop(cls, value: Any) -> list[str]:
        stops = [] if value is None else [value] if isinstance(value, str) else _items(value)
        if stops is None or not all(isinstance(stop, str) for stop in stops):
            raise ValueError("must be a string or a list of strings")
        if len(stops) > 4:
            raise ValueError("at most 4 stop strings are allowed")
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
            raise ValueError(f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
        return stops

    @field_validator("stop_token_ids", mode="before")
    @classmethod
    def _bound_stop_token_ids(cls, value: Any) -> Any:
        return _bounded(value, MAX_STOP_TOKEN_IDS, "token ids")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _check_logit_bias(cls, value: Any) -> Any:
        biases = _object(value) or {}
        if len(biases) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} biases are allowed")
        if not all(key.isascii() and key.isdecimal() and len(key) <= 10 for key in biases):
            raise ValueError("the keys must be token ids, as decimal numbers")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequestBase:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """As in `SamplingParams.logprobs`."""
        return None

    @property
    def token_limit(self) -> int | None:
        """The client's limit on generated tokens."""
        return self.max_tokens

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.usage_in_stream and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(
        self, *, max_tokens: int, eos_token_ids: frozenset[int], defaults: SamplingDefaults = NEUTRAL
    ) -> SamplingParams:
        """The sampling parameters; `defaults` for fields left out. Draws a seed if the request has none."""
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise BadRequest(f"min_tokens is {min_tokens}, more than the limit of {max_tokens}", param="min_tokens")
        stop_ids = set(self.stop_token_ids or ())
        if not self.ignore_eos:
            stop_ids |= eos_token_ids
        seed = secrets.randbits(63) if self.seed is None else self.seed % 2**64
        return SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            temperature=defaults.temperature if self.temperature is None else float(self.temperature),
            top_p=defaults.top_p if self.top_p is None else float(self.top_p),
            top_k=defaults.top_k if self.top_k is None else max(0, self.top_k),
            min_p=defaults.min_p if self.min_p is None else float(self.min_p),
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=(
                defaults.repetition_penalty if self.repetition_penalty is None else float(self.repetition_penalty)
            ),
            logit_bias=[(int(key), float(bias)) for key, bias in (self.logit_bias or {}).items()],
            min_tokens=min_tokens,
            stop_token_ids=sorted(stop_ids),
            logprobs=self.num_logprobs,
        )


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

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if value is None:
            return ""
        parts = _items(value)
        if parts is None:
            return value
        _bounded(parts, MAX_CONTENT_PARTS, "content parts in one message")
        texts: list[str] = []
        for part in parts:
            kind = (_object(part) or {}).get("type")
            if kind != "text":
                raise ValueError(f"content parts of type {shorten(kind)} are not supported; only 'text' is")
            texts.append(TextPart.model_validate(part).text)
        return "\n".join(texts)

    @model_validator(mode="before")
    @classmethod
    def _refuse_tools(cls, value: Any) -> Any:
        if (_object(value) or {}).get("tool_calls"):
            raise ValueError("tool_calls are not supported yet")
        return value


class ChatRequest(CompletionRequestBase):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _bound_messages(cls, value: Any) -> Any:
        return _bounded(value, MAX_MESSAGES, "messages")

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


class CompletionRequest(CompletionRequestBase):
    """Body of `POST /v1/completions`. `prompt` is a list of prompts once validated."""

    prompt: list[str] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=1, le=_MAX_INT)] | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = True

    @field_validator("prompt", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        prompts = [value] if isinstance(value, str) else _items(value)
        if prompts and _are_token_ids(prompts):
            prompts = [prompts]
        if len(prompts or ()) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed in one request")
        if prompts is None or not (
            all(isinstance(item, str) for item in prompts) or all(_are_token_ids(item) for item in prompts)
        ):
            raise ValueError("must be a string, a list of strings, a list of token ids or a list of such lists")
        if not prompts or not all(prompts):
            raise ValueError("must not be empty")
        return prompts

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


def _are_token_ids(value: Any) -> bool:
    tokens = _items(value)
    return tokens is not None and set(map(type, tokens)) <= {int}


RequestT = TypeVar("RequestT", bound=CompletionRequestBase)


def parse_body(data: bytes, kind: type[RequestT]) -> RequestT:
    """The request in a body.

    Raises: BadRequest naming the first field that is wrong.
    """
    try:
        body = _object(from_json(data, allow_inf_nan=False, cache_strings=False))
    except ValueError as error:
        raise BadRequest(f"the body is not valid JSON: {str(error)[:_ECHO_CHARS]}", code="invalid_json") from error
    if body is None:
        raise BadRequest("the body must be a JSON object")
    for name in sorted(body.keys() & _UNSUPPORTED.keys()):
        if not _UNSUPPORTED[name](body[name]):
            raise BadRequest(
                f"{name}={shorten(body[name])} is not supported yet", param=name, code="unsupported_parameter"
            )
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = [str(part) for part in first["loc"]]
        message = first["msg"].removeprefix("Value error, ")
        where = ".".join(place) + ": " if place else ""
        got = "" if first["type"] in ("missing", "value_error") else f" (got {shorten(first['input'])})"
        raise BadRequest(f"{where}{message}{got}", param=place[0] if place else None) from error
