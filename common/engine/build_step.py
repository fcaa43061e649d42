"""Builds the `StepInput` that ranks get from the rows that the scheduler chose, and records them. Pure."""

from __future__ import annotations

from common.base.hashing import BLOCK_SIZE
from common.engine.sequence import Sequence
from common.engine.step import BlockCopy, RelayProgress, SampleSpec, ScoredRows, StepInput

Rows = tuple[Sequence, int]
"""A sequence of a step and its number of rows."""


def build_step(step_id: int, rows: list[Rows], num_decode_seqs: int, copies: list[BlockCopy]) -> StepInput:
    """The next rows of each sequence, from `num_scheduled` on; the first `num_decode_seqs` sequences decode.

    A row is sampled if its next token is unknown. All pending tokens come from one earlier step.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    samples: list[SampleSpec] = []
    placeholder_step = 0
    placeholders: list[tuple[int, int]] = []
    scored: list[ScoredRows] = []
    for index, (seq, count) in enumerate(rows):
        tokens, progress = seq.tokens, seq.progress
        start = progress.num_scheduled
        known = len(tokens.ids) + progress.num_pending
        stop = start + count
        row_of = len(token_ids) - start  # row of position p: p + row_of
        token_ids += tokens.ids[start:stop]
        if len(token_ids) - row_of < stop:
            if progress.num_pending:
                source, sample = progress.last_draw
                assert placeholder_step in (0, source), f"tokens of steps {placeholder_step} and {source} are pending"
                placeholder_step = source
                placeholders.append((len(token_ids), sample))
                token_ids.append(0)
            else:
                token_ids += tokens.draft_ids
        positions += range(start, stop)
        if seq.scores_prompt:
            scored += _scored_rows(seq, index, start, stop, row_of)
        for end in range(known, stop + 1):  # `end`: number of tokens up to the row that is sampled
            samples.append(draw_of(seq, index, end - 1 + row_of, end, num_drafts=end - known))
    adapters = [seq.adapter_id for seq, _ in rows]
    num_tables = len(rows[0][0].blocks.tables)
    return StepInput(
        step_id=step_id,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=[_slots(rows, table) for table in range(num_tables)],
        query_lens=[count for _, count in rows],
        context_lens=[seq.progress.num_scheduled + count for seq, count in rows],
        block_tables=[[list(seq.blocks.tables[table]) for seq, _ in rows] for table in range(num_tables)],
        num_decode_seqs=num_decode_seqs,
        samples=samples,
        relay=[
            RelayProgress(seq.key, _final_blocks(seq, seq.progress.num_scheduled + count))
            for seq, count in rows
            if seq.relays
        ],
        placeholder_step=placeholder_step,
        placeholders=placeholders,
        scored=scored,
        adapters=adapters if any(adapters) else [],
        copies=copies,
    )


def record_rows(step: StepInput, rows: list[Rows]) -> None:
    """Record in the sequences what a step that starts now computes and draws."""
    for seq, count in rows:
        progress = seq.progress
        progress.in_flight += 1
        progress.num_scheduled += count
    for index, spec in enumerate(step.samples):
        progress = rows[spec.seq_index][0].progress
        progress.num_pending += 1
        progress.last_draw = (step.step_id, index)


def _slots(rows: list[Rows], table: int) -> list[int]:
    """Where the KV of each row goes, in the blocks of one table."""
    slots: list[int] = []
    for seq, count in rows:
        start, blocks = seq.progress.num_scheduled, seq.blocks.tables[table]
        if count == 1:
            slots.append(blocks[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE)
        else:
            slots += [blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, start + count)]
    return slots


def draw_of(seq: Sequence, index: int, row: int, position: int, *, num_drafts: int) -> SampleSpec:
    """The draw of the token at `position` from `row`, after `num_drafts` of the drafts."""
    tokens = seq.tokens
    seen, banned, mask = tokens.seen(num_drafts), tokens.banned(num_drafts), tokens.mask_after(num_drafts)
    return SampleSpec(index, row, tokens.draw_params, position, position - tokens.prompt_len, seen, mask, banned)


def _scored_rows(seq: Sequence, index: int, start: int, stop: int, row_of: int) -> list[ScoredRows]:
    """Rows of the prompt among positions [start, stop) whose log-probabilities are still to be computed."""
    tokens = seq.tokens
    first, last = max(start, seq.progress.num_scored), min(stop, tokens.prompt_len - 1)
    if first >= last:
        return []
    return [ScoredRows(index, first + row_of, tokens.ids[first + 1 : last + 1], tokens.sampling.prompt_logprobs or 0)]


def _final_blocks(seq: Sequence, computed: int) -> int:
    """Blocks whose KV no later step of the prompt will touch, once `computed` tokens are done."""
    return len(seq.blocks.tables[0]) if computed == seq.num_tokens else computed // BLOCK_SIZE
