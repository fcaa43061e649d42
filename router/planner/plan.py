"""Decides how many prefill and decode nodes a cluster wants. Pure: the same code runs in routers and in the simulator.

It moves nodes only when that clearly helps, and no node twice within `COOL_DOWN_S`: services are numbered and the highest
number goes first, so that a count which moves in one direction only touches every node once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from router.planner.sizing import Demand, Need, NodeCounts, RoleCosts, need, unknown_costs
from router.requests.admission import Objectives

COOL_DOWN_S = 600.0
"""Least time between two changes of one role's count in opposite directions."""
MANUAL_S = 3600.0
"""How long numbers that somebody set by hand are left alone."""
_START_S = 300.0
"""Time in which a wanted node must be usable; later the plan no longer waits for it."""
QUIET_S = 300.0
"""How long there must be slack before nodes are given back."""
_SPAN_S = 180.0
"""Least time over which the demand was measured."""
_TIGHT = 0.95
"""Below this pressure nothing is added or traded."""
_GAIN = 0.85
"""A change must bring the pressure below this share of what it is."""
_NEAR = 1.1
"""Among splits whose pressure is within this factor of the best, the one that moves fewest nodes is taken."""
_SLACK = 1.25
"""Nodes are given back only if this multiple of the need fits in what is left."""
_ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Observed:
    """The cluster at one moment."""

    now_s: float
    """Seconds on a clock that all planning routers share."""
    wanted: NodeCounts
    """What the cluster is to have."""
    usable: NodeCounts
    """What takes requests."""
    demand: Demand
    costs: RoleCosts


@dataclass(frozen=True)
class PlanMemory:
    """What a plan must know of earlier ones."""

    wanted: NodeCounts | None = None
    """Wanted at the last plan."""
    proposed: NodeCounts | None = None
    """The last plan's own numbers: any other change was made by hand."""
    manual_until_s: float = 0.0
    short_since_s: float | None = None
    """Since when fewer nodes are usable than wanted."""
    slack_since_s: float | None = None
    moved: dict[str, tuple[int, float]] = field(default_factory=dict[str, tuple[int, float]])
    """By role: direction (1 or -1) and time of the last change."""


@dataclass(frozen=True)
class ShapeDecision:
    """The numbers that the cluster should want, and why."""

    counts: NodeCounts
    why: str
    """One sentence: what was measured, what it needs, why something changes or nothing."""
    memory: PlanMemory
    """For the next plan, whether or not this one is applied."""


def plan(observed: Observed, objectives: Objectives, max_nodes: int | None, memory: PlanMemory) -> ShapeDecision:
    """What the cluster should want now. Never raises; what cannot be judged changes nothing, and the reason says so.

    `max_nodes`: of both roles together; None: as many as are wanted now, and only their roles change.
    """
    memory = _remember(observed, memory)
    stays = _reason_to_stay(observed, memory)
    if stays:
        return _unchanged(observed, memory, None, stays)
    needed = need(observed.demand, observed.costs, objectives)
    if not (math.isfinite(needed.prefill) and math.isfinite(needed.decode)):
        return _unchanged(observed, memory, None, "the measured rates and costs are not numbers")
    total, memory = _total(observed, needed, max_nodes, memory)
    counts = _split(observed, needed, total)
    if counts == observed.wanted:
        return _unchanged(observed, memory, needed, "no other split of these nodes is better")
    stays = _not_worth(observed, needed, counts) or _cooling(observed, counts, memory)
    if stays:
        return _unchanged(observed, memory, needed, stays)
    why = f"{_measured(observed, needed)}: changed to {counts}, because {_cause(observed, needed, counts)}"
    return ShapeDecision(counts, why, replace(memory, proposed=counts))


def _remember(observed: Observed, memory: PlanMemory) -> PlanMemory:
    """Enter what changed since the last plan: the wanted numbers, by whom, and whether nodes are missing."""
    now_s, wanted = observed.now_s, observed.wanted
    before = wanted if memory.wanted is None else memory.wanted
    moved = dict(memory.moved)
    for role, old, new in zip(_ROLES, before, wanted, strict=True):
        if new != old:
            moved[role] = (1 if new > old else -1, now_s)
    by_hand = wanted not in (before, memory.proposed)
    short = any(have < want for have, want in zip(observed.usable, wanted, strict=True))
    since_s = memory.short_since_s if wanted == before else None
    if short and since_s is not None:  # a change ends, and its cool-down begins, when its nodes are usable
        moved = {role: (way, now_s if at_s >= since_s else at_s) for role, (way, at_s) in moved.items()}
    return replace(
        memory,
        wanted=wanted,
        proposed=memory.proposed if wanted == before else None,
        manual_until_s=now_s + MANUAL_S if by_hand else memory.manual_until_s,
        short_since_s=(now_s if since_s is None else since_s) if short else None,
        slack_since_s=memory.slack_since_s if wanted == before else None,
        moved=moved,
    )


