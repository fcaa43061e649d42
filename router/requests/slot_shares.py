"""How many of the decode nodes' sequence slots each tenant's requests take, as far as this router sent them. Pure.

Nodes that are full still take a request whose tenant has less than its share of slots: they preempt sequences of tenants that
have more (`common.engine.shares`). Each sample of a request (`n`) counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection


def fair_share(num_slots: float, demands: Collection[int]) -> float:
    """The most slots that one of the tenants that want `demands` gets by max-min fairness; infinite if all get what they want."""
    left = num_slots
    for position, demand in enumerate(sorted(demands)):
        share = left / (len(demands) - position)
        if demand > share:
            return share
        left -= demand
    return math.inf


class SlotShares:
    """The requests at the nodes, by tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, str] = {}
        """By request id, the name of its tenant."""
        self._counts = Counter[str]()

    def add(self, request_id: str, tenant: str) -> None:
        """A request goes to the nodes."""
        self._tenants[request_id] = tenant
        self._counts[tenant] += 1

    def remove(self, request_id: str) -> None:
        """A request is over; one that is not here is ignored."""
        tenant = self._tenants.pop(request_id, None)
        if tenant is not None:
            self._counts[tenant] -= 1
            if not self._counts[tenant]:
                del self._counts[tenant]

    def has_room(self, tenant: str, count: int, queued: Counter[str], num_slots: float) -> bool:
        """Whether `count` more requests of the tenant, behind those of all tenants that are `queued`, are within its share."""
        demands = self._counts + queued + Counter({tenant: count})
        return demands[tenant] <= fair_share(num_slots, demands.values())

    def below(self, queued: Counter[str], num_slots: float) -> set[str]:
        """The tenants with `queued` requests that have less than their share."""
        share = fair_share(num_slots, (self._counts + queued).values())
        return {tenant for tenant in queued if self._counts[tenant] + 1 <= share}
