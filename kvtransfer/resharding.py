"""Which rank sends what to whom, for any pair of layouts. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from common.kv.layout import KVLayout, RankShard


@dataclass(frozen=True)
class Piece:
    """The layers and KV heads (global half-open ranges) that `src_rank` sends to `dst_rank`."""

    src_rank: int
    dst_rank: int
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int


def plan(src: KVLayout, dst: KVLayout) -> list[Piece]:
    """The pieces that give every destination rank its shard, each byte once.

    Where source heads are replicated, the replicas share the work: destination rank d is served by
    the replica d modulo their number.
    """
    pieces: list[Piece] = []
    for dst_rank, want in enumerate(dst.shards()):
        for stage in range(src.pp_size):
            layer_lo = max(want.layer_lo, src.shard(0, stage).layer_lo)
            layer_hi = min(want.layer_hi, src.shard(0, stage).layer_hi)
            if layer_lo >= layer_hi:
                continue
            for head_lo, head_hi, tp_rank in _head_sources(src, want, dst_rank):
                pieces.append(Piece(stage * src.tp_size + tp_rank, dst_rank, layer_lo, layer_hi, head_lo, head_hi))
    return pieces


def _head_sources(src: KVLayout, want: RankShard, dst_rank: int) -> list[tuple[int, int, int]]:
    """(head_lo, head_hi, src tp_rank) covering the wanted heads."""
    replicas = max(1, src.tp_size // src.num_kv_heads)
    sources: list[tuple[int, int, int]] = []
    for tp_rank in range(dst_rank % replicas, src.tp_size, replicas):
        have = src.shard(tp_rank, 0)
        head_lo, head_hi = max(want.head_lo, have.head_lo), min(want.head_hi, have.head_hi)
        if head_lo < head_hi:
            sources.append((head_lo, head_hi, tp_rank))
    return sources
