"""From a request body to the engine's `SamplingParams`. Pure.

Fields are read from the body's dictionary: reading an attribute of a pydantic model takes several times as long.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable

from common.base.errors import BadRequest
from common.control.identities import Ids, pack_ids
from common.control.messages import SamplingParams
from router.http.openai.shared_fields import CompletionRequestBase
from router.models.sampling_defaults import NEUTRAL, SamplingDefaults

_LEAST_TOP_P = 1e-6
"""Replaces 0: less than the probability of the most likely token in any vocabulary."""


def sampling_params(
    body: CompletionRequestBase,
    *,
    max_tokens: int,
    eos_token_ids: frozenset[int],
    bad_words: list[Ids],
    defaults: SamplingDefaults = NEUTRAL,
) -> SamplingParams:
    """The sampling parameters of a request; `defaults` for fields left out. Draws a seed if the request has none or -1, as vLLM
    and ollama do. `bad_words`: the request's, tokenized.

    Raises: BadRequest.
    """
    given = vars(body)
    min_tokens = given["min_tokens"] or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens is {min_tokens}, more than the limit of {max_tokens}", param="min_tokens")
    stop_ids = set(given["stop_token_ids"] or ())
    if not given["ignore_eos"]:
        stop_ids |= eos_token_ids
    seed, temperature, top_p, min_p = given["seed"], given["temperature"], given["top_p"], given["min_p"]
    repetition_penalty = given["repetition_penalty"]
    biases: dict[str, float] = given["logit_bias"] or {}
    return SamplingParams(
        seed=secrets.randbits(63) if seed in (None, -1) else seed % 2**64,
        max_tokens=max_tokens,
        temperature=float(defaults.temperature if temperature is None else temperature),
        top_p=float(defaults.top_p if top_p is None else top_p or _LEAST_TOP_P),
        top_k=defaults.top_k if given["top_k"] is None else max(0, given["top_k"]),
        min_p=float(defaults.min_p if min_p is None else min_p),
        presence_penalty=float(given["presence_penalty"] or 0.0),
        frequency_penalty=float(given["frequency_penalty"] or 0.0),
        repetition_penalty=float(defaults.repetition_penalty if repetition_penalty is None else repetition_penalty),
        logit_bias=[(int(key), float(bias)) for key, bias in biases.items()],
        min_tokens=min_tokens,
        stop_token_ids=sorted(stop_ids),
        logprobs=body.num_logprobs,
        allowed_token_ids=pack_ids(given["allowed_token_ids"] or ()),
        bad_words=bad_words,
        prompt_logprobs=body.num_prompt_logprobs,
        logprob_token_ids=given["logprob_token_ids"] or [],
    )


def bad_word_ids(words: Iterable[str], encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The token sequences of each word at the start of a text, and after a space if that is a different sequence of as many
    tokens. `encode`: without special tokens.

    Source: vLLM, `SamplingParams.update_from_tokenizer`: a word that a space makes longer begins with a token of its own,
    and the first sequence covers it.
    """
    found: list[list[int]] = []
    for word in words:
        plain = encode(word.lstrip())
        spaced = encode(" " + word.lstrip())
        found += [plain] if plain else []
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return found
