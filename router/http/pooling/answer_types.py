"""The JSON objects that pooling calls answer with, for `/openapi.json`. Nothing else uses them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class PoolingUsage(TypedDict):
    """Token counts over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingItem(TypedDict):
    """The vector of one input; a string is base64 of float32 values, little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(TypedDict):
    """Answer of `POST /v1/embeddings`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingItem]
    usage: PoolingUsage


class PooledItem(TypedDict):
    """What the model computed for one input: a vector, one vector per token, or base64 of either."""

    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str


class PoolingAnswer(TypedDict):
    """Answer of `POST /pooling`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledItem]
    usage: PoolingUsage


class Score(TypedDict):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class Scores(TypedDict):
    """Answer of `POST /v1/score`."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


class RankedDocument(TypedDict):
    """A document's text."""

    text: str


class Ranked(TypedDict):
    """A document's place; `index`: its place in the request."""

    index: int
    relevance_score: float
    document: NotRequired[RankedDocument]


class Ranking(TypedDict):
    """Answer of `POST /v1/rerank`: the documents, best first."""

    id: str
    model: str
    results: list[Ranked]
    usage: PoolingUsage
