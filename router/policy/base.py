"""What the policies look at and what they answer: a fleet's columns, a query, a decision. Pure.

Runs in the router process, on its event loop. A decision reads NumPy columns that are kept up to date as nodes
report, so its time does not depend on Python work per node.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from common.hashing import BLOCK_SIZE
from common.protocol import Role
from router.costs import Costs
from router.hits import Hits

FloatArray = npt.NDArray[np.float64]
PrefillMode = Literal["relayed", "local"]

_RECENT = 200
"""`recent_s` remembers about so many requests per node."""
SHOWN_CANDIDATES = 8
"""Of each leg's candidates, so many of the best are named in an answer's headers."""


@lru_cache(maxsize=65_536)
def stable_hash(text: str) -> int:
    """64 bits, equal in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class _Column:
    """One row of `Fleet.table`: a value for each node."""

    def __init__(self, default: float = 0.0) -> None:
        self.default = default
        self.index = -1

    def __set_name__(self, owner: type[Fleet], name: str) -> None:
        self.index = len(owner.columns)
        owner.columns[name] = self

    def __get__(self, fleet: Fleet, owner: type[Fleet]) -> FloatArray:
        raise AttributeError("a fleet keeps a view of every column as an attribute of its own")  # which goes first


class Fleet:
    """The usable nodes of one role: a row for each in every column, in the order of their names.

    Invariant: every column has `len(self)` entries, and `row` says which is whose. Rows move when nodes come and go.
    """

    columns: ClassVar[dict[str, _Column]] = {}

    capacity = _Column(64.0)
    """Sequences that the node runs at once (its max_num_seqs)."""
    waiting = _Column()
    """Requests that wait there, as last reported; the same for the next ones."""
    running = _Column()
    queued_tokens = _Column()
    """Prompt tokens accepted and not computed."""
    free_blocks = _Column(1e9)
    """KV blocks that nobody uses; cached ones can be evicted and count."""
    total_blocks = _Column(1e9)
    in_flight = _Column()
    """This router's requests that the report cannot include yet."""
    in_flight_tokens = _Column()
    """What these have to compute: prompt tokens that the node does not hold."""
    in_flight_blocks = _Column()
    """KV blocks that these need."""
    ended = _Column()
    """This router's requests that the report includes and that are over since."""
    ended_tokens = _Column()
    slowness = _Column(1.0)
    """Factor on the fleet's prefill costs (`Costs`)."""
    link_slowness = _Column(1.0)
    """Factor on the fleet's transfer costs, for relays to this node."""
    step_slowness = _Column(1.0)
    """Factor on the fleet's step costs."""
    recent_s = _Column()
    """Prefill work that this router gave it of late, in seconds; see `sent`."""
    token_bytes = _Column()
    """KV bytes of one token."""
    load = _Column()
    """The classic score: waiting requests weigh four times running ones. It and all after it follow from the others."""
    requests = _Column()
    """Waiting or running."""
    backlog = _Column()
    """Prompt tokens still to be computed."""
    room = _Column()
    """KV blocks that nobody uses or is about to."""
    slow_backlog = _Column()
    """Times `slowness`, as the next one."""
    slow_requests = _Column()
    step_requests = _Column()
    """`requests`, times `step_slowness`."""
    step_seats = _Column()
    """Sequences that run with one request more, times `step_slowness`."""
    spare_seats = _Column()
    """Sequences that could run beyond these; below zero, so many wait."""

    def __init__(self, role: Role) -> None:
        self.role: Role = role
        self.costs = Costs()
        self.node_ids: list[str] = []
        self.incarnations: list[str] = []
        self.kv_kinds: list[str] = []
        self.table: FloatArray = np.zeros((len(self.columns), 0))
        self.node_hash: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        self.kind_hash: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Nodes can relay to each other only if these are equal: what their KV means."""
        self._rows: dict[str, int] = {}
        self._hit_slots: Mapping[str, int] | None = None
        """What `_hit_places` was made from."""
        self._hit_places: npt.NDArray[np.intp] = np.zeros(0, np.intp)
        self.one_kind = False
        """All of them are equal, and there is one."""
        self._bind()

    def __len__(self) -> int:
        return len(self.incarnations)

    def __contains__(self, incarnation: object) -> bool:
        return incarnation in self._rows

    def row(self, incarnation: str) -> int | None:
        """Where this incarnation stands in every column, until nodes come or go; None if it is not here."""
        return self._rows.get(incarnation)

    def kind_of(self, incarnation: str) -> str:
        """What this node's KV means."""
        return self.kv_kinds[self._rows[incarnation]]

    # -- who is here

    def add(self, node_id: str, incarnation: str, *, kv_kind: str = "", **values: float) -> None:
        """A node becomes usable. `values` by column; the others get their defaults."""
        assert incarnation not in self._rows, incarnation
        at = bisect.bisect(list(zip(self.node_ids, self.incarnations, strict=True)), (node_id, incarnation))
        self.node_ids.insert(at, node_id)
        self.incarnations.insert(at, incarnation)
        self.kv_kinds.insert(at, kv_kind)
        defaults = np.array([column.default for column in self.columns.values()])
        self.table = np.insert(self.table, at, defaults, axis=1)
        self._reindex()
        self.update(incarnation, **values)

    def drop(self, incarnation: str) -> None:
        """A node is no longer usable. One that is not here is ignored."""
        at = self._rows.get(incarnation)
        if at is None:
            return
        for names in (self.node_ids, self.incarnations, self.kv_kinds):
            del names[at]
        self.table = np.delete(self.table, at, axis=1)
        self._reindex()

    def select(self, mask: npt.NDArray[np.bool_]) -> Fleet:
        """A copy with only the nodes that `mask` picks."""
        rows = [int(row) for row in np.flatnonzero(mask)]
        other = Fleet(self.role)
        other.costs = self.costs
        other.node_ids = [self.node_ids[row] for row in rows]
        other.incarnations = [self.incarnations[row] for row in rows]
        other.kv_kinds = [self.kv_kinds[row] for row in rows]
        other.table = self.table[:, rows]
        other.node_hash, other.kind_hash = self.node_hash[rows], self.kind_hash[rows]
        other._rows = {incarnation: row for row, incarnation in enumerate(other.incarnations)}
        other._hit_slots = self._hit_slots
        if self._hit_slots is not None:
            other._hit_places = self._hit_places[rows]
        other.one_kind = len(set(other.kv_kinds)) == 1
        other._bind()
        return other

    def _bind(self) -> None:
        """Keep a view of every column: a decision looks at dozens."""
        vars(self).update({name: self.table[column.index] for name, column in self.columns.items()})

    def _reindex(self) -> None:
        self._bind()
        self._hit_slots = None
        self._rows = {incarnation: row for row, incarnation in enumerate(self.incarnations)}
        self.node_hash = np.array([stable_hash(name) for name in self.node_ids], np.uint64)
        self.kind_hash = np.array([stable_hash(kind) for kind in self.kv_kinds], np.uint64)
        self.one_kind = len(set(self.kv_kinds)) == 1

    # -- how they are

    def update(self, incarnation: str, **values: float) -> None:
        """New values in some columns. An incarnation that is not here is ignored."""
        row = self._rows.get(incarnation)
        if row is not None:
            cells: Any = self.table.data
            for name, value in values.items():
                cells[self.columns[name].index, row] = value
            self._derive(row)

    def sent(self, incarnation: str, *, tokens: float, blocks: float, work_s: float = 0.0) -> None:
        """This router sends a request there, with so many prompt tokens to compute and KV blocks to hold."""
        row = self._rows.get(incarnation)
        if row is None:
            return
        self._count(row, 1.0, tokens, blocks)
        if work_s:
            self.recent_s[row] += work_s
            self.recent_s *= 1 - 1 / (_RECENT * len(self.incarnations))

    def over(self, incarnation: str, *, tokens: float, blocks: float, reported: bool) -> None:
        """Such a request is over there; `reported`: the node's last report includes it."""
        row = self._rows.get(incarnation)
        if row is None:
            return
        if reported:
            self.ended[row] += 1
            self.ended_tokens[row] += tokens
            self._derive(row)
        else:
            self._count(row, -1.0, -tokens, -blocks)

    def _count(self, row: int, requests: float, tokens: float, blocks: float) -> None:
        """So many more in flight at one node."""
        self.in_flight[row] += requests
        self.in_flight_tokens[row] += tokens
        self.in_flight_blocks[row] += blocks
        self._derive(row)

    def _derive(self, row: int) -> None:
        """The columns that follow from the others, for one node."""
        at: list[float] = self.table[:, row].tolist()
        cells: Any = self.table.data  # NumPy is slow for single numbers
        waiting, running = at[_WAITING], at[_RUNNING]
        own = at[_IN_FLIGHT] - at[_ENDED]
        requests = max(waiting + running + own, 0.0)
        backlog = max(at[_QUEUED] - at[_ENDED_TOKENS], 0.0) + at[_IN_FLIGHT_TOKENS]
        slowness, step_slowness = at[_SLOWNESS], at[_STEP_SLOWNESS]
        cells[_LOAD, row] = max(4 * waiting + running + own, 0.0)
        cells[_LOAD + 1, row] = requests
        cells[_LOAD + 2, row] = backlog
        cells[_LOAD + 3, row] = at[_FREE] - at[_IN_FLIGHT_BLOCKS]
        cells[_LOAD + 4, row] = backlog * slowness
        cells[_LOAD + 5, row] = requests * slowness
        cells[_LOAD + 6, row] = requests * step_slowness
        cells[_LOAD + 7, row] = min(requests + 1, at[_CAPACITY]) * step_slowness
        cells[_LOAD + 8, row] = at[_CAPACITY] - requests - 1

    def values(self, incarnation: str) -> dict[str, float]:
        """All columns of one node, by name."""
        row = self._rows[incarnation]
        return {name: float(self.table[column.index, row]) for name, column in self.columns.items()}

    def hit_blocks(self, hits: Mapping[str, int]) -> FloatArray:
        """Leading blocks of the request that each node holds."""
        if isinstance(hits, Hits):  # a system prompt's first block is held by all: no Python step per node
            if hits.slots is not self._hit_slots:
                self._hit_slots, self._hit_places = hits.slots, hits.places(self.incarnations)
            return hits.column(self._hit_places)
        blocks = np.zeros(len(self))
        for incarnation, depth in hits.items():
            if incarnation in self._rows:
                blocks[self._rows[incarnation]] = depth
        return blocks


