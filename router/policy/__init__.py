"""Routing policies: which nodes serve an attempt. One small file per policy, and `place` over them. Pure."""

from router.policy.base import Memory, Policy, Query
from router.policy.decision import Decision, LegDecision, Picked
from router.policy.fleet import Fleet
from router.policy.place import POLICIES, check_policy, place, with_adapter

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
    "with_adapter",
]
