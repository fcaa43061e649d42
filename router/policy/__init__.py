"""Which nodes serve an attempt: one small file per policy, `place` over them. Pure functions over the nodes' figures."""

from router.policy.base import Memory, Policy, Query
from router.policy.decision import Choice, Decision, Picked
from router.policy.fleet import Fleet
from router.policy.place import POLICIES, check_policy, place

__all__ = [
    "POLICIES",
    "Choice",
    "Decision",
    "Fleet",
    "Memory",
    "Picked",
    "Policy",
    "Query",
    "check_policy",
    "place",
]
