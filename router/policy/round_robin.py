"""`round_robin`: score = distance from the node whose turn it is."""

from __future__ import annotations

import numpy as np

from router.policy.base import Memory, Policy, Query
from router.policy.fleet import Fleet, FloatArray


def score(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """Nodes take turns in the order of their names."""
    return (np.arange(len(fleet), dtype=np.float64) - memory.turn) % len(fleet)


POLICY = Policy("round_robin", score)
