"""A scheduled step, and what came of it: what passes between the scheduler and a node's core. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.base.errors import BadRequest, KvRelayError, from_code
from common.control.messages import FinishReason, PromptLogprobs
from common.engine.sequence import Sequence
from common.engine.step import SampledToken, StepInput


class SequenceOutput(NamedTuple):
    """The result of a step for one sequence."""

    seq: Sequence
    tokens: list[SampledToken]
    """Appended to the sequence, in order; none after a chunk that does not end its prompt."""
    finish_reason: FinishReason | None = None
    error: KvRelayError | None = None
    """Why a token could not be drawn. The sequence got no tokens, and the caller must end it."""
    prompt_logprobs: list[PromptLogprobs] = []
    """The next ones of its prompt, from the second token on."""
    drafted: int = 0
    """Drafts that the step verified."""
    accepted: int = 0
    """Leading ones of these that were right."""


@dataclass(frozen=True)
class ScheduledStep:
    """One scheduled step: what the ranks get, and its sequences in the same order."""

    step: StepInput
    seqs: list[Sequence]
    admitted: list[Sequence]
    """The `seqs` that got their blocks in this step."""
    microbatch: int


def take_output(
    seq: Sequence, drawn: list[SampledToken], scored: list[PromptLogprobs], max_model_len: int
) -> SequenceOutput:
    """Append the tokens that a step drew for a sequence, up to the one that ends it or that differs from the draft in its place;
    take in its prompt's log-probabilities."""
    tokens, drafts = seq.tokens, []
    if drawn:  # else they belong to a later step, which is in flight
        drafts, tokens.draft_ids = tokens.draft_ids, drafts
    seq.progress.num_pending -= len(drawn)
    seq.progress.num_scored += len(scored)
    reason: FinishReason | None = None
    accepted = 0
    try:
        for count, token in enumerate(drawn, 1):
            if token.error is not None:
                return SequenceOutput(seq, [], error=from_code(token.error_code, token.error))
            tokens.ids.append(token.token_id)
            reason = tokens.finish_reason(max_model_len)
            is_right = drafts[count - 1 : count] == [token.token_id]
            accepted += is_right
            if reason is not None or not is_right:
                seq.progress.num_scheduled -= len(drawn) - count  # rows of wrong drafts, or after the end
                del drawn[count:]
                break
        if drawn and reason is None and not seq.relays:
            tokens.prepare_grammar()
    except BadRequest as error:
        return SequenceOutput(seq, [], error=error)
    return SequenceOutput(seq, drawn, reason, None, scored, len(drafts), accepted)
