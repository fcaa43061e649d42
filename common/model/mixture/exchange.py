"""Experts that are spread over the ranks of a stage, behind one interface: each row gets the sum of all its experts' outputs.

With tensor-parallel ranks all ranks have all rows: each computes its own experts for them, and one all-reduce joins the results.
With data-parallel attention each rank has rows of its own: it sends each to the ranks that hold its experts, one time to each of
them, and adds up what comes back. A rank without rows in a step serves the others.
They run on a rank's engine thread, under inference mode.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from common.model.build import Build
from common.model.description import RouterDescription
from common.model.mixture.experts import Experts
from common.model.mixture.placement import Placement
from common.model.mixture.routing import Routing
from common.parallel.mesh import Mesh


class AllReduced:
    """The experts of one layer on tensor-parallel ranks. Every rank routes all rows, and comes to the same result, because hidden
    states are equal on all ranks."""

    def __init__(self, experts: Experts, mesh: Mesh) -> None:
        self._experts, self._mesh = experts, mesh
        self.slots = experts.slots

    def forward(self, x: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """x: [T, hidden]. shared: [T, hidden], this rank's output of the shared experts. Returns a fresh [T, hidden] of x's dtype:
        the weighted sum of each row's experts, and `shared` of all ranks that share those experts. Raises: RankLost."""
        y = self._experts.forward(x, routing)
        if shared is not None:
            y += shared
        return self._mesh.all_reduce(y.to(x.dtype))


class Dispatched:
    """The experts of one layer on data-parallel ranks, each with its own rows. All ranks make the same calls together."""

    def __init__(self, experts: Experts, build: Build, router: RouterDescription) -> None:
        """`experts`: this rank's, which take slots in place of experts."""
        self.slots = experts.slots
        self._experts, self._mesh, self._precision = experts, build.mesh, build.precision
        self._rank, self._num_ranks = build.mesh.place.tp_rank, build.mesh.place.tp_size
        self._hidden, self._top_k, self._device = build.config.hidden_size, router.top_k, build.device
        placement = Placement.initial(router.num_experts, self._num_ranks, build.redundant_experts or 0)
        ends = [placement.range_of(rank).stop for rank in range(self._num_ranks)]
        self._ends = torch.tensor(ends, device=build.device)
        """The end of each rank's slots, which never changes."""

    def forward(self, x: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """The weighted sum of each row's experts, and `shared`, which is whole here: see `AllReduced.forward`."""
        y = self._exchange(x, routing)
        if shared is not None:
            y += shared
        return y.to(x.dtype)

    def serve(self) -> None:
        """Compute the rows of the other ranks in a step in which this rank has none. Raises: RankLost."""
        none = torch.empty(0, self._top_k, device=self._device)
        self._exchange(none.new_empty(0, self._hidden), Routing(none.long(), none))

    def _exchange(self, x: Tensor, routing: Routing) -> Tensor:
        """[T, hidden] float32: the weighted sum of each row's experts."""
        chosen, rows_of_experts = routing.experts, None
        if self.slots is not None:
            chosen, rows_of_experts = self.slots.assign(routing)
        rank_of = torch.searchsorted(self._ends, chosen.long(), right=True)  # [T, top_k]
        ranks = torch.arange(self._num_ranks, device=x.device)
        goes_to = (rank_of == ranks[:, None, None]).any(2)  # [ranks, T]
        counts = self._agree(goes_to.sum(1), rows_of_experts)
        dtype = self._precision.for_rows(sum(map(sum, counts)))
        rows = goes_to.nonzero()[:, 1]  # for rank 0 first
        sent = _packed(x.index_select(0, rows).to(dtype), Routing(chosen, routing.weights), rows)
        received = self._mesh.all_to_all(sent.view(-1), _times(counts, sent.size(1)))
        computed = self._compute(received.view(-1, sent.size(1)), dtype)
        returned = _times([*zip(*counts, strict=True)], self._hidden * dtype.itemsize)
        back = self._mesh.all_to_all(_bytes(computed).view(-1), returned)
        results = back.view(dtype).view(-1, self._hidden).float()
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add_(0, rows, results)

    def _agree(self, own: Tensor, rows_of_experts: Tensor | None) -> list[list[int]]:
        """`counts[a][b]`: rows from rank a to rank b, of each rank's `own` [ranks]. All ranks also count the rows of experts that all of
        them have. As float32, which every mesh can all-reduce; exact up to 2**24."""
        size = self._num_ranks**2
        numbers = torch.zeros(size + (0 if rows_of_experts is None else len(rows_of_experts)), device=own.device)
        numbers[self._rank * self._num_ranks : (self._rank + 1) * self._num_ranks] = own
        if rows_of_experts is not None:
            numbers[size:] = rows_of_experts
        numbers = self._mesh.all_reduce(numbers).long()
        if self.slots is not None:
            self.slots.counts += numbers[size:]
        counts: list[list[int]] = numbers[:size].view(self._num_ranks, -1).tolist()
        return counts

    def _compute(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """[rows, hidden] of `dtype`: the weighted sum of this rank's experts for each row of a message of the other ranks."""
        if not received.size(0):
            return torch.empty(0, self._hidden, dtype=dtype, device=received.device)
        at = self._hidden * dtype.itemsize
        x = received[:, :at].contiguous().view(dtype)
        slots, weights = received[:, at:].contiguous().view(torch.int32).split(self._top_k, 1)
        routing = Routing(slots.long(), weights.contiguous().view(torch.float32))
        return self._experts.forward(x, routing).to(dtype)


def _packed(x: Tensor, picks: Routing, rows: Tensor) -> Tensor:
    """[rows, bytes] uint8: each row's hidden states, the slots of its experts, and their weights."""
    slots, weights = (each.index_select(0, rows) for each in (picks.experts.int(), picks.weights.float()))
    return torch.cat([_bytes(x), _bytes(slots), _bytes(weights)], 1)


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _times(counts: Sequence[Sequence[int]], size: int) -> list[list[int]]:
    return [[count * size for count in row] for row in counts]


def spread_experts(experts: Experts, build: Build, router: RouterDescription) -> AllReduced | Dispatched:
    """A layer's experts on this rank, which are `experts`, and on the others of its stage."""
    is_data_parallel = build.mesh.place.is_data_parallel
    return Dispatched(experts, build, router) if is_data_parallel else AllReduced(experts, build.mesh)
