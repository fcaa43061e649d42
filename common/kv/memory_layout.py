"""Where KV lies in memory, in a rank's cache and in a payload alike. Pure, no torch.

A part of a layer group lies in C order as `[layers, planes, num_blocks, heads, block_size, width]`. Planes of a group may
differ in width: then a layer is its planes one after the other, each `[num_blocks, heads, block_size, width]`.
One head of one block of one plane is contiguous (docs/decisions/0004-heads-before-slots.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.kv.rank_layout import GroupPart
from common.kv.spec import DTYPE_BYTES, KVSpec, LayerGroup

_ALIGNMENT = 256
"""A rank's groups begin at multiples of this many bytes."""


@dataclass(frozen=True)
class Strip:
    """Planes at equal distances: all planes of a group if they are equally wide, else a single one."""

    planes_per_layer: int
    head_bytes: int
    """Bytes of one head of one block in one of these planes."""
    bytes_before: int
    """Bytes of one head of one block in the planes of the same layer that come before."""


def strips_of(group: LayerGroup, block_size: int) -> tuple[Strip, ...]:
    """The planes of `group` in as few strips as possible."""
    sizes = [block_size * plane.width * DTYPE_BYTES[group.dtype] for plane in group.planes]
    if len(set(sizes)) == 1:
        return (Strip(len(sizes), sizes[0], 0),)
    return tuple(Strip(1, size, sum(sizes[:i])) for i, size in enumerate(sizes))


@dataclass(frozen=True)
class GroupMemory:
    """The memory of `part` for `num_blocks` blocks, from byte `offset` on."""

    part: GroupPart
    num_blocks: int
    unit_bytes: int
    """Bytes of one block in one layer and one head, over all planes."""
    offset: int = 0

    @property
    def layer_bytes(self) -> int:
        return self.num_blocks * self.part.num_heads * self.unit_bytes

    @property
    def size_bytes(self) -> int:
        return self.part.num_layers * self.layer_bytes

    def place(self, strip: Strip, piece: GroupPart) -> tuple[int, int, int]:
        """(offset, plane_bytes, block_bytes) of `piece`, which is inside this part, in the planes of `strip`.

        Its run in block b and plane p, counted over its layers, begins at `offset + p * plane_bytes + b * block_bytes`
        and is `piece.num_heads * strip.head_bytes` long.
        """
        heads = self.part.num_heads
        first = self.offset + (piece.layer_lo - self.part.layer_lo) * self.layer_bytes
        first += self.num_blocks * heads * strip.bytes_before + (piece.head_lo - self.part.head_lo) * strip.head_bytes
        return first, self.layer_bytes // strip.planes_per_layer, heads * strip.head_bytes


def group_memories(spec: KVSpec, parts: Sequence[GroupPart], num_blocks: int) -> tuple[GroupMemory, ...]:
    """One rank's groups: those of one block table one after the other, those of different tables in the same memory.

    A block belongs to one table at a time, and its place is the same in each: `KVSpec` has seen to that.
    """
    ends = [0] * spec.num_tables
    memories: list[GroupMemory] = []
    for group, part, unit_bytes in zip(spec.groups, parts, spec.unit_bytes, strict=True):
        at = -(-ends[group.table] // _ALIGNMENT) * _ALIGNMENT
        memories.append(GroupMemory(part, num_blocks, unit_bytes, at))
        ends[group.table] = at + memories[-1].size_bytes
    return tuple(memories)


def rank_bytes(memories: Sequence[GroupMemory]) -> int:
    """Bytes of the memory that holds one rank's groups."""
    return max(memory.offset + memory.size_bytes for memory in memories)