(
    _WAITING,
    _RUNNING,
    _QUEUED,
    _FREE,
    _IN_FLIGHT,
    _IN_FLIGHT_TOKENS,
    _IN_FLIGHT_BLOCKS,
    _ENDED,
    _ENDED_TOKENS,
    _CAPACITY,
    _SLOWNESS,
    _STEP_SLOWNESS,
    _LOAD,
) = (
    Fleet.columns[name].index
    for name in (
        "waiting",
        "running",
        "queued_tokens",
        "free_blocks",
        "in_flight",
        "in_flight_tokens",
        "in_flight_blocks",
        "ended",
        "ended_tokens",
        "capacity",
        "slowness",
        "step_slowness",
        "load",
    )
)


_NO_HITS: Mapping[str, int] = MappingProxyType({})


class Query(NamedTuple):
    """What is to be placed."""

    num_tokens: int
    avoid: frozenset[str] = frozenset()
    """Incarnations to use only if there is nobody else."""
    last: bool = False
    """No other attempt will follow: rather no relay than one from a node to avoid."""
    hits: Mapping[str, int] = _NO_HITS
    """By incarnation: leading blocks of the request that it holds."""
    block_size: int = BLOCK_SIZE
    max_new_tokens: int = 0
    """The answer may grow so long."""
    session: str = ""
    """Requests with the same key go to the same nodes under `session`."""


