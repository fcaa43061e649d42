"""What happens to logits before a token is drawn: one list of steps, for the samplers of host and device.

Order and meaning are vLLM's. A new step is a file in `common.engine.sampling.steps` and an entry here.
"""

from __future__ import annotations

from common.engine.sampling.steps.base import LogitsStep
from common.engine.sampling.steps.logit_bias import LogitBias
from common.engine.sampling.steps.min_p import MinP
from common.engine.sampling.steps.min_tokens import MinTokens
from common.engine.sampling.steps.penalties import Penalties
from common.engine.sampling.steps.temperature import Temperature
from common.engine.sampling.steps.token_mask import TokenMask
from common.engine.sampling.steps.top_k import TopK
from common.engine.sampling.steps.top_p import TopP

LOGITS_STEPS: tuple[LogitsStep, ...] = (
    TokenMask(),
    MinTokens(),
    LogitBias(),
    Penalties(),
    Temperature(),
    MinP(),
    TopK(),
    TopP(),
)
GREEDY_STEPS = tuple(step for step in LOGITS_STEPS if step.for_greedy)
"""They come first, and apply to every draw."""
RANDOM_STEPS = LOGITS_STEPS[len(GREEDY_STEPS) :]
"""They follow for random draws."""
