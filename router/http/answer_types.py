"""The JSON objects that calls answer with, for `/openapi.json`. Nothing else uses them: answers are built as plain dicts."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict


class ErrorDetails(TypedDict):
    """What went wrong. `param` names the field of the request, if one is at fault."""

    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    """An error in OpenAI's shape."""

    error: ErrorDetails


class PromptTokensDetails(TypedDict):
    """Parts of a prompt."""

    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """Tokens that were guessed before they were computed (`prediction`, `--speculate`), of all choices."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(TypedDict):
    """Token counts over all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class FunctionCall(TypedDict):
    """A call of a function; the arguments are a JSON object as text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of an answer."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(TypedDict):
    """The answer to a conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: NotRequired[list[ToolCall]]
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]


class ChatChoice(TypedDict):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None


class ChatCompletion(TypedDict):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None


class TextChoice(TypedDict):
    """The continuation of one prompt."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, Any] | None] | None
    prompt_token_ids: list[int] | None
    token_ids: list[int] | None


class Completion(TypedDict):
    """The continuations of all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ModelCard(TypedDict):
    """The served model under one of its names."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    vocab_size: int


class ModelList(TypedDict):
    """The served model under each of its names."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokens(TypedDict):
    """A prompt's token ids; `token_strs` if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(TypedDict):
    """tokenizer_config.json, with each special token as a text, and the chat template that is used."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore[reportGeneralTypeIssues]
    tokenizer_class: str
    chat_template: NotRequired[str]


class Prompt(TypedDict):
    """The text of token ids."""

    prompt: str


class Health(TypedDict):
    """Whether requests can be served. `prefill`, `decode` and `pooling`: usable nodes. `redis`: ok, or what is wrong with it.
    `refused`: models that nodes registered and whose files the router cannot use, with the reason. `ignored_nodes`: nodes that
    are not used because their model is not the one of older nodes, with the difference."""

    status: Literal["ok", "degraded", "unavailable"]
    prefill: int
    decode: int
    pooling: int
    prefill_mode: str
    degraded: bool
    redis: str
    refused: list[str]
    ignored_nodes: list[str]


class Ready(TypedDict):
    """Whether requests can be served."""

    ready: bool


class Load(TypedDict):
    """Generations that have not ended."""

    server_load: int


class ServerInfo(TypedDict):
    """What a router serves and how it is set up."""

    version: str
    models: list[ModelCard]
    nodes: dict[str, int]
    settings: dict[str, Any]


class Version(TypedDict):
    """The router's version."""

    version: str
