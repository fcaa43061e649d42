"""Turns scores into the picked node and the candidates that a decision names. Pure; router process, event loop."""

from __future__ import annotations

import math

import numpy as np

from router.policy.base import Memory, Policy, Scores
from router.policy.fleet import Fleet, FloatArray


def pick(policy: Policy, scores: Scores, fleet: Fleet, memory: Memory) -> int:
    """The row of the best score. Among equal scores the lowest `tie` wins, then round robin."""
    if isinstance(scores, list):
        return _pick_of_few(policy, scores, fleet, memory)
    best = float(scores[scores.argmin()])
    near = (scores <= best + policy.slack * abs(best)).nonzero()[0]
    if len(near) > 1:
        ties: FloatArray = policy.tie(fleet.columns)[near]
        near = near[ties <= ties[ties.argmin()]]
    return int(near[((near - memory.turn) % len(fleet)).argmin()])


def _pick_of_few(policy: Policy, scores: list[float], fleet: Fleet, memory: Memory) -> int:
    if len(scores) == 1:
        return 0
    best = min(scores)
    limit = best + policy.slack * abs(best)
    near = [row for row, score in enumerate(scores) if score <= limit]
    if len(near) == 1:
        return near[0]
    ties: list[float] = [policy.tie(fleet.nodes[row]) for row in near]
    least = min(ties)
    near = [row for row, tie in zip(near, ties, strict=True) if tie <= least]
    return min(near, key=lambda row: (row - memory.turn) % len(scores))


def shown(fleet: Fleet, scores: Scores, count: int | None) -> dict[str, float]:
    """Scores of the `count` best nodes (None: all) by name, best first."""
    if count == 0:
        return {}
    if isinstance(scores, list):
        best = sorted(range(len(scores)), key=scores.__getitem__)[:count] if len(scores) > 1 else [0]
    else:
        rows = np.arange(len(scores))
        if count is not None and count < len(scores):
            rows = np.argpartition(scores, count)[:count]
        best = rows[np.argsort(scores[rows], kind="stable")].tolist()
    names = fleet.node_ids
    return {names[row]: float(scores[row]) for row in best if scores[row] < math.inf}
