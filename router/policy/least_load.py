"""`least_load`: score = 4 x waiting + running, this router's unreported requests included."""

from __future__ import annotations

from router.policy.base import Fleet, FloatArray, Memory, Policy, Query


def score(fleet: Fleet, query: Query, memory: Memory) -> FloatArray:
    """The classic data-parallel score."""
    return fleet.load


POLICY = Policy("least_load", score)
