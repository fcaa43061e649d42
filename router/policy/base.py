"""What the policies are asked and what they answer: a query, a score for each node. Pure.

Runs in the router process, on its event loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple

from common.base.hashing import BLOCK_SIZE
from router.policy.fleet import Figures, Fleet, FloatArray

Scores = FloatArray | list[float]
"""One for each node; a list where they are few."""

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
    kv_kind: str = ""
    """What the KV of its answer's first tokens meant, once there are some: others would go on with another answer."""


@dataclass
class Memory:
    """What a policy may remember between decisions."""

    rng: random.Random = field(default_factory=random.Random)
    turn: int = 0


Score = Callable[[Fleet, Query, Memory], Scores]
"""(fleet with at least one node, query, memory) -> a score for each node; the lowest is picked. Infinite: never."""


@dataclass(frozen=True)
class Policy:
    """A way to score nodes."""

    name: str
    score: Score
    slack: float = 0.0
    """Scores that are higher than the best by no more than this share of it count as equal."""
    tie: Callable[[Figures[Any]], Any] = attrgetter("backlog")
    """Of those, the node where this figure is smallest is picked."""
    estimates: bool = False
    """Scores are seconds, and so is what decides between a relay and a local prefill."""
