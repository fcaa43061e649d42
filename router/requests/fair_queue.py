"""A queue of requests in fair order, by priority and by each tenant's share. Pure.

Requests with a lower priority number leave first. Within one priority, the next request is one of the tenant that has
got the fewest prompt and answer tokens, and of that tenant's users, the one with the fewest (start-time fair queueing:
each has a clock that its requests' tokens advance; the clock of one that returns starts at the current virtual time).
Virtual time also advances by the share of each of those who wait: otherwise it would stand still while newcomers never
cease, such as a service's end users, and those who were served once would starve and be remembered for ever.

    Source: P. Goyal, H. Vin, H. Cheng, Start-Time Fair Queueing, 1996.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import chain
from typing import NamedTuple


class Tenant(NamedTuple):
    """Whose share a request counts against. Clients choose `user` freely, so it only divides the share of `name`."""

    name: str = ""
    """A hash of the API key, or the client's address where there are no keys."""
    user: str = ""


NOBODY = Tenant()


class Siblings:
    """The samples, or the parts of a pooling call, of one client's request. Invariant: once one was admitted, none is refused:
    the client may have tokens already, and nodes have computed for it.
    """

    __slots__ = ("admitted",)

    def __init__(self) -> None:
        self.admitted = False
        """Whether one of them was."""


class QueuedRequest(NamedTuple):
    """A request that waits in the router."""

    request_id: str
    tokens: int
    """Estimated cost: prompt and answer tokens."""
    deadline_s: float
    priority: int = 0
    tenant: Tenant = NOBODY
    siblings: Siblings | None = None

    @property
    def may_be_refused(self) -> bool:
        """No sibling was admitted."""
        return self.siblings is None or not self.siblings.admitted


