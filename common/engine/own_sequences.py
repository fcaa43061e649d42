"""The part of a step that one data-parallel rank computes: the sequences whose KV it holds. Pure.

A sequence is on the rank that holds its blocks (`common.kv.pool`); the block to which its first row goes says which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

from common.engine.step import StepInput
from common.kv.stripes import Stripe


@dataclass(frozen=True)
class OwnPart:
    """One rank's sequences."""

    step: StepInput
    """The step without the other sequences, with this rank's numbers of blocks and slots, and without samples and scored rows."""
    rows: list[int]
    """The number in the whole step of each row of `step`."""


def own_part(step: StepInput, blocks: Stripe, block_size: int) -> OwnPart:
    """The part of a step for the rank that holds `blocks` of the node's pool."""
    starts = [0, *accumulate(step.query_lens)]
    slots = step.slot_mapping[0]
    seqs = [i for i in range(len(step.query_lens)) if blocks.owns(slots[starts[i]] // block_size)]
    rows = [row for i in seqs for row in range(starts[i], starts[i + 1])]
    place = {row: at for at, row in enumerate(rows)}
    return OwnPart(
        replace(
            step,
            token_ids=[step.token_ids[row] for row in rows],
            positions=[step.positions[row] for row in rows],
            slot_mapping=[
                [blocks.local(table[row] // block_size) * block_size + table[row] % block_size for row in rows]
                for table in step.slot_mapping
            ],
            query_lens=[step.query_lens[i] for i in seqs],
            context_lens=[step.context_lens[i] for i in seqs],
            block_tables=[[[*map(blocks.local, table[i])] for i in seqs] for table in step.block_tables],
            num_decode_seqs=sum(i < step.num_decode_seqs for i in seqs),
            samples=[],
            scored=[],
            placeholders=[(place[row], sample) for row, sample in step.placeholders if row in place],
            adapters=[step.adapters[i] for i in seqs] if step.adapters else [],
        ),
        rows,
    )
