"""A queue of requests in fair order, by priority and by each tenant's share. Pure.

Requests with a lower priority number leave first. Within one priority, the next request is one of the tenant that has
got the fewest prompt and answer tokens, and of that tenant's users, the one with the fewest (`fair_shares.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import NamedTuple

from common.control.messages import Adapter
from router.requests.fair_shares import FairShares
from router.requests.queued_request import QueuedRequest, Tenant


class TokensAhead(NamedTuple):
    """About how many tokens leave a queue before a new request does."""

    of_prompts: float = 0.0
    of_answers: float = 0.0


_Names = dict[str, dict[str, dict[str, QueuedRequest]]]
"""tenant's name -> user -> request id -> request, in order of arrival; without empty entries."""


class FairQueue:
    """Queued requests. Invariant: one user's requests of one priority leave in order of arrival."""

    def __init__(self) -> None:
        self._by_priority: dict[int, _Names] = {}
        self._by_id: dict[str, QueuedRequest] = {}
        self._shares = FairShares()
        self._shares_of_users: dict[str, FairShares] = {}
        """By tenant's name, of those with clocks."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    @property
    def requests(self) -> Collection[QueuedRequest]:
        """All of them, in order of arrival."""
        return self._by_id.values()

    @property
    def adapters(self) -> Collection[Adapter]:
        """The adapters that they need."""
        return {each.adapter for each in self._by_id.values() if each.adapter is not None}

    def push(self, queued: QueuedRequest) -> None:
        """Queue a request. Its id must be new."""
        assert queued.request_id not in self._by_id, queued.request_id
        self._by_id[queued.request_id] = queued
        name, user = queued.tenant
        users = self._by_priority.setdefault(queued.priority, {}).setdefault(name, {})
        users.setdefault(user, {})[queued.request_id] = queued

    def remove(self, request_id: str) -> None:
        """Take a request out; an id that is not here is ignored."""
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

    def pop(self, crowded: Collection[Adapter] = ()) -> str | None:
        """Take out the request whose turn it is. `crowded`: adapters whose nodes have no room; requests with these have no part
        in the turn.
        """
        for _, names in sorted(self._by_priority.items()):
            ready = _without(names, crowded) if crowded else names
            if ready:
                break
        else:
            return None
        name = self._shares.next(ready)
        users, shares_of_users = ready[name], self._shares_of_users.setdefault(name, FairShares())
        user = shares_of_users.next(users)
        queued = next(iter(users[user].values()))
        others = [each for each in self._by_priority.values() if each is not ready]
        self._shares.serve(name, queued.tokens, ready, others)
        shares_of_users.serve(user, queued.tokens, users, [each[name] for each in others if name in each])
        self.remove(queued.request_id)
        self._shares_of_users = {
            name: users for name, users in self._shares_of_users.items() if self._shares.has_clock(name)
        }
        return queued.request_id

    def expired(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed and that may be refused."""
        return [each.request_id for each in self._by_id.values() if each.deadline_s <= now_s and each.may_be_refused]

    def tokens_ahead(self, priority: int, tenant: Tenant) -> TokensAhead:
        """Estimate how many tokens leave the queue before a new request of `tenant` with this priority: all tokens of more urgent
        requests, and the tokens of equally urgent requests whose turn comes first. Prompt and answer tokens are assumed to leave
        in the ratio in which these requests have them.
        """
        if not self._by_id:
            return TokensAhead()
        urgent = prompts = answers = 0
        of_names, of_users = defaultdict[str, float](int), defaultdict[str, float](int)
        for _, of_prompt, of_answer, _, its_priority, (name, user), *_ in self._by_id.values():
            if its_priority > priority:
                continue
            prompts += of_prompt
            answers += of_answer
            if its_priority < priority:
                urgent += of_prompt + of_answer
                continue
            of_names[name] += of_prompt + of_answer
            if name == tenant.name:
                of_users[user] += of_prompt + of_answer
        of_names[tenant.name] = self._shares_of_users.get(tenant.name, FairShares()).tokens_ahead(tenant.user, of_users)
        part = (urgent + self._shares.tokens_ahead(tenant.name, of_names)) / max(1, prompts + answers)
        return TokensAhead(prompts * part, answers * part)


def _without(names: _Names, adapters: Collection[Adapter]) -> _Names:
    """The requests that need none of these adapters."""
    left: _Names = {}
    for name, users in names.items():
        for user, requests in users.items():
            ready = {key: queued for key, queued in requests.items() if queued.adapter not in adapters}
            if ready:
                left.setdefault(name, {})[user] = ready
    return left
