"""How the micro-batches of a pipeline share the running sequences. Pure functions, used by the scheduler.

A sequence joins the lightest one, by sequences and their blocks; when many wait, each takes its part at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from common.engine.sequence import Sequence
from common.kv.rank_layout import blocks_for

_ROW_BLOCKS = 32
"""Blocks of attention that cost about as much as the linear layers of one row. A 0.5B model on one core: 67."""


def weight_of(seq: Sequence) -> int:
    """Cost of a sequence in a step of its micro-batch, in blocks of attention."""
    return _ROW_BLOCKS + blocks_for(seq.num_tokens)


def microbatch_weights(running: Iterable[Sequence], num_microbatches: int) -> list[int]:
    """[num_microbatches], the weight of the sequences of each."""
    weights = [0] * num_microbatches
    for seq in running:
        weights[seq.microbatch] += weight_of(seq)
    return weights


def part_of_waiting(microbatch: int, weights: list[int], waiting: Iterable[Sequence], room: int) -> float:
    """The weight that `microbatch` gets if the sequences that can be admitted now are spread until all are even.

    `weights`: that of each micro-batch. `waiting`: the sequences that find a sequence slot, in order. `room`: blocks for them.
    """
    if len(weights) == 1:
        return inf
    incoming = 0
    for seq in waiting:
        room -= blocks_for(seq.num_tokens) + 1  # each needs a block for its growth
        if incoming and room < 0:
            break
        incoming += weight_of(seq)
    lightest = sorted(weights)
    for count in range(len(weights), 0, -1):
        level = -(-(sum(lightest[:count]) + incoming) // count)
        if level >= lightest[count - 1]:
            return level - weights[microbatch]
    raise AssertionError("the lightest one alone takes everything")
