"""A fleet: the usable nodes of one role and their load, as the policies see them. Pure.

Runs in the router process, on its event loop. Each node's figures are kept as plain numbers, which is fastest for a few
nodes. For many nodes the same figures are also kept as columns, one array each, which are updated on access.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from common.control.messages import Adapter, NodeLoad, Role
from router.index.prefix_hits import PrefixHits
from router.policy.costs import Costs

FloatArray = npt.NDArray[np.float64]
Number = TypeVar("Number", float, FloatArray)

FEW = 64
"""Up to this many nodes are faster one by one: NumPy's calls cost more than its arithmetic saves."""
ANY_CONTEXT = 2**62
"""Context of a node that takes sequences of any length."""
_RECENT = 200
"""`recent_work` covers about this many requests per node."""
_HEAVY = 1e100
"""When the weight of new work exceeds this, all weights are scaled down, long before a float overflows."""


@lru_cache(maxsize=65_536)
def stable_hash(text: str) -> int:
    """A 64-bit hash, equal in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(slots=True, eq=False)
class Figures(Generic[Number]):
    """The figures of one node, or of a whole fleet as columns: formulas take either.

    Those from `load` on are derived from the others.
    """

    capacity: Number
    """Sequences that the node runs at once (its max_num_seqs)."""
    waiting: Number
    """Waiting requests. This and the figures up to `total_blocks` are those of the last load report."""
    running: Number
    queued_tokens: Number
    """Prompt tokens accepted and not computed."""
    free_blocks: Number
    """KV blocks that no sequence uses, including cached ones, which can be evicted."""
    total_blocks: Number
    in_flight: Number
    """This router's requests that the report cannot include yet."""
    in_flight_tokens: Number
    """Prompt tokens to compute for these requests."""
    in_flight_blocks: Number
    """KV blocks that these requests need."""
    ended: Number
    """This router's requests that the report includes and that have ended since."""
    ended_tokens: Number
    slowness: Number
    """Factor on the fleet's prefill costs (`Costs`)."""
    link_slowness: Number
    """Factor on the fleet's transfer costs, for relays to this node."""
    step_slowness: Number
    """Factor on the fleet's step costs."""
    token_bytes: Number
    """KV bytes of one token."""
    recent_work: Number
    """Prefill work that this router sent; newer work has a higher weight. Only comparable between nodes."""
    load: Number
    """The classic score: 4 x waiting + running requests."""
    requests: Number
    """Requests that wait or run."""
    backlog: Number
    """Prompt tokens still to be computed."""
    room: Number
    """Free KV blocks, less those that requests in flight need."""
    slow_backlog: Number
    """`backlog` times `slowness`."""
    slow_requests: Number
    """`requests` times `slowness`."""
    step_requests: Number
    """`requests` times `step_slowness`."""
    step_slots: Number
    """Sequences that would run with one more request, times `step_slowness`."""
    spare_slots: Number
    """Sequence slots left with one more request; if negative, that many requests wait."""


NAMES = tuple(each.name for each in fields(Figures))
_values = attrgetter(*NAMES)
_DEFAULTS = {
    **dict.fromkeys(NAMES, 0.0),
    **dict.fromkeys(("slowness", "link_slowness", "step_slowness"), 1.0),
    **dict.fromkeys(("free_blocks", "total_blocks"), 1e9),
    "capacity": 64.0,
}


def _common(adapters: list[frozenset[Adapter]]) -> frozenset[Adapter]:
    return frozenset[Adapter]().union(*adapters[:1]).intersection(*adapters)


def _derive(at: Figures[float]) -> None:
    """Compute the derived figures."""
    waiting, own = at.waiting, at.running + (at.in_flight - at.ended)
    at.load = load if (load := 4 * waiting + own) > 0.0 else 0.0
    at.requests = requests = each if (each := waiting + own) > 0.0 else 0.0
    queued = at.queued_tokens - at.ended_tokens
    at.backlog = backlog = (queued if queued > 0.0 else 0.0) + at.in_flight_tokens
    at.room = at.free_blocks - at.in_flight_blocks
    slowness, step_slowness, capacity = at.slowness, at.step_slowness, at.capacity
    at.slow_backlog = backlog * slowness
    at.slow_requests = requests * slowness
    at.step_requests = requests * step_slowness
    at.step_slots = (requests + 1 if requests + 1 < capacity else capacity) * step_slowness
    at.spare_slots = capacity - requests - 1


