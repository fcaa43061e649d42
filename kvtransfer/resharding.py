"""Plans which rank sends which KV to which rank, for any pair of layouts of one spec. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.kv.rank_layout import GroupPart, KVLayout, RankShard
from common.kv.stripes import WHOLE, Stripe


@dataclass(frozen=True)
class Piece:
    """The part of one layer group that `src_rank` sends to `dst_rank`, in the blocks that both hold."""

    src_rank: int
    dst_rank: int
    part: GroupPart
    stripe: Stripe = WHOLE


def reshard(src: KVLayout, dst: KVLayout, src_home: int = 0, dst_home: int = 0) -> list[Piece]:
    """The pieces that give every destination rank its part of a sequence, each byte once; what a stage hands on, only to its first
    rank. `src_home`, `dst_home`: the data-parallel ranks that hold the sequence.

    At most one piece for each pair of ranks and group. Where the source replicates a group, because it has fewer heads
    than ranks or none, its replicas take turns in serving the destination ranks that want the same heads.
    """
    shards = src.shards()
    turns: Counter[tuple[int, int, int]] = Counter()
    pieces: list[Piece] = []
    for dst_rank, shard in enumerate(dst.shards()):
        wanted_positions = dst.positions(shard, dst_home)
        if wanted_positions is None:
            continue
        for wanted in dst.relayed_parts(src, shard):
            for replica in range(src.pp_size * src.num_replicas):
                held = src.positions(shards[replica * src.tp_size], src_home)
                stripe = held and held.overlap(wanted_positions)
                if stripe is None:
                    continue
                turn = wanted.group, replica, wanted.head_lo
                sources = _sources(src, shards, wanted, replica, turns[turn])
                pieces += [Piece(src_rank, dst_rank, part, stripe) for src_rank, part in sources]
                turns[turn] += bool(sources)
    return pieces


def _sources(
    src: KVLayout, shards: list[RankShard], wanted: GroupPart, replica: int, turn: int
) -> list[tuple[int, GroupPart]]:
    """The tensor-parallel ranks of one stage and stripe that together hold this stage's part of `wanted`, and which part each one
    sends. `replica`: pp_rank * num_replicas + its number in the stage."""
    copies = max(1, src.tp_size // src.spec.groups[wanted.group].num_heads)
    ranks = range(replica * src.tp_size + turn % copies, (replica + 1) * src.tp_size, copies)
    parts = ((rank, wanted.overlap(shards[rank].parts[wanted.group])) for rank in ranks)
    return [(rank, part) for rank, part in parts if part is not None]
