"""The ranks of a node as model code sees them: this rank's place, and collective operations. No torch at import time.

`common.parallel.connect` builds a `Mesh` of several ranks; a single rank uses `SOLO`, which costs nothing.
All calls belong to the rank's engine thread. Every rank makes the same collective calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from common.parallel.stage_tensors import StageSchema


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


class Mesh(Protocol):
    """Operations that the ranks of a node do together.

    After any `RankLost` the mesh is unusable: close it and end the process.
    """

    @property
    def place(self) -> RankPlace: ...

    def agree(self, what: str, value: str, timeout_s: float | None = None) -> None:
        """Make sure that all ranks of the node call this with the same `value`; `what` is unique per call.

        Waits for the slowest rank up to `timeout_s`, by default as long as for any exchange.
        Raises: ConfigError naming two ranks that differ and their values; RankLost.
        """
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the tensor-parallel ranks of this stage, in place; bit-identical on all of them. Returns `x`.

        x: contiguous, same shape and dtype on all ranks. Raises: RankLost.
        """
        ...

    def gather_columns(self, x: Tensor) -> Tensor | None:
        """The [rows, columns] of all tensor-parallel ranks of this stage side by side, on `tp_rank` 0; None on the others.

        x: contiguous, same shape and dtype on all ranks. Returns [rows, tp_size * columns]. Raises: RankLost.
        """
        ...

    def broadcast(self, x: Tensor) -> None:
        """Fill `x` on all ranks of this stage with that of its `tp_rank` 0. x: [bytes] uint8. Raises: RankLost."""
        ...

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        """Exchange bytes among the ranks of this stage: `sizes[a][b]` from rank a to rank b, the same on all of them.

        sent: [sum of this rank's row of sizes] uint8, for rank 0 first. Returns [sum of its column] uint8, from rank 0 first.
        Raises: RankLost.
        """
        ...

    def gather_stripes(self, x: Tensor) -> Tensor:
        """[cp_size, *x.shape]: the `x` of all context-parallel ranks, in their order, on each of them.

        x: contiguous, same shape and dtype on all ranks. Raises: RankLost.
        """
        ...

    def gather_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """[bounds[-1], ...]: the rows of all context-parallel ranks, on each of them; rank i's `x` is rows [bounds[i], bounds[i + 1]).

        The other sizes and the dtype are the same on all ranks. Raises: RankLost.
        """
        ...

    def exchange_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """[cp_size, own rows, ...]: this rank's rows, [bounds[i], bounds[i + 1]) for `cp_rank` i, of every context-parallel rank's `x`.

        x: [bounds[-1], ...], of the same shape and dtype on all ranks. Raises: RankLost.
        """
        ...

    def send_stage(self, tensors: Mapping[str, Tensor], schema: StageSchema) -> None:
        """Hand `tensors` to the next stage's rank of the same `tp_rank` and `cp_rank`, in one message.

        Returns before they have arrived, so they must not change afterwards. Waits for the oldest send if as many sends
        as there are stages are in flight. Raises: RankLost.
        """
        ...

    def recv_stage(self, rows: int, schema: StageSchema) -> dict[str, Tensor]:
        """The oldest tensors sent by the previous stage and not received yet, by name. Raises: RankLost."""
        ...

    def close(self) -> None:
        """Release sockets, threads and shared memory. Peers that still wait for this rank get RankLost."""
        ...


class SoloMesh:
    """`Mesh` of a single rank, which exchanges nothing."""

    def __init__(self, place: RankPlace = RankPlace()) -> None:
        self.place = place

    def agree(self, what: str, value: str, timeout_s: float | None = None) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor) -> None:
        pass

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        return sent

    def gather_stripes(self, x: Tensor) -> Tensor:
        return x[None]

    def gather_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        return x

    def exchange_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        return x[None]

    def send_stage(self, tensors: Mapping[str, Tensor], schema: StageSchema) -> None:
        raise AssertionError("a single rank has no next stage")

    def recv_stage(self, rows: int, schema: StageSchema) -> dict[str, Tensor]:
        raise AssertionError("a single rank has no previous stage")

    def close(self) -> None:
        pass


SOLO = SoloMesh()
