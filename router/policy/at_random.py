"""`random`: a random node."""

from __future__ import annotations

import numpy as np

from router.policy.base import Memory, Policy, Query
from router.policy.fleet import Fleet, FloatArray


def score(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """One node gets 0, all others 1."""
    scores = np.ones(len(fleet))
    scores[memory.rng.randrange(len(fleet))] = 0.0
    return scores


POLICY = Policy("random", score)