_compact = json.JSONEncoder(separators=(",", ":")).encode


def _first(scores: dict[str, float], count: int | None) -> dict[str, float]:
    """The first `count` of them; None: all."""
    return scores if count is None else dict(islice(scores.items(), count))


class Picked(NamedTuple):
    """The node that one leg goes to."""

    node_id: str
    incarnation: str
    hit_tokens: int = 0
    """Leading tokens of the request whose KV it is known to hold."""
    work_s: float = 0.0
    """Estimated prefill work of the request there."""


class Choice(NamedTuple):
    """A picked node, and the scores that it was picked by (lower is better), by node id, best first."""

    picked: Picked
    scores: dict[str, float]


class Decision(NamedTuple):
    """Where an attempt goes and why."""

    policy: str
    mode: PrefillMode
    reason: str
    decode: Choice
    prefill: Choice | None = None
    ttft_s: float = 0.0
    """Estimated time to the first token, the relay included."""
    tpot_s: float = 0.0
    """Estimated time per token after it."""

    def explain(self, candidates: int | None = None) -> dict[str, object]:
        """The decision as plain data for headers, logs and traces. `candidates`: so many of each leg; None: all."""
        legs = {"decode": self.decode} if self.prefill is None else {"prefill": self.prefill, "decode": self.decode}
        return {
            "policy": self.policy,
            "mode": self.mode,
            "reason": self.reason,
            "ttft_s": round(self.ttft_s, 4),
            "tpot_s": round(self.tpot_s, 4),
            **{
                name: {
                    "node": leg.picked.node_id,
                    "hit": leg.picked.hit_tokens,
                    "scores": _first(leg.scores, candidates),
                }
                for name, leg in legs.items()
            },
        }

    def to_json(self, max_chars: int | None = None) -> str:
        """`explain`, compact, in ASCII. What makes it too long is left out: candidates, the worst first, then all else
        that is long.
        """
        text = _compact(self.explain())
        if max_chars is None or len(text) <= max_chars:
            return text
        for count in range(SHOWN_CANDIDATES - 1, -1, -1):
            text = _compact(self.explain(count))
            if len(text) <= max_chars:
                return text
        return _compact({"policy": self.policy, "mode": self.mode})


