"""The part of a step that one rank computes outside attention. Pure, no torch.

A data-parallel rank computes the sequences whose KV it holds (`common.kv.pool`); the block to which a sequence's first row goes
says which rank that is.

Context-parallel ranks share out a prompt chunk's rows in equal, contiguous parts: what embedding, linear layers and experts cost
does not depend on a row's position. Attention to the chunk is shared out by blocks instead (`common.attention.striped`), which
balances causal work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from common.engine.step import StepInput
from common.kv.stripes import Stripe

FEWEST_ROWS = 32
"""Fewest rows of a rank's share. The time of fewer is that of reading the weights, which every rank reads anyway."""


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


def row_bounds(step: StepInput, ranks: int) -> tuple[int, ...]:
    """Rank i computes rows [bounds[i], bounds[i + 1]). Empty: every rank computes all rows."""
    rows = len(step.token_ids)
    if ranks == 1 or step.num_decode_seqs == len(step.query_lens) or rows < FEWEST_ROWS * ranks:
        return ()
    return tuple(rows * i // ranks for i in range(ranks + 1))


def lens_between(query_lens: Sequence[int], lo: int, hi: int) -> list[int]:
    """How many of each sequence's rows are among rows [lo, hi)."""
    ends = accumulate(query_lens)
    return [max(0, min(end, hi) - max(end - count, lo)) for count, end in zip(query_lens, ends, strict=True)]