def _reason_to_stay(observed: Observed, memory: PlanMemory) -> str:
    """Why nothing can be decided now; empty if it can."""
    if not observed.wanted.prefill:
        return "no prefill node is wanted, so decode nodes compute all prompts"
    if observed.now_s < memory.manual_until_s:
        return f"somebody set {observed.wanted} by hand, which is kept for another {_time(memory.manual_until_s - observed.now_s)}"
    since_s = memory.short_since_s
    if since_s is not None and observed.now_s - since_s < _START_S:
        return f"waiting for nodes to start, of which there are {observed.usable}"
    if observed.demand.span_s < _SPAN_S:
        return f"the load was measured for {observed.demand.span_s:.0f} of {_SPAN_S:.0f} s"
    unknown = unknown_costs(observed.demand, observed.costs)
    return f"costs are not known yet: {unknown}" if unknown else ""


def _total(observed: Observed, needed: Need, max_nodes: int | None, memory: PlanMemory) -> tuple[int, PlanMemory]:
    """How many nodes there should be in all; fewer only after a time of slack."""
    now = observed.wanted.total
    if max_nodes is None:
        return now, memory
    most = max(2, max_nodes)
    missing = now - _effective(observed, observed.wanted).total
    if (wanted := _whole(needed, 1.0) + missing) > now or now > most:
        return min(wanted if wanted > now else now, most), replace(memory, slack_since_s=None)
    fewer = _whole(needed, _SLACK) + missing
    if fewer >= now:
        return now, replace(memory, slack_since_s=None)
    since_s = observed.now_s if memory.slack_since_s is None else memory.slack_since_s
    return (fewer if observed.now_s - since_s >= QUIET_S else now), replace(memory, slack_since_s=since_s)


def _whole(needed: Need, factor: float) -> int:
    return sum(max(1, math.ceil(each * factor)) for each in needed)


def _effective(observed: Observed, counts: NodeCounts) -> NodeCounts:
    """The nodes of `counts` that would work: as many as do not start now are expected not to start then."""
    missing = (max(0, want - have) for want, have in zip(observed.wanted, observed.usable, strict=True))
    return NodeCounts(*(max(0, count - gone) for count, gone in zip(counts, missing, strict=True)))


def _split(observed: Observed, needed: Need, total: int) -> NodeCounts:
    """The split of `total` nodes with the least pressure, or one that is nearly as good and nearer to the present."""
    splits = [NodeCounts(prefill, total - prefill) for prefill in range(1, total)]
    pressures = [needed.pressure(_effective(observed, split)) for split in splits]
    good = min(pressures) * _NEAR
    near = [split for split, pressure in zip(splits, pressures, strict=True) if pressure <= good]
    return min(near, key=lambda split: _moves(observed.wanted, split), default=observed.wanted)


def _moves(before: NodeCounts, after: NodeCounts) -> int:
    return sum(abs(new - old) for old, new in zip(before, after, strict=True))


def _not_worth(observed: Observed, needed: Need, counts: NodeCounts) -> str:
    if counts.total < observed.wanted.total:
        return ""
    now, then = (needed.pressure(_effective(observed, each)) for each in (observed.wanted, counts))
    if now < _TIGHT:
        return "that is enough"
    return f"{counts} would hardly be better" if then > now * _GAIN else ""


def _cooling(observed: Observed, counts: NodeCounts, memory: PlanMemory) -> str:
    """Why a role's count must not move in this direction yet; empty if it may."""
    for role, old, new in zip(_ROLES, observed.wanted, counts, strict=True):
        direction, at_s = memory.moved.get(role, (0, -math.inf))
        left_s = at_s + COOL_DOWN_S - observed.now_s
        if (new - old) * direction < 0 < left_s:
            return f"{counts} would be better, but {role} nodes changed the other way: not before {_time(left_s)} have passed"
    return ""


# -- the sentence


def _unchanged(observed: Observed, memory: PlanMemory, needed: Need | None, reason: str) -> ShapeDecision:
    why = f"{_measured(observed, needed)}: unchanged, because {reason}"
    return ShapeDecision(observed.wanted, why, memory)


def _measured(observed: Observed, needed: Need | None) -> str:
    demand = observed.demand
    rates = f"{demand.prompt_tokens_s:,.0f} prompt tokens/s to compute and {demand.generated_tokens_s:,.0f} tokens/s to generate"
    needs = "" if needed is None else f", which need {needed.prefill:.1f} prefill and {needed.decode:.1f} decode nodes"
    return f"{observed.wanted} with {rates}{needs}"


def _cause(observed: Observed, needed: Need, counts: NodeCounts) -> str:
    if counts.total < observed.wanted.total:
        return "fewer nodes suffice, or no more are allowed"
    prefill, decode = needed.ratios(_effective(observed, observed.wanted))
    return f"{'prefill' if prefill >= decode else 'decode'} nodes are short"


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
