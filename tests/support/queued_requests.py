"""Requests that wait in a router."""

from __future__ import annotations

from router.requests.queued_request import QueuedRequest, Siblings, Tenant


def queued_request(
    name: str,
    tenant: str = "",
    priority: int = 0,
    tokens: int = 10,
    deadline_s: float = 1.0,
    user: str = "",
    siblings: Siblings | None = None,
) -> QueuedRequest:
    """A request with `tokens` prompt tokens."""
    return QueuedRequest(name, tokens, 0, deadline_s, priority, Tenant(tenant, user), siblings)
