"""A rank's place among those of its node. Pure, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RankPlace:
    """One rank of a node of `pp_size` pipeline stages. Each has `cp_size` times `tp_size` tensor-parallel ranks: the
    context-parallel ranks hold the same weights, and different blocks of each sequence.

    With data-parallel attention the tensor-parallel ranks of a stage share out experts and LM head only: each computes all else,
    with whole weights, for the rows of its own sequences.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    is_data_parallel: bool = False

    def __post_init__(self) -> None:
        assert not self.is_data_parallel or self.cp_size == 1, self
        assert 0 <= self.tp_rank < self.tp_size, self
        assert 0 <= self.pp_rank < self.pp_size, self
        assert 0 <= self.cp_rank < self.cp_size, self

    @staticmethod
    def of(rank: int, tp_size: int, pp_size: int, cp_size: int = 1, is_data_parallel: bool = False) -> RankPlace:
        """The place of `rank`, counted as in `common.kv.rank_layout.KVLayout.shards`."""
        replica, tp_rank = divmod(rank, tp_size)
        pp_rank, cp_rank = divmod(replica, cp_size)
        return RankPlace(tp_rank, tp_size, pp_rank, pp_size, cp_rank, cp_size, is_data_parallel)

    @property
    def rank(self) -> int:
        return (self.pp_rank * self.cp_size + self.cp_rank) * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.tp_size * self.cp_size * self.pp_size

    @property
    def alone(self) -> RankPlace:
        """The place of the only rank of this stage."""
        return RankPlace(pp_rank=self.pp_rank, pp_size=self.pp_size)

    @property
    def layer_tp_size(self) -> int:
        """Ranks that share out a layer's attention."""
        return 1 if self.is_data_parallel else self.tp_size

    @property
    def computes_logits(self) -> bool:
        """Whether this rank takes part in the LM head."""
        return self.is_last_stage and self.cp_rank == 0

    @property
    def samples(self) -> bool:
        """Whether this rank samples the tokens."""
        return self.computes_logits and self.tp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def tp_peers(self) -> list[int]:
        """Ranks of this stage with the same `cp_rank`, in `tp_rank` order."""
        return [replace(self, tp_rank=tp).rank for tp in range(self.tp_size)]

    @property
    def cp_peers(self) -> list[int]:
        """Ranks of this stage with the same `tp_rank`, in `cp_rank` order."""
        return [replace(self, cp_rank=cp).rank for cp in range(self.cp_size)]

    @property
    def pp_peers(self) -> list[int]:
        """Ranks of all stages in this rank's place, in `pp_rank` order."""
        return [replace(self, pp_rank=pp).rank for pp in range(self.pp_size)]

    def __str__(self) -> str:
        cp = f"cp {self.cp_rank} of {self.cp_size}, " if self.cp_size > 1 else ""
        kind = "dp" if self.is_data_parallel else "tp"
        return f"rank {self.rank} ({kind} {self.tp_rank} of {self.tp_size}, {cp}pp {self.pp_rank} of {self.pp_size})"
