"""A queue of requests in fair order, by priority and by each tenant's share. Pure.

Requests with a lower priority number leave first. Within one priority, the next request is one of the tenant that has
got the fewest prompt and answer tokens (start-time fair queueing: each tenant has a clock that its requests' tokens
advance; the clock of a tenant that returns starts at the current virtual time).

    Source: P. Goyal, H. Vin, H. Cheng, Start-Time Fair Queueing, 1996.
"""

from __future__ import annotations

from typing import NamedTuple


class QueuedRequest(NamedTuple):
    """A request that waits in the router."""

    request_id: str
    tokens: int
    """Estimated cost: prompt and answer tokens."""
    deadline_s: float
    priority: int = 0
    tenant: str = ""


class FairQueue:
    """Queued requests. Invariant: one tenant's requests of one priority leave in order of arrival."""

    def __init__(self) -> None:
        self._by_priority: dict[int, dict[str, dict[str, QueuedRequest]]] = {}
        """priority -> tenant -> request id -> request, in order of arrival; without empty entries."""
        self._by_id: dict[str, QueuedRequest] = {}
        self._clocks: dict[str, float] = {}
        """The clocks of those tenants whose clock is ahead of `_now`."""
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def push(self, queued: QueuedRequest) -> None:
        """Queue a request. Its id must be new."""
        assert queued.request_id not in self._by_id, queued.request_id
        self._by_id[queued.request_id] = queued
        self._by_priority.setdefault(queued.priority, {}).setdefault(queued.tenant, {})[queued.request_id] = queued

    def remove(self, request_id: str) -> None:
        """Take a request out; an id that is not queued is ignored."""
        queued = self._by_id.pop(request_id, None)
        if queued is None:
            return
        tenants = self._by_priority[queued.priority]
        del tenants[queued.tenant][request_id]
        if not tenants[queued.tenant]:
            del tenants[queued.tenant]
        if not tenants:
            del self._by_priority[queued.priority]

    def pop(self) -> str | None:
        """Take out the request whose turn it is."""
        if not self._by_priority:
            return None
        tenants = self._by_priority[min(self._by_priority)]
        tenant = min(tenants, key=self._clock)
        queued = next(iter(tenants[tenant].values()))
        self.remove(queued.request_id)
        self._now = self._clock(tenant)
        self._clocks[tenant] = self._now + queued.tokens
        self._clocks = {name: clock for name, clock in self._clocks.items() if clock > self._now}
        return queued.request_id

    def expired(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed."""
        return [queued.request_id for queued in self._by_id.values() if queued.deadline_s <= now_s]

    def tokens_ahead(self, priority: int) -> int:
        """Tokens of the requests that leave before a new one of this priority."""
        return sum(queued.tokens for queued in self._by_id.values() if queued.priority <= priority)

    def victim(self, tenant: str) -> str | None:
        """The request to refuse so that `tenant` gets a place in a full queue: the latest, least urgent request of the tenant
        with the most requests, if it has at least two more than `tenant`.
        """
        counts: dict[str, int] = {}
        for queued in self._by_id.values():
            counts[queued.tenant] = counts.get(queued.tenant, 0) + 1
        greedy = max(counts, key=lambda name: counts[name], default=tenant)
        if counts.get(greedy, 0) < counts.get(tenant, 0) + 2:
            return None
        theirs = [queued for queued in self._by_id.values() if queued.tenant == greedy]
        return max(enumerate(theirs), key=lambda item: (item[1].priority, item[0]))[1].request_id

    def _clock(self, tenant: str) -> float:
        return max(self._clocks.get(tenant, 0.0), self._now)
