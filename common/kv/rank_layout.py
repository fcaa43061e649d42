"""How a node cuts its KV cache over its ranks, and which nodes can relay to each other. Pure, no torch.

Layers are split over pipeline stages, KV heads over tensor-parallel ranks, the blocks of a sequence over context-parallel
ranks (`common.kv.stripes`), whole sequences over data-parallel ranks. `KVLayout` describes a whole node, `RankShard` one of its ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from common.base.errors import ConfigError, HandshakeRefused
from common.base.hashing import BLOCK_SIZE
from common.base.message_types import Since
from common.kv.spec import KVSpec
from common.kv.stripes import MAX_CP_SIZE, WHOLE, Stripe

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_TP_SIZE = 256
MAX_DP_SIZE = 64


@dataclass(frozen=True)
class GroupPart:
    """A half-open range of layers and one of KV heads in one layer group.

    Layers are counted within the group: 0 is the first layer in `LayerGroup.layers`.
    """

    group: int
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int

    @property
    def num_layers(self) -> int:
        return self.layer_hi - self.layer_lo

    @property
    def num_heads(self) -> int:
        return self.head_hi - self.head_lo

    def contains(self, other: GroupPart) -> bool:
        """Whether `other` is not empty and all of it is in here."""
        return (
            self.group == other.group
            and self.layer_lo <= other.layer_lo < other.layer_hi <= self.layer_hi
            and self.head_lo <= other.head_lo < other.head_hi <= self.head_hi
        )

    def overlap(self, other: GroupPart) -> GroupPart | None:
        """The intersection with `other`, of the same group; None if it is empty."""
        layer_lo, layer_hi = max(self.layer_lo, other.layer_lo), min(self.layer_hi, other.layer_hi)
        head_lo, head_hi = max(self.head_lo, other.head_lo), min(self.head_hi, other.head_hi)
        if layer_lo >= layer_hi or head_lo >= head_hi:
            return None
        return GroupPart(self.group, layer_lo, layer_hi, head_lo, head_hi)


@dataclass(frozen=True)
class RankShard:
    """One rank's part: layers [layer_lo, layer_hi) of the model, its part of every group, and its stripe of blocks."""

    tp_rank: int
    pp_rank: int
    layer_lo: int
    layer_hi: int
    parts: tuple[GroupPart, ...]
    """One for each group of the spec, without layers where the rank's stage has none of that group."""
    stripe: Stripe = WHOLE
    """Blocks of the node's pool that the rank holds; with context parallelism these positions of each sequence too."""

    @property
    def num_layers(self) -> int:
        return self.layer_hi - self.layer_lo


