"""From a request body to the engine's `SamplingParams`. Pure."""

from __future__ import annotations

import secrets

from common.base.errors import BadRequest
from common.control.messages import SamplingParams
from router.http.openai.shared_fields import CompletionRequestBase
from router.sampling_defaults import NEUTRAL, SamplingDefaults


def sampling_params(
    body: CompletionRequestBase,
    *,
    max_tokens: int,
    eos_token_ids: frozenset[int],
    bad_words: list[list[int]],
    defaults: SamplingDefaults = NEUTRAL,
) -> SamplingParams:
    """The sampling parameters of a request; `defaults` for fields left out. Draws a seed if the request has none.
    `bad_words`: the request's, tokenized.

    Raises: BadRequest.
    """
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens is {min_tokens}, more than the limit of {max_tokens}", param="min_tokens")
    stop_ids = set(body.stop_token_ids or ())
    if not body.ignore_eos:
        stop_ids |= eos_token_ids
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    return SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        temperature=defaults.temperature if body.temperature is None else float(body.temperature),
        top_p=defaults.top_p if body.top_p is None else float(body.top_p),
        top_k=defaults.top_k if body.top_k is None else max(0, body.top_k),
        min_p=defaults.min_p if body.min_p is None else float(body.min_p),
        presence_penalty=float(body.presence_penalty or 0.0),
        frequency_penalty=float(body.frequency_penalty or 0.0),
        repetition_penalty=(
            defaults.repetition_penalty if body.repetition_penalty is None else float(body.repetition_penalty)
        ),
        logit_bias=[(int(key), float(bias)) for key, bias in (body.logit_bias or {}).items()],
        min_tokens=min_tokens,
        stop_token_ids=sorted(stop_ids),
        logprobs=body.num_logprobs,
        allowed_token_ids=body.allowed_token_ids or [],
        bad_words=bad_words,
        prompt_logprobs=body.num_prompt_logprobs,
    )
