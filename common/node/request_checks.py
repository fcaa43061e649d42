"""Checks a request from another process before it takes part in steps, because a bad one would fail the whole step. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from common.base.errors import BadRequest
from common.control.messages import MAX_PREDICTION, WHOLE_VOCABULARY, EngineRequest, SamplingParams

_MAX_LISTED = 4096
"""Maximum entries of each list in the sampling parameters, and maximum number of most likely tokens of a position."""


def check_request(request: EngineRequest, token_ids: Sequence[int], vocab_size: int) -> None:
    """Check a request. `token_ids`: the prompt and the tokens of earlier attempts. Raises: BadRequest naming the bad value."""
    if not request.prompt_ids:
        raise BadRequest("the prompt has no tokens")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise BadRequest(f"a token id is outside the vocabulary of {vocab_size}")
    if not _are_tokens(request.prediction, vocab_size, most=MAX_PREDICTION):
        raise BadRequest("prediction is out of range")
    sampling = request.sampling
    wrong = [name for name, is_right in _facts(sampling, vocab_size) if not is_right]
    if wrong:
        raise BadRequest(f"{wrong[0]} is out of range")


def _facts(sampling: SamplingParams, vocab_size: int) -> Iterable[tuple[str, bool]]:
    """Names of sampling parameters, and whether their values are valid."""
    yield "max_tokens", sampling.max_tokens >= 1
    yield "min_tokens", sampling.min_tokens >= 0
    yield "seed", 0 <= sampling.seed < 2**64
    yield "temperature", 0.0 <= sampling.temperature < math.inf
    yield "top_p", 0.0 < sampling.top_p <= 1.0
    yield "min_p", 0.0 <= sampling.min_p <= 1.0
    yield "top_k", sampling.top_k >= 0
    yield "presence_penalty", math.isfinite(sampling.presence_penalty)
    yield "frequency_penalty", math.isfinite(sampling.frequency_penalty)
    yield "repetition_penalty", 0.0 < sampling.repetition_penalty < math.inf
    for name in ("logprobs", "prompt_logprobs"):
        count: int | None = getattr(sampling, name)
        yield name, count in (None, WHOLE_VOCABULARY) or 0 <= count <= min(_MAX_LISTED, vocab_size)
    yield "logit_bias", _are_tokens([token for token, _ in sampling.logit_bias], vocab_size)
    yield "logit_bias", all(math.isfinite(value) for _, value in sampling.logit_bias)
    yield "stop_token_ids", len(sampling.stop_token_ids) <= _MAX_LISTED
    yield "allowed_token_ids", _are_tokens(sampling.allowed_token_ids, vocab_size, most=vocab_size)
    yield "bad_words", len(sampling.bad_words) <= _MAX_LISTED
    yield "bad_words", all(0 < len(word) <= _MAX_LISTED for word in sampling.bad_words)


def _are_tokens(token_ids: Sequence[int], vocab_size: int, most: int = _MAX_LISTED) -> bool:
    return len(token_ids) <= most and (not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size))
