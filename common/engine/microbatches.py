"""How a pipeline's groups share the running sequences. Pure functions of the scheduler's.

A sequence joins the lightest group, by sequences and their blocks; of many that wait each group takes its part at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from common.engine.sequence import Sequence
from common.kv.layout import blocks_for

_ROW_BLOCKS = 32
"""A row costs about as much in the linear layers as attention over so many blocks (a 0.5B model: 67 on one core)."""


def weight_of(seq: Sequence) -> int:
    """What a sequence costs in a step of its group, in blocks of attention."""
    return _ROW_BLOCKS + blocks_for(seq.num_tokens)


def group_weights(running: Iterable[Sequence], num_groups: int) -> list[int]:
    """[num_groups], the weight of each one's sequences."""
    held = [0] * num_groups
    for seq in running:
        held[seq.group] += weight_of(seq)
    return held


def part_of_waiting(group: int, held: list[int], waiting: Iterable[Sequence], room: int) -> float:
    """The weight that `group` gets if what can be admitted now goes to the lightest groups until they are even.

    `held`: each group's weight. `waiting`: those there are seats for, in order. `room`: blocks for them.
    """
    if len(held) == 1:
        return inf
    incoming = 0
    for seq in waiting:
        room -= blocks_for(seq.num_tokens) + 1  # each keeps a block free for its growth
        if incoming and room < 0:
            break
        incoming += weight_of(seq)
    lightest = sorted(held)
    for count in range(len(held), 0, -1):
        level = -(-(sum(lightest[:count]) + incoming) // count)
        if level >= lightest[count - 1]:
            return level - held[group]
    raise AssertionError("the lightest group alone takes everything")
