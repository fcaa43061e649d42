"""Plans which rank sends which KV to which rank, for any pair of layouts of one spec. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.kv.rank_layout import GroupPart, KVLayout, RankShard


@dataclass(frozen=True)
class Piece:
    """The part of one layer group that `src_rank` sends to `dst_rank`."""

    src_rank: int
    dst_rank: int
    part: GroupPart


def reshard(src: KVLayout, dst: KVLayout) -> list[Piece]:
    """The pieces that give every destination rank its shard, each byte once.

    At most one piece for each pair of ranks and group. Where the source replicates a group, because it has fewer heads
    than ranks or none, its replicas take turns in serving the destination ranks that want the same heads.
    """
    shards = src.shards()
    turns: Counter[tuple[int, int, int]] = Counter()
    pieces: list[Piece] = []
    for dst_rank, shard in enumerate(dst.shards()):
        for wanted in shard.parts:
            for stage in range(src.pp_size):
                turn = wanted.group, stage, wanted.head_lo
                sources = _sources(src, shards, wanted, stage, turns[turn])
                pieces += [Piece(src_rank, dst_rank, part) for src_rank, part in sources]
                turns[turn] += bool(sources)
    return pieces


def _sources(
    src: KVLayout, shards: list[RankShard], wanted: GroupPart, stage: int, turn: int
) -> list[tuple[int, GroupPart]]:
    """The source ranks of a stage that together have what the stage has of `wanted`, and which part each one sends."""
    replicas = max(1, src.tp_size // src.spec.groups[wanted.group].num_heads)
    ranks = range(stage * src.tp_size + turn % replicas, (stage + 1) * src.tp_size, replicas)
    parts = ((rank, wanted.overlap(shards[rank].parts[wanted.group])) for rank in ranks)
    return [(rank, part) for rank, part in parts if part is not None]