class Fleet:
    """The usable nodes of one role, ordered by name; each has the same row in every list and array.

    Invariant: all lists and arrays have `len(self)` entries. Rows move when nodes come and go.
    """

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.costs = Costs()
        self.node_ids: list[str] = []
        self.incarnations: list[str] = []
        self.kv_kinds: list[str] = []
        """Nodes can relay to each other only if their KV kinds are equal."""
        self.contexts: list[int] = []
        """Maximum tokens of one sequence there."""
        self.adapters: list[frozenset[Adapter]] = []
        """The LoRA adapters that each node serves."""
        self._nodes: list[Figures[float]] = []
        """Those of the rows in `_underived` have derived figures that are out of date."""
        self._underived: set[int] = set()
        self._weight = 1.0
        """Weight of the next second of work in `recent_work`. It grows, which replaces scaling down all older work."""
        self.node_hash: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._rows: dict[str, int] = {}
        self._table: FloatArray = np.zeros((len(NAMES), 0))
        """One row per figure."""
        self._columns: Figures[FloatArray] = Figures(*self._table)
        self._stale: set[int] = set()
        """Rows whose columns are out of date."""
        self._moved = False
        """Nodes came or went since the columns were made."""
        self._hit_slots: Mapping[str, int] | None = None
        """The slots that `_hit_places` was made from."""
        self._hit_places: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self.common_adapters: frozenset[Adapter] = frozenset()
        """Those that all nodes serve."""
        self.one_kind = False
        """There are nodes, and all have the same KV kind."""
        self.shortest_context = ANY_CONTEXT

    def __len__(self) -> int:
        return len(self.incarnations)

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._rows

    def row(self, incarnation: str) -> int | None:
        """The row of this incarnation, valid until nodes come or go; None if it is not here."""
        return self._rows.get(incarnation)

    def node(self, incarnation: str) -> Figures[float]:
        """The figures of a node that is here, valid until something changes."""
        return self.nodes[self._rows[incarnation]]

    @property
    def nodes(self) -> list[Figures[float]]:
        """The figures of each node, valid until something changes; only this class changes them."""
        if self._underived:
            for row in self._underived:
                _derive(self._nodes[row])
            self._underived.clear()
        return self._nodes

    # -- membership

    def add(
        self,
        node_id: str,
        incarnation: str,
        *,
        kv_kind: str = "",
        context: int = ANY_CONTEXT,
        adapters: Iterable[Adapter] = (),
        **values: float,
    ) -> None:
        """A node becomes usable. `values`: initial figures; the others get defaults."""
        assert incarnation not in self._rows, incarnation
        at = bisect.bisect(list(zip(self.node_ids, self.incarnations, strict=True)), (node_id, incarnation))
        self.node_ids.insert(at, node_id)
        self.incarnations.insert(at, incarnation)
        self.kv_kinds.insert(at, kv_kind)
        self.contexts.insert(at, context)
        self.adapters.insert(at, frozenset(adapters))
        self.nodes.insert(at, Figures(**_DEFAULTS))
        self._reindex()
        self.update(incarnation, **values)

    def drop(self, incarnation: str) -> None:
        """A node is no longer usable. One that is not here is ignored."""
        at = self._rows.get(incarnation)
        if at is None:
            return
        for entries in (self.node_ids, self.incarnations, self.kv_kinds, self.contexts, self.adapters, self.nodes):
            del entries[at]
        self._reindex()

    def select(self, rows: Iterable[int]) -> Fleet:
        """A read-only copy with the nodes of these rows, in their order, as they are now."""
        rows = list(rows)
        other = Fleet(self.role)
        other.costs = self.costs
        other.node_ids = [self.node_ids[row] for row in rows]
        other.incarnations = [self.incarnations[row] for row in rows]
        other.kv_kinds = [self.kv_kinds[row] for row in rows]
        other.contexts = [self.contexts[row] for row in rows]
        other.adapters = [self.adapters[row] for row in rows]
        other.common_adapters = _common(other.adapters)
        other.shortest_context = min(other.contexts, default=ANY_CONTEXT)
        other._nodes = [self.nodes[row] for row in rows]
        other.node_hash = self.node_hash[rows]
        other._rows = {incarnation: row for row, incarnation in enumerate(other.incarnations)}
        self._refresh()
        other._table = self._table[:, rows]
        other._columns = Figures(*other._table)
        other._hit_slots = self._hit_slots
        if self._hit_slots is not None:
            other._hit_places = self._hit_places[rows]
        other.one_kind = len(set(other.kv_kinds)) == 1
        return other

    def _reindex(self) -> None:
        self._moved = True
        self._hit_slots = None
        self._rows = {incarnation: row for row, incarnation in enumerate(self.incarnations)}
        self.node_hash = np.array([stable_hash(name) for name in self.node_ids], np.uint64)
        self.one_kind = len(set(self.kv_kinds)) == 1
        self.shortest_context = min(self.contexts, default=ANY_CONTEXT)
        self.common_adapters = _common(self.adapters)

    def set_adapters(self, incarnation: str, adapters: Iterable[Adapter]) -> None:
        """A node serves these adapters now. An incarnation that is not here is ignored."""
        row = self._rows.get(incarnation)
        if row is not None:
            self.adapters[row] = frozenset(adapters)
            self.common_adapters = _common(self.adapters)

    # -- figures

    @property
    def columns(self) -> Figures[FloatArray]:
        """The current figures of all nodes; read-only, valid until something changes."""
        if self._stale or self._moved:
            self._refresh()
        return self._columns

    def _refresh(self) -> None:
        if self._moved:
            self._table = np.array([_values(node) for node in self.nodes]).reshape(-1, len(NAMES)).T.copy()
            self._columns = Figures(*self._table)
            self._moved = False
        else:
            for row in self._stale:
                self._table[:, row] = _values(self.nodes[row])
        self._stale.clear()

    def update(self, incarnation: str, **values: float) -> None:
        """New values of some figures. An incarnation that is not here is ignored."""
        row = self._rows.get(incarnation)
        if row is not None:
            node = self._nodes[row]
            for name, value in values.items():
                setattr(node, name, float(value))
            self._changed(row)

    def set_slowness(self, incarnation: str, slowness: float, link_slowness: float, step_slowness: float) -> None:
        """New factors of a node on the fleet's costs. An incarnation that is not here is ignored."""
        row = self._rows.get(incarnation)
        if row is None:
            return
        node = self._nodes[row]
        if (node.slowness, node.link_slowness, node.step_slowness) != (slowness, link_slowness, step_slowness):
            node.slowness, node.link_slowness, node.step_slowness = slowness, link_slowness, step_slowness
            self._changed(row)

    def reported(
        self, incarnation: str, load: NodeLoad, *, in_flight: int, in_flight_tokens: float, in_flight_blocks: float
    ) -> None:
        """A node's load report, and this router's requests in flight there that the report cannot include."""
        row = self._rows[incarnation]
        node = self._nodes[row]
        node.waiting, node.running = float(load.waiting), float(load.running)
        node.queued_tokens = float(load.queued_tokens)
        node.free_blocks = float(load.kv_blocks_total - load.kv_blocks_used)
        node.total_blocks = float(max(1, load.kv_blocks_total))  # a divisor
        node.in_flight, node.in_flight_tokens = float(in_flight), float(in_flight_tokens)
        node.in_flight_blocks = float(in_flight_blocks)
        node.ended = node.ended_tokens = 0.0
        self._changed(row)

    def sent(self, incarnation: str, *, tokens: float, blocks: float, work_s: float = 0.0) -> None:
        """This router sends a request there, with prompt `tokens` to compute and KV `blocks` to hold."""
        row = self._rows.get(incarnation)
        if row is None:
            return
        if work_s:
            self._nodes[row].recent_work += work_s * self._weight
            self._weight /= 1 - 1 / (_RECENT * len(self._nodes))
            if self._weight > _HEAVY:
                self._rescale_work()
        self._count(row, 1.0, tokens, blocks)

    def _rescale_work(self) -> None:
        for node in self._nodes:
            node.recent_work /= self._weight
        self._weight = 1.0
        self._stale.update(range(len(self._nodes)))

    def over(self, incarnation: str, *, tokens: float, blocks: float, reported: bool) -> None:
        """A request that was sent there is over; `reported`: the node's last report includes it."""
        row = self._rows.get(incarnation)
        if row is None:
            return
        if not reported:
            self._count(row, -1.0, -tokens, -blocks)
            return
        node = self._nodes[row]
        node.ended += 1.0
        node.ended_tokens += tokens
        self._changed(row)

    def _count(self, row: int, requests: float, tokens: float, blocks: float) -> None:
        """Add to the in-flight figures of one node."""
        node = self._nodes[row]
        node.in_flight += requests
        node.in_flight_tokens += tokens
        node.in_flight_blocks += blocks
        self._changed(row)

    def _changed(self, row: int) -> None:
        self._underived.add(row)
        self._stale.add(row)

    def values(self, incarnation: str) -> dict[str, float]:
        """All figures of one node, by name."""
        node = self.node(incarnation)
        return dict(zip(NAMES, _values(node), strict=True)) | {"recent_work": node.recent_work / self._weight}

    def hit_blocks(self, hits: Mapping[str, int]) -> FloatArray:
        """Leading blocks of the request that each node has cached."""
        if isinstance(hits, PrefixHits):  # no Python step per node: all may have the first block of a system prompt
            if hits.slots is not self._hit_slots:
                self._hit_slots, self._hit_places = hits.slots, hits.places(self.incarnations)
            return hits.column(self._hit_places)
        blocks = np.zeros(len(self))
        for incarnation, depth in hits.items():
            if incarnation in self._rows:
                blocks[self._rows[incarnation]] = depth
        return blocks
