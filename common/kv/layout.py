"""Who holds which part of the KV cache: the vocabulary of relays and of resharding. Pure, no torch.

A node's KV is split by layers over its pipeline stages and by KV heads over its tensor-parallel
ranks. `KVLayout` describes a whole node, `RankShard` what one rank of it holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.base.errors import ConfigError, HandshakeRefused
from common.base.hashing import BLOCK_SIZE

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1}


@dataclass(frozen=True)
class RankShard:
    """The half-open ranges of layers and KV heads that one rank holds."""

    tp_rank: int
    pp_rank: int
    layer_lo: int
    layer_hi: int
    head_lo: int
    head_hi: int


@dataclass(frozen=True)
class KVLayout:
    """How one node spreads its KV cache over its ranks.

    Invariant: `pp_layers` sums to `num_layers`; either `tp_size` divides `num_kv_heads` or the reverse
    (then each head is replicated on `tp_size / num_kv_heads` neighbouring ranks).
    """

    fingerprint: str
    """Identity of the model's weights and of the shape of its KV; nodes that differ refuse each other."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = BLOCK_SIZE
    tp_size: int = 1
    pp_layers: tuple[int, ...] = ()
    """Layers per pipeline stage; empty means one stage."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"unknown KV dtype {self.dtype!r}; known: {', '.join(DTYPE_BYTES)}")
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.block_size, self.tp_size) < 1:
            raise ConfigError(f"a KV layout has no size below 1: {self}")
        if not self.pp_layers:
            object.__setattr__(self, "pp_layers", (self.num_layers,))
        if sum(self.pp_layers) != self.num_layers or min(self.pp_layers) < 1:
            raise ConfigError(
                f"pipeline split {list(self.pp_layers)} does not cover {self.num_layers} layers, at least one per stage"
            )
        if self.num_kv_heads % self.tp_size and self.tp_size % self.num_kv_heads:
            fitting = [
                n for n in range(1, 2 * self.num_kv_heads + 1) if not (self.num_kv_heads % n and n % self.num_kv_heads)
            ]
            raise ConfigError(
                f"tensor-parallel size {self.tp_size} does not fit {self.num_kv_heads} KV heads; sizes that would: {fitting}"
            )

    @property
    def pp_size(self) -> int:
        return len(self.pp_layers)

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def slice_bytes_per_block(self) -> int:
        """Bytes of K and V of one block, one layer, one head."""
        return 2 * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers and heads, replicas not counted."""
        return self.slice_bytes_per_block * self.num_layers * self.num_kv_heads

    def shard(self, tp_rank: int, pp_rank: int) -> RankShard:
        layer_lo = sum(self.pp_layers[:pp_rank])
        heads = max(1, self.num_kv_heads // self.tp_size)
        head_lo = tp_rank * self.num_kv_heads // self.tp_size
        return RankShard(tp_rank, pp_rank, layer_lo, layer_lo + self.pp_layers[pp_rank], head_lo, head_lo + heads)

    def shards(self) -> list[RankShard]:
        """All ranks' shards, in rank order: `rank = pp_rank * tp_size + tp_rank`."""
        return [self.shard(tp, pp) for pp in range(self.pp_size) for tp in range(self.tp_size)]


def blocks_for(num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that `num_tokens` need."""
    return -(-num_tokens // block_size)


def check_compatible(src: KVLayout, dst: KVLayout) -> None:
    """Refuse a pair of nodes whose KV means different things; the parallel split may differ freely.

    Raises: HandshakeRefused naming the first difference and both values.
    """
    for name in ("fingerprint", "block_size", "dtype", "num_layers", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(src, name), getattr(dst, name)
        if ours != theirs:
            raise HandshakeRefused(f"{name} differs: prefill node has {ours!r}, decode node has {theirs!r}")
