"""The ranks of a node as model code sees them: collective operations, and this rank's place.

`common.parallel.connect` builds a `Mesh` of several ranks; a single rank uses `SOLO`, which costs nothing.
All calls belong to the rank's engine thread. Every rank makes the same collective calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from common.parallel.gloo import PipelineLink
from common.parallel.place import RankPlace
from common.parallel.rendezvous import Rendezvous
from common.parallel.stage_tensors import StageSchema


class RankGroup(Protocol):
    """The tensor-parallel or the context-parallel ranks of one pipeline stage; methods as in `Mesh`."""

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def gather_columns(self, x: Tensor) -> Tensor | None: ...

    def broadcast(self, x: Tensor) -> None: ...

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor: ...

    def gather_all(self, x: Tensor) -> Tensor:
        """[ranks, *x.shape]: the `x` of all ranks of the group."""
        ...

    def close(self) -> None: ...


class Mesh:
    """Operations that the ranks of a node do together, in a group for each way in which this rank's stage is split and over a
    link to the neighbouring stages. Without a group or a link this rank is the only one of its kind.

    After any `RankLost` the mesh is unusable: close it and end the process.
    """

    def __init__(
        self,
        place: RankPlace,
        rendezvous: Rendezvous | None = None,
        group: RankGroup | None = None,
        stripes: RankGroup | None = None,
        pipeline: PipelineLink | None = None,
    ) -> None:
        """`group`: the tensor-parallel ranks; `stripes`: the context-parallel ones."""
        self.place = place
        self.group = group
        self._stripes = stripes
        self._pipeline = pipeline
        self._rendezvous = rendezvous

    def agree(self, what: str, value: str, timeout_s: float | None = None) -> None:
        """Make sure that all ranks of the node call this with the same `value`; `what` is unique per call.

        Waits for the slowest rank up to `timeout_s`, by default as long as for any exchange.
        Raises: ConfigError naming two ranks that differ and their values; RankLost.
        """
        if self._rendezvous is not None:
            self._rendezvous.agree(what, value, timeout_s)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the tensor-parallel ranks of this stage, in place; bit-identical on all of them. Returns `x`.

        x: contiguous, same shape and dtype on all ranks. Raises: RankLost.
        """
        return x if self.group is None else self.group.all_reduce(x)

    def gather_columns(self, x: Tensor) -> Tensor | None:
        """The [rows, columns] of all tensor-parallel ranks of this stage side by side, on `tp_rank` 0; None on the others.

        x: contiguous, same shape and dtype on all ranks. Returns [rows, tp_size * columns]. Raises: RankLost.
        """
        return x if self.group is None else self.group.gather_columns(x)

    def broadcast(self, x: Tensor) -> None:
        """Fill `x` on all ranks of this stage with that of its `tp_rank` 0. x: [bytes] uint8. Raises: RankLost."""
        if self.group is not None:
            self.group.broadcast(x)

    def all_to_all(self, sent: Tensor, sizes: Sequence[Sequence[int]]) -> Tensor:
        """Exchange bytes among the ranks of this stage: `sizes[a][b]` from rank a to rank b, the same on all of them.

        sent: [sum of this rank's row of sizes] uint8, for rank 0 first. Returns [sum of its column] uint8, from rank 0 first.
        Raises: RankLost.
        """
        return sent if self.group is None else self.group.all_to_all(sent, sizes)

    def gather_stripes(self, x: Tensor) -> Tensor:
        """[cp_size, *x.shape]: the `x` of all context-parallel ranks, in their order, on each of them.

        x: contiguous, same shape and dtype on all ranks. Raises: RankLost.
        """
        return x[None] if self._stripes is None else self._stripes.gather_all(x)

    def gather_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """[bounds[-1], ...]: the rows of all context-parallel ranks, on each of them; rank i's `x` is rows [bounds[i], bounds[i + 1]).

        The other sizes and the dtype are the same on all ranks. Raises: RankLost.
        """
        if self._stripes is None:
            return x
        counts = [hi - lo for lo, hi in pairwise(bounds)]
        padded = x.new_zeros(max(counts), *x.shape[1:])
        padded[: len(x)] = x
        parts = self._stripes.gather_all(padded)
        if len(set(counts)) == 1:
            return parts.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def exchange_rows(self, x: Tensor, bounds: Sequence[int]) -> Tensor:
        """[cp_size, own rows, ...]: this rank's rows, [bounds[i], bounds[i + 1]) for `cp_rank` i, of every context-parallel rank's `x`.

        x: [bounds[-1], ...], of the same shape and dtype on all ranks. Raises: RankLost.
        """
        if self._stripes is None:
            return x[None]
        counts = [hi - lo for lo, hi in pairwise(bounds)]
        sizes = [count * x[0].nbytes for count in counts]
        got = self._stripes.all_to_all(x.contiguous().flatten().view(torch.uint8), [sizes] * len(sizes))
        return got.view(x.dtype).view(len(counts), counts[self.place.cp_rank], *x.shape[1:])

    def send_stage(self, tensors: Mapping[str, Tensor], schema: StageSchema) -> None:
        """Hand `tensors` to the next stage's rank of the same `tp_rank` and `cp_rank`, in one message.

        Returns before they have arrived, so they must not change afterwards. Waits for the oldest send if as many sends
        as there are stages are in flight. Raises: RankLost.
        """
        assert self._pipeline is not None, "no next stage"
        self._pipeline.send(tensors, schema)

    def recv_stage(self, rows: int, schema: StageSchema) -> dict[str, Tensor]:
        """The oldest tensors sent by the previous stage and not received yet, by name. Raises: RankLost."""
        assert self._pipeline is not None, "no previous stage"
        return self._pipeline.recv(rows, schema)

    def close(self) -> None:
        """Release sockets, threads and shared memory. Peers that still wait for this rank get RankLost."""
        for part in (self.group, self._stripes, self._pipeline, self._rendezvous):
            if part is not None:
                part.close()
        self.group = self._stripes = self._pipeline = None


SOLO = Mesh(RankPlace())