@dataclass
class Memory:
    """What a policy may remember between decisions."""

    rng: random.Random = field(default_factory=random.Random)
    turn: int = 0


Score = Callable[[Fleet, Query, Memory], FloatArray]
"""(fleet with at least one node, query, memory) -> a score for each node; the lowest is picked. Infinite: never."""


@dataclass(frozen=True)
class Policy:
    """A way to score nodes."""

    name: str
    score: Score
    slack: float = 0.0
    """Scores that are higher than the best by no more than this share of it count as equal."""
    tie: str = "backlog"
    """The column whose smallest value then decides."""
    estimates: bool = False
    """Scores are seconds, and so is what decides between a relay and a local prefill."""


def shown(fleet: Fleet, scores: FloatArray, count: int | None) -> dict[str, float]:
    """The `count` best nodes (None: all) by name with their scores, best first."""
    if count == 0:
        return {}
    if count is not None and count < len(fleet):
        rows = np.argpartition(scores, count)[:count]
        rows = rows[np.argsort(scores[rows], kind="stable")]
    else:
        rows = np.argsort(scores, kind="stable")
    names, values = fleet.node_ids, scores[rows].tolist()
    return {names[row]: round(value, 6) for row, value in zip(rows.tolist(), values, strict=True) if value < math.inf}
