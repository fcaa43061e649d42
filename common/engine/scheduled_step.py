"""A scheduled step, and what came of it: what passes between the scheduler and a node's core. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.base.errors import KvRelayError
from common.control.messages import FinishReason, PromptLogprobs
from common.engine.sequence import Sequence
from common.engine.step import SampledToken, StepInput


class Progress(NamedTuple):
    """The result of a step for one sequence."""

    seq: Sequence
    tokens: list[SampledToken]
    """Appended to the sequence, in order; none after a chunk that does not end its prompt."""
    finish_reason: FinishReason | None = None
    error: KvRelayError | None = None
    """Why a token could not be drawn. The sequence got no tokens, and is the caller's to abort."""
    prompt_logprobs: list[PromptLogprobs] = []
    """The next ones of its prompt, from the second token on."""


@dataclass(frozen=True)
class ScheduledStep:
    """One scheduled step: what the ranks get, and its sequences in the same order."""

    step: StepInput
    seqs: list[Sequence]
    admitted: list[Sequence]
    """The `seqs` that got their blocks in this step."""
    group: int
