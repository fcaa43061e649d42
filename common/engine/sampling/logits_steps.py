"""The processing of logits before a token is drawn: one list of steps, for the samplers of host and device.

Order and meaning are vLLM's. A new step is a file in `common.engine.sampling.steps` and an entry here.
"""

from __future__ import annotations

from common.engine.sampling.base import GREEDY_BELOW
from common.engine.sampling.steps.bans import BadWords, MinTokens
from common.engine.sampling.steps.base import LogitsStep
from common.engine.sampling.steps.logit_bias import LogitBias
from common.engine.sampling.steps.min_p import MinP
from common.engine.sampling.steps.penalties import Penalties
from common.engine.sampling.steps.temperature import Temperature
from common.engine.sampling.steps.token_mask import TokenMask
from common.engine.sampling.steps.top_k import TopK
from common.engine.sampling.steps.top_p import TopP
from common.engine.step import SampleSpec

LOGITS_STEPS: tuple[LogitsStep, ...] = (
    TokenMask(),
    BadWords(),
    MinTokens(),
    LogitBias(),
    Penalties(),
    Temperature(),
    MinP(),
    TopK(),
    TopP(),
)
GREEDY_STEPS = tuple(step for step in LOGITS_STEPS if step.for_greedy)
"""Steps of every draw; they come first."""
RANDOM_STEPS = LOGITS_STEPS[len(GREEDY_STEPS) :]
"""Further steps of random draws; greedy ones ignore them."""
FILTERS = tuple(step for step in LOGITS_STEPS if step.filters)


def steps_of(specs: list[SampleSpec], vocab: int) -> list[list[LogitsStep]]:
    """The steps that each draw needs, in order."""
    needed: list[list[LogitsStep]] = [[] for _ in specs]
    is_greedy = all(spec.params.temperature < GREEDY_BELOW for spec in specs)
    for step in GREEDY_STEPS if is_greedy else LOGITS_STEPS:
        for index in step.asked_for(specs, vocab):
            if step.for_greedy or specs[index].params.temperature >= GREEDY_BELOW:
                needed[index].append(step)
    return needed
