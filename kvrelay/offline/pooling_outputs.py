"""What `LLM.embed`, `LLM.encode` and `LLM.score` return, with the names of vLLM's classes. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt and its vector."""

    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True)
class PoolingOutput:
    """One vector for each token."""

    data: list[list[float]]


@dataclass(frozen=True)
class PoolingRequestOutput:
    """One prompt and the vectors of its tokens."""

    outputs: PoolingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(frozen=True)
class ScoringOutput:
    """How well a pair of texts fits."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """One pair and its score."""

    outputs: ScoringOutput
    finished: bool = True
