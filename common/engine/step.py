"""What the leader tells every rank about one forward step, and what comes back. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.control.messages import AttemptKey, SamplingParams, TokenLogprobs
from common.engine.sampling.penalties import SeenTokens


@dataclass(frozen=True)
class SampleSpec:
    """Draw one token from the logits of the last row of sequence `seq_index`."""

    seq_index: int
    params: SamplingParams
    position: int
    """Index in the sequence of the token to be drawn: the sampler's counter, with `params.seed`."""
    num_generated: int
    """Tokens generated before this one; below `params.min_tokens` the stop ids are banned."""
    seen: SeenTokens | None = None
    """For penalties; None where there are none. A token that the step carries (`StepInput.carried`) is not in it."""


@dataclass(frozen=True)
class RelayProgress:
    """After this step, blocks [0, `num_blocks`) of this attempt hold final KV in every layer.

    As the step computes, each layer's KV becomes final right after that layer ran.
    """

    key: AttemptKey
    num_blocks: int


@dataclass(frozen=True)
class StepInput:
    """One batch. Rows of all sequences lie one after the other: T = sum(query_lens).

    Invariant: row r of sequence s attends to the first `context_lens[s] - query_lens[s] + r + 1` slots of
    `block_tables[s]`; its own KV goes to `slot_mapping`, before attention reads it.
    """

    step_id: int
    token_ids: list[int]
    """[T]"""
    positions: list[int]
    """[T], index in the sequence."""
    slot_mapping: list[int]
    """[T], block id * block size + offset in the block."""
    query_lens: list[int]
    """[num_seqs], rows of each sequence."""
    context_lens: list[int]
    """[num_seqs], KV length after this step, the new rows included."""
    block_tables: list[list[int]]
    """[num_seqs][blocks], at least enough blocks for `context_lens`."""
    samples: list[SampleSpec] = field(default_factory=list)
    relay: list[RelayProgress] = field(default_factory=list)
    carried_from: int = 0
    """The step, started before this one and maybe still running, whose drawn tokens `carried` speaks of."""
    carried: list[tuple[int, int]] = field(default_factory=list)
    """(row, index in that step's `samples`): the row's token is the one drawn there; `token_ids` has 0 in its place."""


@dataclass(frozen=True)
class SampledToken:
    """One drawn token; `logprobs` only where asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why there is none; its sequence cannot go on then, the others of the step do."""


@dataclass(frozen=True)
class StepOutput:
    """`sampled[i]` answers `StepInput.samples[i]`."""

    step_id: int
    sampled: list[SampledToken]
    forward_s: float
    """Wall time inside the model's forward and sampling; the rest of a step is engine overhead."""
