"""Between a step's logits and its tokens: what a sampler is, and the one that draws on the host.

Runs on the engine thread of the rank that holds the head; `Draws.wait` on any thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from common.engine.sampling.host_sampler import sample
from common.engine.sampling.penalties import with_token
from common.engine.step import SampledToken, SampleSpec


class Draws(Protocol):
    """One step's tokens, which may still be being drawn."""

    @property
    def token_ids(self) -> Tensor:
        """[samples] int64 where the logits are, for the next step; in the vocabulary also where there is no token."""
        ...

    def wait(self) -> list[SampledToken]:
        """The tokens on the host; a `SampledToken` with an error for a row without a finite maximum."""
        ...


class Sampler(Protocol):
    """Draws one token for each row of logits."""

    def draw(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> Draws:
        """logits: [n, vocab] float32, row i for `specs[i]`; not changed.

        unseen: [n] int64, for each row a generated token that its `seen` does not know, -1 for none; None: there are none.
        """
        ...

    def nothing(self, device: torch.device) -> Draws:
        """No token, for a step that draws none; its `wait` ends with the step: only then are blocks free of its writes."""
        ...


class HostDraws:
    """Tokens that were drawn at once."""

    def __init__(self, tokens: list[SampledToken]) -> None:
        self._tokens = tokens

    @property
    def token_ids(self) -> Tensor:
        # The next step may carry what was not drawn, in a row that is then discarded.
        return torch.tensor([max(token.token_id, 0) for token in self._tokens])

    def wait(self) -> list[SampledToken]:
        return self._tokens


class HostSampler:
    """`common.engine.sampling.host_sampler.sample` as a `Sampler`."""

    def draw(self, logits: Tensor, specs: list[SampleSpec], unseen: Tensor | None) -> HostDraws:
        if unseen is not None:
            tokens = unseen.tolist()
            specs = [
                replace(spec, seen=with_token(spec.seen, token)) if spec.seen is not None and token >= 0 else spec
                for spec, token in zip(specs, tokens, strict=True)
            ]
        return HostDraws(sample(logits, specs))

    def nothing(self, device: torch.device) -> HostDraws:
        return HostDraws([])
