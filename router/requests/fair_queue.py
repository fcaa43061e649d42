"""A queue of requests in fair order, by priority and by each tenant's share. Pure.

Requests with a lower priority number leave first. Within one priority, the next request is one of the tenant that has
got the fewest prompt and answer tokens, and of that tenant's users, the one with the fewest (start-time fair queueing:
each has a clock that its requests' tokens advance; the clock of one that returns starts at the current virtual time).
Virtual time also advances by the share of each of those who wait: otherwise it would stand still while newcomers never
cease, such as a service's end users, and those who were served once would starve and be remembered for ever.

    Source: P. Goyal, H. Vin, H. Cheng, Start-Time Fair Queueing, 1996.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import attrgetter
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
        self._by_priority: dict[int, dict[str, dict[str, dict[str, QueuedRequest]]]] = {}
        """priority -> tenant's name -> user -> request id -> request, in order of arrival; without empty entries."""
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
        name, user = queued.tenant
        users = self._by_priority.setdefault(queued.priority, {}).setdefault(name, {})
        users.setdefault(user, {})[queued.request_id] = queued

    def follow(self, follower: QueuedRequest) -> None:
        """A request waits for a sibling before it is queued. Until then it counts as one of its tenant's."""
        self._followers[follower.request_id] = follower

    def remove(self, request_id: str) -> None:
        """Take a request out; an id that is not here is ignored."""
        self._followers.pop(request_id, None)
        queued = self._by_id.pop(request_id, None)
        if queued is None:
            return
        name, user = queued.tenant
        names = self._by_priority[queued.priority]
        users = names[name]
        del users[user][request_id]
        if not users[user]:
            del users[user]
        if not users:
            del names[name]
        if not names:
            del self._by_priority[queued.priority]

    def pop(self) -> str | None:
        """Take out the request whose turn it is."""
        if not self._by_priority:
            return None
        names = self._by_priority[min(self._by_priority)]
        name = self._shares.next(names)
        users, shares_of_users = names[name], self._shares_of_users.setdefault(name, _Shares())
        user = shares_of_users.next(users)
        queued = next(iter(users[user].values()))
        less_urgent = [each for each in self._by_priority.values() if each is not names]
        self._shares.serve(name, queued.tokens, names, less_urgent)
        shares_of_users.serve(user, queued.tokens, users, [each[name] for each in less_urgent if name in each])
        self.remove(queued.request_id)
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
        urgent = 0
        of_names, of_users = defaultdict[str, float](int), defaultdict[str, float](int)
        for _, tokens, _, its_priority, (name, user), _ in self._by_id.values():
            if its_priority < priority:
                urgent += tokens
            elif its_priority == priority:
                of_names[name] += tokens
                if name == tenant.name:
                    of_users[user] += tokens
        of_names[tenant.name] = self._shares_of_users.get(tenant.name, _Shares()).tokens_ahead(tenant.user, of_users)
        return urgent + self._shares.tokens_ahead(tenant.name, of_names)

    def victims(self, tenant: Tenant, count: int, priority: int = 0) -> list[str]:
        """The requests to refuse, one after another, so that `tenant` gets up to `count` places of this priority in a full queue. Each
        is the latest, least urgent one of the user with the most requests, of the tenant with the most if it has at least two
        more than `tenant`; else of `tenant` itself, if that user has at least two more; else a less urgent one of the same
        user. Those that may not be refused only count.
        """
        users = Counter(each.tenant for each in chain(self._by_id.values(), self._followers.values()))
        names = Counter[str]()
        for each, number in users.items():
            names[each.name] += number
        left: dict[Tenant, list[QueuedRequest]] = {}
        for each in sorted(self._by_id.values(), key=attrgetter("priority")):
            if each.may_be_refused:
                left.setdefault(each.tenant, []).append(each)
        others, own, found = list(left), [each for each in left if each.name == tenant.name], list[str]()
        while len(found) < count:
            # Whoever is too few for a turn stays so: nobody but `tenant` gets more.
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

    def tokens_ahead(self, name: str, queued: Mapping[str, float]) -> float:
        """Number of tokens that are served before a new request of `name`: all that `name` has queued, and of every other name as
        many as its clock lags behind the clock at which the new request starts, at most those it has queued.
        """
        own = queued.get(name, 0.0)
        begins = self._clocks.get(name, self._now) + own
        ahead = own
        for each, tokens in queued.items():
            if each != name:
                ahead += min(tokens, max(0.0, begins - self._clocks.get(each, self._now)))
        return ahead

    def serve(self, name: str, tokens: int, waiting: Collection[str], less_urgent: Sequence[Collection[str]]) -> None:
        """One of those who wait, as for `next`, gets its turn. `less_urgent`: those who wait with less urgent requests. If they have
        no others, their clocks keep their distance to virtual time: they had no part in this turn.
        """
        begun, before = self._clocks[name], self._now
        self._clocks[name] = begun + tokens
        self._now = max(begun, before + tokens / (1 + len(waiting)))
        apart = set(chain.from_iterable(less_urgent)).difference(waiting)
        for each in apart & self._clocks.keys():
            self._clocks[each] += self._now - before
        self._clocks = {
            each: clock for each, clock in self._clocks.items() if clock > self._now or each in waiting or each in apart
        }

    def has_clock(self, name: str) -> bool:
        return name in self._clocks
