"""`least_load`: score = 4 x waiting + running, this router's unreported requests included."""

from __future__ import annotations

from router.policy.base import Memory, Policy, Query
from router.policy.fleet import Fleet, FloatArray


def score(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """The classic data-parallel score."""
    return fleet.columns.load


POLICY = Policy("least_load", score)
