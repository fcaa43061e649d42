"""From the scheduler's choice of rows to the `StepInput` that ranks get. Pure."""

from __future__ import annotations

from common.base.hashing import BLOCK_SIZE
from common.engine.sequence import Sequence
from common.engine.step import RelayProgress, SampleSpec, StepInput

Row = tuple[Sequence, int]
"""A sequence of a step, and how many rows it has there."""


def step_input(step_id: int, rows: list[Row]) -> StepInput:
    """The next rows of each sequence, from `num_scheduled` on. All tokens that are pending are drawn by one step."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[SampleSpec] = []
    carried_from = 0
    carried: list[tuple[int, int]] = []
    for index, (seq, count) in enumerate(rows):
        start, stop = seq.num_scheduled, seq.num_scheduled + count
        token_ids += seq.token_ids[start:stop]
        if stop > len(seq.token_ids):
            source, sample = seq.last_draw
            assert carried_from in (0, source), f"tokens of steps {carried_from} and {source} are pending"
            carried_from = source
            carried.append((len(token_ids), sample))
            token_ids.append(0)
        positions += range(start, stop)
        slots += [seq.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, stop)]
        if stop == seq.num_expected:
            generated = seq.num_generated + seq.num_pending
            samples.append(SampleSpec(index, seq.sampling, stop, generated, seq.seen_tokens()))
    return StepInput(
        step_id=step_id,
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_lens=[count for _, count in rows],
        context_lens=[seq.num_scheduled + count for seq, count in rows],
        block_tables=[list(seq.blocks) for seq, _ in rows],
        samples=samples,
        relay=[
            RelayProgress(seq.key, _final_blocks(seq, seq.num_scheduled + count)) for seq, count in rows if seq.relays
        ],
        carried_from=carried_from,
        carried=carried,
    )


def _final_blocks(seq: Sequence, computed: int) -> int:
    """Blocks whose KV no later step of the prompt will touch, once `computed` tokens are done."""
    return len(seq.blocks) if computed == seq.num_tokens else computed // BLOCK_SIZE
