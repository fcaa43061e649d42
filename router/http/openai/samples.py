"""Several answers to one prompt: `n` and `best_of`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from router.requests.request import Delta, GenerationRequest
from router.requests.shared_prompt import SharedPrompt

_SEED_STEP = 0x9E3779B97F4A7C15
"""Between the seeds of two samples; odd, so that 2**64 samples have different ones."""


def samples(request: GenerationRequest, count: int, *, ranked: bool) -> list[GenerationRequest]:
    """`count` samples of a request; the first one is the answer that it would get alone. `ranked`: `most_likely` will choose
    among them, for which the engine must return log-probabilities.
    """
    if count == 1:
        return [request]
    sampling, shared = request.engine.sampling, SharedPrompt()
    if ranked and sampling.logprobs is None:
        sampling = sampling._replace(logprobs=0)
    seeds = [(sampling.seed + index * _SEED_STEP) % 2**64 for index in range(count)]
    each = [sampling._replace(seed=seed, prompt_logprobs=None) for seed in seeds]
    each[0] = sampling  # the first one has the prompt computed
    return [replace(request, engine=request.engine._replace(sampling=sampling), shared=shared) for sampling in each]


def most_likely(deltas: Sequence[list[Delta]], computed: int, returned: int) -> list[int]:
    """The answers to return for each prompt: those with the highest mean log-probability per token, the best first. The `computed`
    answers to one prompt follow each other.
    """
    kept: list[int] = []
    for start in range(0, len(deltas), computed):
        group = range(start, start + computed)
        kept += sorted(group, key=lambda index: -_mean_logprob(deltas[index]))[:returned]
    return kept


def _mean_logprob(deltas: list[Delta]) -> float:
    found = [token.logprob for delta in deltas for token in delta.logprobs or ()]
    return sum(found) / max(1, len(found))