class FairQueue:
    """Queued requests. Invariant: one user's requests of one priority leave in order of arrival."""

    def __init__(self) -> None:
        self._by_priority: dict[int, dict[Tenant, dict[str, QueuedRequest]]] = {}
        """priority -> tenant -> request id -> request, in order of arrival; without empty entries."""
        self._by_id: dict[str, QueuedRequest] = {}
        self._followers: dict[str, QueuedRequest] = {}
        """By id, requests that wait for a sibling before they are queued. They only count."""
        self._shares = _Shares()
        self._shares_of_users: dict[str, _Shares] = {}
        """By tenant's name, of those with clocks."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id or request_id in self._followers

    def push(self, queued: QueuedRequest) -> None:
        """Queue a request. Its id must be new."""
        assert queued.request_id not in self._by_id, queued.request_id
        self._followers.pop(queued.request_id, None)
        self._by_id[queued.request_id] = queued
        self._by_priority.setdefault(queued.priority, {}).setdefault(queued.tenant, {})[queued.request_id] = queued

    def follow(self, follower: QueuedRequest) -> None:
        """A request waits for a sibling before it is queued. Until then it counts as one of its tenant's."""
        self._followers[follower.request_id] = follower

    def remove(self, request_id: str) -> None:
        """Take a request out; an id that is not here is ignored."""
        self._followers.pop(request_id, None)
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
        queued_tenants = {tenant for each in self._by_priority.values() for tenant in each}
        names = dict.fromkeys(tenant.name for tenant in tenants)
        name = self._shares.next(names)
        of_name = dict.fromkeys(tenant.user for tenant in tenants if tenant.name == name)
        users = self._shares_of_users.setdefault(name, _Shares())
        tenant = Tenant(name, users.next(of_name))
        queued = next(iter(tenants[tenant].values()))
        self.remove(queued.request_id)
        self._shares.serve(name, queued.tokens, names, {each.name for each in queued_tenants})
        users.serve(tenant.user, queued.tokens, of_name, {each.user for each in queued_tenants if each.name == name})
        self._shares_of_users = {
            name: users for name, users in self._shares_of_users.items() if self._shares.has_clock(name)
        }
        return queued.request_id

    def expired(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed and that may be refused."""
        return [each.request_id for each in self._by_id.values() if each.deadline_s <= now_s and each.may_be_refused]

    def begun_of_others(self, tenant: Tenant) -> int:
        """Requests of other tenants that may not be refused: these do not take the places of `tenant`."""
        counted = chain(self._by_id.values(), self._followers.values())
        return sum(not each.may_be_refused and each.tenant.name != tenant.name for each in counted)

    def tokens_ahead(self, priority: int, tenant: Tenant) -> float:
        """About how many tokens leave before a new request of this priority and tenant: those of more urgent requests, and what
        the others of its priority get until its turn.
        """
        if not self._by_id:
            return 0.0
        urgent = sum(queued.tokens for queued in self._by_id.values() if queued.priority < priority)
        of_names, of_users = Counter[str](), Counter[str]()
        for each, requests in self._by_priority.get(priority, {}).items():
            tokens = sum(queued.tokens for queued in requests.values())
            of_names[each.name] += tokens
            if each.name == tenant.name:
                of_users[each.user] += tokens
        users = self._shares_of_users.get(tenant.name, _Shares())
        own = users.tokens_ahead(tenant.user, of_users[tenant.user], of_users)
        return urgent + self._shares.tokens_ahead(tenant.name, own, of_names)

    def victims(self, tenant: Tenant, count: int, priority: int = 0) -> list[str]:
        """The requests to refuse, one after another, so that `tenant` gets up to `count` places of this priority in a full queue. Each
        is the latest, least urgent one of the user with the most requests, of the tenant with the most if it has at least two
        more than `tenant`; else of `tenant` itself, if that user has at least two more; else a less urgent one of the same
        user. Those that may not be refused only count.
        """
        users = Counter(follower.tenant for follower in self._followers.values())
        for tenants in self._by_priority.values():
            users.update({each: len(requests) for each, requests in tenants.items()})
        names = Counter[str]()
        for each, number in users.items():
            names[each.name] += number
        left: dict[Tenant, list[QueuedRequest]] = {}
        found: list[str] = []

        def can_lose(each: Tenant) -> bool:
            if each not in left:
                left[each] = self._refusable(each)
            return bool(left[each])

        while len(found) < count:
            ordered = sorted(users, key=lambda each: (names[each.name], users[each]), reverse=True)
            others = (each for each in ordered if names[each.name] >= names[tenant.name] + 2)
            own = (each for each in ordered if each.name == tenant.name and users[each] >= users[tenant] + 2)
            loser = next(filter(can_lose, chain(others, own)), None)
            if loser is None:
                loser = tenant
                is_urgent = max(self._by_priority, default=priority) > priority
                if not (is_urgent and can_lose(loser) and left[loser][-1].priority > priority):
                    break
            found.append(left[loser].pop().request_id)
            for each, change in ((loser, -1), (tenant, 1)):
                names[each.name] += change
                users[each] += change
        return found

    def _refusable(self, tenant: Tenant) -> list[QueuedRequest]:
        """The requests of a user that may be refused, the most urgent and earliest first."""
        ordered = (self._by_priority[priority].get(tenant, {}) for priority in sorted(self._by_priority))
        return [queued for requests in ordered for queued in requests.values() if queued.may_be_refused]


class _Shares:
    """Clocks of those who share."""

    def __init__(self) -> None:
        self._clocks: dict[str, float] = {}
        """The clocks that are ahead of `_now`, and those of all who waited at a turn and still did at the last one."""
        self._now = 0.0
        """Virtual time."""

    def next(self, waiting: Collection[str]) -> str:
        """Whose turn it is."""
        for name in waiting:
            self._clocks.setdefault(name, self._now)
        return min(waiting, key=self._clocks.__getitem__)

    def tokens_ahead(self, name: str, own: float, queued: Mapping[str, float]) -> float:
        """What is served before a new request of `name`: `own` tokens of its other ones, and of everybody else's `queued` tokens
        those until their clock is where it begins.
        """
        begins = self._clocks.get(name, self._now) + own
        left = {each: begins - self._clocks.get(each, self._now) for each in queued if each != name}
        return own + sum(min(queued[each], max(0.0, until)) for each, until in left.items())

    def serve(self, name: str, tokens: int, waiting: Collection[str], queued: Collection[str]) -> None:
        """One of those who wait, as for `next`, gets its turn. `queued`: they, and those with less urgent requests only, whose
        clocks keep their distance to virtual time: they had no part in this turn.
        """
        begun, before = self._clocks[name], self._now
        self._clocks[name] = begun + tokens
        self._now = max(begun, before + tokens / (1 + len(waiting)))
        passed = self._now - before
        clocks = {
            each: clock if each in waiting or each not in queued else clock + passed
            for each, clock in self._clocks.items()
        }
        self._clocks = {each: clock for each, clock in clocks.items() if clock > self._now or each in queued}

    def has_clock(self, name: str) -> bool:
        return name in self._clocks
