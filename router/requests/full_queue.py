"""Chooses the queued requests that are refused when the queue is full. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import chain
from operator import attrgetter

from router.requests.queued_request import QueuedRequest, Tenant


def victims(
    queued: Collection[QueuedRequest],
    followers: Collection[QueuedRequest],
    tenant: Tenant,
    count: int,
    priority: int = 0,
) -> list[str]:
    """The requests to refuse so that `tenant` gets up to `count` places of this priority in a full queue, in this order:

    - of the tenant with the most requests, if it has at least two more than `tenant`: the latest, least urgent one of its user
      with the most;
    - of `tenant` itself: the same, if that user has at least two more than its own;
    - a less urgent one of the same user.

    `queued`: in order of arrival. `followers`: those that wait for a sibling before they are queued. These, and those that may
    not be refused, count but are never named.
    """
    users = Counter(each.tenant for each in chain(queued, followers))
    names = Counter[str]()
    for each, number in users.items():
        names[each.name] += number
    left: dict[Tenant, list[QueuedRequest]] = {}
    for each in sorted(queued, key=attrgetter("priority")):
        if each.may_be_refused:
            left.setdefault(each.tenant, []).append(each)
    others, own, found = list(left), [each for each in left if each.name == tenant.name], list[str]()
    while len(found) < count:
        # A user who has too few to lose one stays out: only `tenant` gets more.
        others = [each for each in others if left[each] and names[each.name] >= names[tenant.name] + 2]
        own = [each for each in own if left[each] and users[each] >= users[tenant] + 2]
        loser = max(others or own, key=lambda each: (names[each.name], users[each]), default=None)
        if loser is None:
            if not left.get(tenant) or left[tenant][-1].priority <= priority:
                break
            loser = tenant
        found.append(left[loser].pop().request_id)
        for each, change in ((loser, -1), (tenant, 1)):
            names[each.name] += change
            users[each] += change
    return found


def begun_of_others(waiting: Collection[QueuedRequest], tenant: Tenant) -> int:
    """Number of requests of other tenants that may not be refused: these do not take the places of `tenant`."""
    return sum(not each.may_be_refused and each.tenant.name != tenant.name for each in waiting)
