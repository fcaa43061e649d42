"""Routing policies: which nodes serve an attempt. Filters, scorers and a picker, and `place` over them. Pure."""

from router.policy.base import Memory, Policy, Query, Routing
from router.policy.decision import Decision, LegDecision
from router.policy.filters import with_adapter
from router.policy.fleet import Fleet
from router.policy.place import POLICIES, find_policy, place

__all__ = [
    "POLICIES",
    "Decision",
    "Fleet",
    "LegDecision",
    "Memory",
    "Policy",
    "Query",
    "Routing",
    "find_policy",
    "place",
    "with_adapter",
]
