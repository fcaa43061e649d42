"""The JSON objects that ollama's calls answer with, for `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class OllamaAnswer(TypedDict):
    """An answer; durations are in nanoseconds. `message` of a chat, `response` and `thinking` of a prompt. One that only says
    that the model is loaded has no counts."""

    model: str
    created_at: str
    message: NotRequired[dict[str, Any]]
    response: NotRequired[str]
    thinking: NotRequired[str]
    done: Literal[True]
    done_reason: Literal["stop", "length", "load"]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaModels(TypedDict):
    """The served model, under each of its names."""

    models: list[dict[str, Any]]


class OllamaModel(TypedDict):
    """The description of a model. `template`: its chat template. `model_info`: keys as in the metadata of GGUF files, such as
    `general.architecture` and `{architecture}.context_length`."""

    modelfile: str
    parameters: str
    template: str
    license: str
    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[Literal["completion", "tools", "thinking", "embedding"]]


class OllamaVersion(TypedDict):
    """The version of ollama whose calls these are."""

    version: str


class OllamaEmbeddings(TypedDict):
    """Answer of `POST /api/embed`; durations are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(TypedDict):
    """Answer of `POST /api/embeddings`."""

    embedding: list[float]