@dataclass(frozen=True)
class KVLayout:
    """A node's KV cache, and how its ranks share it.

    Invariant: `pp_layers` sums to `spec.num_layers`; for every group either `tp_size` divides its `num_heads` or the
    reverse (then each head is replicated on `tp_size / num_heads` neighbouring ranks).
    """

    fingerprint: str
    """Identity of the model's weights and of the shape of its KV; nodes that differ refuse each other."""
    spec: KVSpec
    tp_size: int = 1
    pp_layers: tuple[int, ...] = ()
    """Layers per pipeline stage; empty means one stage."""
    cp_size: Annotated[int, Since(17, needed=True)] = 1
    """Context-parallel ranks, which share the blocks of each sequence."""
    hands_on: Annotated[bool, Since(17)] = False
    """Whether the node sends planes that all ranks of a stage hold whole to the first one only, and as a receiver hands them on
    to the others. Nodes of protocol 16 do not."""
    dp_size: Annotated[int, Since(17, needed=True)] = 1
    """Data-parallel ranks of each stage: each holds the whole KV of its own sequences."""

    def __post_init__(self) -> None:
        if not 1 <= self.dp_size <= MAX_DP_SIZE or (self.dp_size > 1 and self.tp_size * self.cp_size > 1):
            raise ConfigError(
                f"data-parallel size {self.dp_size} is not from 1 to {MAX_DP_SIZE}, or beside tensor-parallel size "
                f"{self.tp_size} and context-parallel size {self.cp_size}"
            )
        if not 1 <= self.cp_size <= MAX_CP_SIZE:
            raise ConfigError(f"context-parallel size {self.cp_size} is not from 1 to {MAX_CP_SIZE}")
        if self.tp_size > MAX_TP_SIZE:
            raise ConfigError(f"tensor-parallel size {self.tp_size} is above {MAX_TP_SIZE}")
        num_layers = self.spec.num_layers
        if not self.pp_layers:
            object.__setattr__(self, "pp_layers", (num_layers,))
        if sum(self.pp_layers) != num_layers or min(self.pp_layers) < 1:
            raise ConfigError(
                f"pipeline split {list(self.pp_layers)} does not cover {num_layers} layers, at least one per stage"
            )
        for group in self.spec.groups:
            if not heads_fit(group.num_heads, self.tp_size):
                fitting = [
                    n for n in range(1, min(2 * group.num_heads, MAX_TP_SIZE) + 1) if heads_fit(group.num_heads, n)
                ]
                raise ConfigError(
                    f"tensor-parallel size {self.tp_size} does not fit {group.num_heads} KV heads; "
                    f"sizes that would: {fitting}"
                )

    @property
    def pp_size(self) -> int:
        return len(self.pp_layers)

    @property
    def num_replicas(self) -> int:
        """How often a stage has all weights of attention. A replica is `tp_size` ranks, which hold blocks of the node's pool that no
        other replica holds."""
        return self.cp_size * self.dp_size

    @property
    def world_size(self) -> int:
        return self.tp_size * self.num_replicas * self.pp_size

    def described_ranks(self) -> dict[str, int | list[int]]:
        """Sizes in each dimension, and the layers of each stage, for operators."""
        return {
            "tensor_parallel": self.tp_size,
            "pipeline_parallel": self.pp_size,
            "context_parallel": self.cp_size,
            "data_parallel": self.dp_size,
            "layers_per_stage": list(self.pp_layers),
        }

    def pool_blocks(self, rank_blocks: int) -> int:
        """Blocks of a node each of whose ranks has memory for `rank_blocks`."""
        return self.num_replicas * rank_blocks

    def longest_sequence(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that fits alone into a pool of `num_blocks`."""
        return num_blocks // self.num_replicas // self.spec.num_tables * self.cp_size * self.spec.block_size

    def home_of(self, tables: Sequence[Sequence[int]] | NDArray[np.int64]) -> int:
        """The data-parallel rank that holds a sequence with these block tables. The last entry of a table always names a block
        of the sequence."""
        return int(tables[0][-1]) % self.dp_size if self.dp_size > 1 and len(tables[0]) else 0

    def positions(self, shard: RankShard, home: int | None) -> Stripe | None:
        """Positions of a sequence's blocks that a rank holds; None if it holds none. `home`: the sequence's data-parallel rank; None
        asks for a sequence that the rank holds."""
        if self.dp_size == 1:
            return shard.stripe
        return WHOLE if home is None or home == shard.stripe.first else None

    @property
    def kv_kind(self) -> str:
        """Equal for two layouts exactly where `check_compatible` accepts them."""
        return f"{self.fingerprint}/{self.spec}"

    def shard(self, tp_rank: int, pp_rank: int, replica: int = 0) -> RankShard:
        """The shard of one rank. `replica`: its context-parallel or data-parallel rank."""
        layer_lo = sum(self.pp_layers[:pp_rank])
        layer_hi = layer_lo + self.pp_layers[pp_rank]
        parts = tuple(
            GroupPart(
                number,
                bisect_left(group.layers, layer_lo),
                bisect_left(group.layers, layer_hi),
                *head_range(group.num_heads, self.tp_size, tp_rank),
            )
            for number, group in enumerate(self.spec.groups)
        )
        return RankShard(tp_rank, pp_rank, layer_lo, layer_hi, parts, Stripe(replica, self.num_replicas))

    def rank_shard(self, rank: int) -> RankShard:
        """The shard of `rank = (pp_rank * num_replicas + replica) * tp_size + tp_rank`."""
        rest, tp_rank = divmod(rank, self.tp_size)
        pp_rank, replica = divmod(rest, self.num_replicas)
        return self.shard(tp_rank, pp_rank, replica)

    def handed_on(self, src: KVLayout) -> tuple[int, ...]:
        """Numbers of the groups that a node with the layout `src` sends to the first rank of each stage only."""
        if not (self.hands_on and src.hands_on and self.tp_size > 1):
            return ()
        return tuple(number for number, group in enumerate(self.spec.groups) if group.num_heads == 1)

    def relayed_parts(self, src: KVLayout, shard: RankShard) -> tuple[GroupPart, ...]:
        """The parts of a rank that come from a node with the layout `src`; empty ones for groups that are handed on to it."""
        handed_on = self.handed_on(src) if shard.tp_rank else ()
        return tuple(replace(part, layer_hi=part.layer_lo) if part.group in handed_on else part for part in shard.parts)

    def shards(self) -> list[RankShard]:
        """All ranks' shards, in rank order."""
        return [self.rank_shard(rank) for rank in range(self.world_size)]

    def group_layers(self, shard: RankShard) -> list[list[int]]:
        """For each group, those of its layers that are in `shard`, counted from the shard's first layer."""
        groups = zip(self.spec.groups, shard.parts, strict=True)
        return [
            [number - shard.layer_lo for number in group.layers[part.layer_lo : part.layer_hi]]
            for group, part in groups
        ]

    def shard_bytes_per_block(self, shard: RankShard) -> int:
        """Bytes of one block on the rank that holds `shard`. It belongs to one block table, whichever needs it."""
        of_table = [0] * self.spec.num_tables
        for group, unit, part in zip(self.spec.groups, self.spec.unit_bytes, shard.parts, strict=True):
            of_table[group.table] += unit * part.num_layers * part.num_heads
        return max(of_table)

    def layer_bytes_per_block(self, shard: RankShard) -> int:
        """Bytes of one block in one layer on the rank that holds `shard`, in the group where it is largest."""
        units = zip(self.spec.unit_bytes, shard.parts, strict=True)
        return max(unit * part.num_heads for unit, part in units)


def head_range(num_heads: int, tp_size: int, tp_rank: int) -> tuple[int, int]:
    """The heads [lo, hi) of rank `tp_rank`; neighbouring ranks hold the same head where there are more ranks than heads."""
    lo = tp_rank * num_heads // tp_size
    return lo, lo + max(1, num_heads // tp_size)


def heads_fit(num_heads: int, tp_size: int) -> bool:
    """Whether `tp_size` ranks can share `num_heads` heads evenly, or replicate them evenly."""
    return tp_size >= 1 and (num_heads % tp_size == 0 or tp_size % num_heads == 0)


def blocks_for(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that `num_tokens` need."""
    return -(-num_tokens // block_size)


def check_compatible(src: KVLayout, dst: KVLayout) -> None:
    """Refuse a pair of nodes whose KV is incompatible; the parallel split may differ freely.

    Raises: HandshakeRefused naming the first difference and both values.
    """
    if (found := first_difference(src, dst)) is not None:
        name, ours, theirs = found
        raise HandshakeRefused(f"{name} differs: prefill node has {ours!r}, decode node has {theirs!r}")


def first_difference(one: KVLayout, other: KVLayout) -> tuple[str, object, object] | None:
    """Name and both values of the first fact in which the KV of two nodes differs; None if their KV is interchangeable."""
    if one.fingerprint == other.fingerprint and one.spec == other.spec:
        return None
    facts = zip(_facts(one), _facts(other), strict=False)
    return next(((name, ours, theirs) for (name, ours), (_, theirs) in facts if ours != theirs), None)


def _facts(layout: KVLayout) -> list[tuple[str, object]]:
    """Values that must be equal, by name, in the order in which differences are reported."""
    spec = layout.spec
    facts: list[tuple[str, object]] = [("fingerprint", layout.fingerprint), ("block_size", spec.block_size)]
    facts += [("dtype", spec.dtype), ("num_layers", spec.num_layers), ("number of layer groups", len(spec.groups))]
    for number, group in enumerate(spec.groups):
        of = f" of layer group {number}" if len(spec.groups) > 1 else ""
        planes = [(plane.name, plane.width) for plane in group.planes]
        facts += [(f"number of KV heads{of}", group.num_heads), (f"planes{of}", planes)]
        facts += [(f"dtype{of}", group.dtype), (f"layers{of}", list(group.layers))]
        facts += [(f"sliding window{of}", group.window), (f"block table{of}", group.table)]
    return facts
