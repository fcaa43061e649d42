"""The interface of policies: a query goes in, a score per node comes out. Pure; router process, event loop."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from common.base.hashing import BLOCK_SIZE
from common.control.messages import Adapter
from router.policy.fleet import Figures, Fleet, FloatArray

Scores = FloatArray | list[float]
"""One per node; a list for few nodes."""

_NO_HITS: Mapping[str, int] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Query:
    """What is to be placed: one attempt of one request."""

    num_tokens: int
    avoid: frozenset[str] = frozenset()
    """Incarnations to use only if there is no other."""
    last: bool = False
    """No other attempt will follow: a local prefill is better than a relay from a node to avoid."""
    hits: Mapping[str, int] = field(default_factory=lambda: _NO_HITS)
    """Leading blocks of the request that each incarnation has cached."""
    block_size: int = BLOCK_SIZE
    max_new_tokens: int = 0
    """Upper limit of the answer's length; 0 if unknown."""
    open_ended: bool = False
    """The client gave no limit: `max_new_tokens` is what is left of the model's context."""
    session: str = ""
    """Requests with the same key go to the same nodes under `session`."""
    kv_kind: str = ""
    """KV kind of the nodes that generated the answer so far, or empty: another kind would continue it differently."""
    holder: str = ""
    """Incarnation of a decode node that is known to have the prompt's KV, and is to serve the attempt without a relay."""
    begun: bool = False
    """Nodes have worked on the request before, or on a sibling: a draining node accepts it if no other is left."""
    adapter: Adapter | None = None
    """Only nodes that serve it are used."""


@dataclass
class Memory:
    """State that policies keep between decisions."""

    rng: random.Random = field(default_factory=random.Random)
    turn: int = 0


Scorer = Callable[[Fleet, Query, Memory], Scores]
"""(fleet with at least one node, query, memory) -> a score per node; the lowest wins, an infinite one never does."""


@dataclass(frozen=True)
class Policy:
    """A scorer, and what the picker needs to know of its scores."""

    name: str
    score: Scorer
    slack: float = 0.0
    """Scores within this share of the best one count as equal to it."""
    tie: Callable[[Figures[Any]], Any] = attrgetter("backlog")
    """Among equal scores, the node where this figure is smallest is picked."""
    estimates: bool = False
    """Scores are seconds, so estimates decide between a relay and a local prefill."""


@dataclass(frozen=True)
class Routing:
    """How a router places attempts."""

    policy: Policy
    local_prefill_tokens: int | None
    """Decode nodes compute up to this many uncached tokens themselves; None: the policy decides."""
    memory: Memory = field(default_factory=Memory)
