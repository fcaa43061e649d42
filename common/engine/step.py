"""The input that the leader sends to every rank for one forward step, and the output. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from common.base.errors import NoFiniteLogits
from common.control.messages import AttemptKey, PromptLogprobs, SamplingParams, TokenLogprobs
from common.engine.seen_tokens import SeenTokens


class SampleSpec(NamedTuple):
    """Draw one token from the logits of one row. A sequence may have several draws in a step, each from its own row."""

    seq_index: int
    """The sequence that the token belongs to."""
    row: int
    """The row whose logits are used, among all rows of the step."""
    params: SamplingParams
    position: int
    """Index in the sequence of the token to be drawn: the sampler's counter, with `params.seed`."""
    num_generated: int
    """Tokens generated before this one; below `params.min_tokens` the stop ids are banned."""
    seen: SeenTokens | None = None
    """Tokens that penalties count; None without penalties. The token of a placeholder row is not in it."""
    mask: bytes | None = None
    """Bit i % 32 of native int32 word i // 32 is set if token i may be drawn; tokens past the end may not. None: all may."""
    banned: list[int] = []
    """Tokens that would complete one of the request's bad words here."""


class ScoredRows(NamedTuple):
    """Compute the log-probabilities of prompt tokens, from as many consecutive rows of the step."""

    seq_index: int
    row: int
    """The first row."""
    token_ids: list[int]
    """[rows], the prompt token that follows each row."""
    num_top: int
    """How many of the most likely tokens to return for each row."""


class BlockCopy(NamedTuple):
    """Copy a block's KV in all layers of one block table."""

    table: int
    source: int
    target: int


class HandedOn(NamedTuple):
    """Blocks whose KV of one layer group only the first rank of each stage has received."""

    group: int
    blocks: list[int]


@dataclass(frozen=True)
class RelayProgress:
    """After this step, blocks [0, `num_blocks`) of this attempt hold final KV in every layer.

    While the step computes, each layer's KV becomes final right after that layer ran.
    """

    key: AttemptKey
    num_blocks: int


@dataclass(frozen=True)
class StepInput:
    """One batch. Rows of all sequences lie one after the other: T = sum(query_lens).

    Invariant: row r of sequence s attends to the first `context_lens[s] - query_lens[s] + r + 1` slots of
    `block_tables[t][s]` in the layers of block table t, from their sliding window on; its own KV goes to
    `slot_mapping[t]`, before attention reads it.
    """

    step_id: int
    token_ids: list[int]
    """[T]"""
    positions: list[int]
    """[T], index in the sequence."""
    slot_mapping: list[list[int]]
    """[tables][T], block id * block size + offset in the block."""
    query_lens: list[int]
    """[num_seqs], rows of each sequence."""
    context_lens: list[int]
    """[num_seqs], KV length after this step, the new rows included."""
    block_tables: list[list[list[int]]]
    """[tables][num_seqs][blocks], at least enough blocks for `context_lens`; those behind the window are any blocks."""
    num_decode_seqs: int = 0
    """The first `num_decode_seqs` sequences decode: they have few rows, and draw at each. The others are prompt chunks."""
    samples: list[SampleSpec] = field(default_factory=list[SampleSpec])
    """In the order of sequences, then rows."""
    relay: list[RelayProgress] = field(default_factory=list[RelayProgress])
    placeholder_step: int = 0
    """The step whose drawn tokens `placeholders` name. It started before this one and may still be running."""
    placeholders: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(row, index in that step's `samples`): the row's token is the one drawn there; `token_ids` has 0 in its place."""
    scored: list[ScoredRows] = field(default_factory=list[ScoredRows])
    adapters: list[int] = field(default_factory=list[int])
    """[num_seqs], the id of each sequence's LoRA adapter in the ranks' memory, 0 without; empty: none has one."""
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    """Made before anything else of the step. No block is the target of two."""
    handed_on: list[HandedOn] = field(default_factory=list[HandedOn])
    """Before anything else the first rank of each stage hands these on to its other ranks."""
    by_head: bool = False
    """The draft head computes the rows, one for each sequence, in place of the model, and its output takes the place of the
    model's hidden state at this position until a step of the model writes that."""
    rebalances: bool = False
    """Before the step the ranks may move experts among themselves (`common.model.mixture.rebalancer`)."""


def with_handed_on(step: StepInput, pending: list[HandedOn]) -> StepInput:
    """The step, with all of `pending` as its `handed_on`. Empties `pending`."""
    if not pending:
        return step
    step = replace(step, handed_on=pending.copy())
    pending.clear()
    return step


class SampledToken(NamedTuple):
    """One drawn token; `logprobs` only where asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    """Why there is no token. Its sequence cannot continue then; the others of the step do."""
    error_code: str = NoFiniteLogits.code
    """Code of `error`, from `common.base.errors`."""


@dataclass(frozen=True)
class StepOutput:
    """`sampled[i]` answers `StepInput.samples[i]`."""

    step_id: int
    sampled: list[SampledToken]
    forward_s: float
    """Wall time inside the model's forward and sampling; the rest of a step is engine overhead."""
    prompt_logprobs: list[list[PromptLogprobs]] = field(default_factory=list[list[PromptLogprobs]])
    """Item i answers `StepInput.scored[i]`, one for each of its rows."""
