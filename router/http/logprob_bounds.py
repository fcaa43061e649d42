"""How many log-probabilities a request may ask for: up to the router's option, and all together not too many. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from common.base.errors import BadRequest
from common.config.router_options import ClientOptions
from common.control.messages import WHOLE_VOCABULARY
from router.requests.request import GenerationRequest

MAX_ENTRIES = 2**21
"""Log-probabilities of whole vocabularies in one answer: 8 MB from the nodes, up to 200 MB of JSON."""
MAX_WHOLE = 4
"""Answers with whole vocabularies that a router makes at a time."""


def check_logprobs(
    wanted: Sequence[GenerationRequest], samples: int, vocab_size: int, bound: int = ClientOptions.max_logprobs
) -> None:
    """wanted: one for each prompt, of `samples` answers. bound: `--max-logprobs`. Raises: BadRequest."""
    positions = 0
    for each in wanted:
        sampling = each.engine.sampling
        if not sampling.logprob_token_ids:
            positions += samples * sampling.max_tokens * _is_whole("sample", sampling.logprobs, vocab_size, bound)
        positions += len(each.engine.prompt_ids) * _is_whole("prompt", sampling.prompt_logprobs, vocab_size, bound)
    most = MAX_ENTRIES // vocab_size
    if positions > most:
        raise BadRequest(
            f"log-probabilities of the whole vocabulary, {vocab_size} tokens, are given for at most {most} positions of a "
            f"request; this one may have {positions}: lower max_tokens, or shorten the prompt",
            param="logprobs",
        )


def _is_whole(kind: str, count: int | None, vocab_size: int, bound: int) -> bool:
    """Whether that many are the whole vocabulary. The sentence is vLLM's. Raises: BadRequest if they are too many."""
    if count is None:
        return False
    asked = vocab_size if count == WHOLE_VOCABULARY else count
    if bound != WHOLE_VOCABULARY and asked > bound:
        raise BadRequest(
            f"Requested {kind} logprobs of {asked}, which is greater than max allowed: {bound} (--max-logprobs)",
            param="logprobs" if kind == "sample" else "prompt_logprobs",
        )
    return count == WHOLE_VOCABULARY
