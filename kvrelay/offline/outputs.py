"""What `LLM` returns, with the field names of vLLM's classes. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from common.control.messages import FinishReason, PromptLogprobs, TokenLogprobs
from common.control.whole_vocabulary import most_likely_of
from router.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int | None
    """1 is the most likely token. None: the sampled token is not among those asked for."""
    decoded_token: str


@dataclass(frozen=True)
class CompletionOutput:
    """One answer."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    """For each token of `token_ids`: log-probabilities by token id."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token of the request that ended the answer."""


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    """The text, for a conversation as its template renders it; None if token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """For each prompt token, if asked for: log-probabilities by token id; None for the first."""
    outputs: list[CompletionOutput]
    num_cached_tokens: int | None
    """Prompt tokens whose KV was in the prefix cache when the first answer began. None for several answers from a cluster, which does not report it."""
    finished: bool = True


class EngineAnswer(NamedTuple):
    """One answer, as an engine returns it."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    cached_tokens: int | None
    prompt_logprobs: list[PromptLogprobs] | None = None
    """One for each token of the prompt after the first; the first answer to a prompt has them."""


def completion_output(index: int, answer: EngineAnswer, tokenizer: Tokenizer) -> CompletionOutput:
    """The answer as `LLM` returns it. `index`: among those to its prompt."""
    logprobs = answer.logprobs
    return CompletionOutput(
        index=index,
        text=answer.text,
        token_ids=answer.token_ids,
        cumulative_logprob=None if logprobs is None else sum(found.logprob for found in logprobs),
        logprobs=None if logprobs is None else _by_token(answer.token_ids, logprobs, tokenizer),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


def prompt_logprobs(
    prompt_ids: Sequence[int], found: Sequence[PromptLogprobs] | None, tokenizer: Tokenizer
) -> list[dict[int, Logprob] | None] | None:
    """The prompt's log-probabilities as `LLM` returns them."""
    if found is None:
        return None
    positions: list[dict[int, Logprob] | None] = [None]
    for token_id, each in zip(prompt_ids[1:], found, strict=True):
        [position] = _by_token(
            [token_id], [TokenLogprobs(each.logprob, each.top_ids, each.top_logprobs, each.whole)], tokenizer
        )
        if position[token_id].rank is None:
            position[token_id] = replace(position[token_id], rank=each.rank)
        positions.append(position)
    return positions


def _by_token(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> list[dict[int, Logprob]]:
    positions: list[dict[int, Logprob]] = []
    for token_id, found in zip(token_ids, logprobs, strict=True):
        position = {
            top_id: Logprob(logprob, rank, tokenizer.text_of(top_id))
            for rank, (top_id, logprob) in enumerate(most_likely_of(found), 1)
        }
        position.setdefault(token_id, Logprob(found.logprob, None, tokenizer.text_of(token_id)))
        positions.append(position)
    return positions


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
