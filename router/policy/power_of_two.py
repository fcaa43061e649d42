"""`power_of_two`: two nodes drawn at random, score = their classic load (4 x waiting + running); all others never."""

from __future__ import annotations

import numpy as np

from router.policy.base import Memory, Policy, Query
from router.policy.fleet import Fleet, FloatArray


def score(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """The less loaded of two: close to the best of all, without all routers choosing the same node."""
    drawn = memory.rng.sample(range(len(fleet)), min(2, len(fleet)))
    scores = np.full(len(fleet), np.inf)
    scores[drawn] = fleet.columns.load[drawn]
    return scores


POLICY = Policy("power_of_two", score)
