"""Which nodes serve an attempt: one small file per policy, `place` over them. Pure functions over the nodes' figures."""

from router.policy.base import Memory, Policy, Query
from router.policy.decision import Decision, LegDecision, Picked
from router.policy.fleet import Fleet
from router.policy.place import POLICIES, check_policy, place

__all__ = [
    "POLICIES",
    "Decision",
    "Fleet",
    "LegDecision",
    "Memory",
    "Picked",
    "Policy",
    "Query",
    "check_policy",
    "place",
]
