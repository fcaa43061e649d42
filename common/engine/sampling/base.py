"""The interface of a sampler, between a step's logits and its tokens.

Runs on the engine thread of the rank that has the LM head; `SamplerOutput.wait` on any thread.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from common.base.errors import NoTokenAllowed
from common.engine.step import SampledToken, SampleSpec

GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM: dividing by them would overflow."""


class SamplerOutput(Protocol):
    """One step's tokens, which may still be computed."""

    @property
    def token_ids(self) -> Tensor:
        """[samples] int64 where the logits are, for the next step; a valid id also where no token was drawn."""
        ...

    def wait(self) -> list[SampledToken]:
        """The tokens on the host; a `SampledToken` with an error for a row without a finite maximum, or
        whose tokens are all masked or banned."""
        ...


class Sampler(Protocol):
    """Draws one token for each row of logits."""

    def sample(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> SamplerOutput:
        """logits: [n, vocab] float32, row i for `specs[i]`; not changed.

        unseen: [n] int64, for each row a generated token that is not yet in its `seen`, -1 for none; None: all -1.
        """
        ...


def none_allowed(spec: SampleSpec) -> SampledToken:
    """The result for a row whose tokens are all masked or banned."""
    message = f"the request's masks and bans leave no token that can be sampled at position {spec.position}"
    return SampledToken(-1, error=message, error_code=NoTokenAllowed.code)


def no_token(highest: float, spec: SampleSpec) -> SampledToken:
    """The result for a row whose highest logit is not finite."""
    return SampledToken(-1, error=f"the model computed {highest} as the highest logit at position {spec.position}")
