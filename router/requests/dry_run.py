"""What the router would decide for a request now, with every candidate and its score. Pure; changes nothing.

Runs on the router's event loop, for its admin port.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from common.base.errors import Overloaded, Unavailable
from router.policy import Decision, Fleet, LegDecision, Memory, Policy, Query, Routing, place
from router.requests.admission import Objectives, crowded


def dry_run(
    query: Query,
    prefill: Fleet,
    decode: Fleet,
    routing: Routing,
    objectives: Objectives,
    queued: int = 0,
) -> dict[str, Any]:
    """The decision and the candidates of both roles, best first (lower scores are better).

    `queued`: requests in the admission queue. Nodes that `query` avoids are listed too, although they are the last choice.
    """
    policy, memory = routing.policy, copy.deepcopy(routing.memory)
    decision: Decision | None = None
    complaint = ""
    try:
        trial = replace(routing, memory=copy.deepcopy(memory))
        decision = place(query, prefill, decode, trial, shown_count=None)
    except Unavailable as error:
        complaint = error.message
    memory.turn += 1  # as `place` does first
    source, target = (None, None) if decision is None else (decision.prefill, decision.decode)
    return {
        "prompt_tokens": query.num_tokens,
        "prompt_blocks": -(-query.num_tokens // query.block_size),
        "policy": policy.name,
        "mode": None if decision is None else decision.mode,
        "reason": complaint if decision is None else decision.reason,
        "admission": None if decision is None else _admission(decision, prefill, decode, objectives, queued),
        "ttft_s": None if decision is None else decision.ttft_s,
        "tpot_s": None if decision is None else decision.tpot_s,
        "prefill": _candidates(prefill, query, policy, memory, source),
        "decode": _candidates(decode, query, policy, memory, target),
    }


def _admission(decision: Decision, prefill: Fleet, decode: Fleet, objectives: Objectives, queued: int) -> str:
    """Whether a new request would be admitted, queued or refused; its wait for requests ahead of it is not counted."""
    try:
        objectives.check(decision, prefill, decode, ahead_s=0.0)
    except Overloaded as error:
        return f"refused: {error.message}"
    why = crowded(prefill, decode) or ("others wait before it" if queued else "")
    return f"waits: {why}" if why else "at once"


def _candidates(
    fleet: Fleet, query: Query, policy: Policy, memory: Memory, leg: LegDecision | None
) -> list[dict[str, Any]]:
    if not len(fleet):
        return []
    scores = dict(zip(fleet.node_ids, policy.score(fleet, query, memory), strict=True))
    scores |= {} if leg is None else leg.scores
    rows = [
        {
            "node": node_id,
            "picked": leg is not None and leg.incarnation == incarnation,
            "score": round(float(scores[node_id]), 6),
            "hit_tokens": min(query.hits.get(incarnation, 0) * query.block_size, query.num_tokens),
            "avoided": incarnation in query.avoid,
            **{name: round(value, 6) for name, value in fleet.values(incarnation).items()},
        }
        for node_id, incarnation in zip(fleet.node_ids, fleet.incarnations, strict=True)
    ]
    return sorted(rows, key=lambda row: (not row["picked"], row["score"]))
