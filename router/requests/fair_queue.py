"""A queue of requests in fair order, by priority and by each tenant's share. Pure.

Requests with a lower priority number leave first. Within one priority, the next request is one of the tenant that has
got the fewest prompt and answer tokens, and of that tenant's users, the one with the fewest (`fair_shares.py`). Each turn
looks at all requests: a router holds a few hundred (`--max-waiting`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from common.control.messages import Adapter
from router.requests.fair_shares import FairShares
from router.requests.queued_request import QueuedRequest, Tenant


class TokensAhead(NamedTuple):
    """About how many tokens leave a queue before a new request does."""

    of_prompts: float = 0.0
    of_answers: float = 0.0


class FairQueue:
    """Queued requests. Invariant: one user's requests of one priority leave in order of arrival."""

    def __init__(self) -> None:
        self._queued: dict[str, QueuedRequest] = {}
        """By id, in order of arrival."""
        self._shares = FairShares()
        self._shares_of_users: dict[str, FairShares] = {}
        """By tenant's name, of those with clocks."""

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._queued

    @property
    def requests(self) -> Collection[QueuedRequest]:
        """All of them, in order of arrival."""
        return self._queued.values()

    @property
    def adapters(self) -> Collection[Adapter]:
        """The adapters that they need."""
        return {each.adapter for each in self.requests if each.adapter is not None}

    @property
    def counts(self) -> Counter[str]:
        """Number of requests of each tenant."""
        return Counter([each.tenant.name for each in self.requests])

    def push(self, queued: QueuedRequest) -> None:
        """Queue a request. Its id must be new."""
        assert queued.request_id not in self._queued, queued.request_id
        self._queued[queued.request_id] = queued

    def remove(self, request_id: str) -> None:
        """Take a request out; an id that is not here is ignored."""
        self._queued.pop(request_id, None)

    def pop(self, crowded: Collection[Adapter] = (), tenants: Collection[str] | None = None) -> str | None:
        """Take out the request whose turn it is.

        `crowded`: adapters whose nodes have no room; requests with these have no part in the turn. `tenants`: only their
        requests have; None: all.
        """
        ready = [
            each
            for each in self.requests
            if each.adapter not in crowded and (tenants is None or each.tenant.name in tenants)
        ]
        if not ready:
            return None
        priority = min(each.priority for each in ready)
        turn: dict[str, dict[str, QueuedRequest]] = {}  # tenant's name -> user -> its first request
        for each in ready:
            if each.priority == priority:
                turn.setdefault(each.tenant.name, {}).setdefault(each.tenant.user, each)
        name = self._shares.next(turn)
        shares_of_users = self._shares_of_users.setdefault(name, FairShares())
        user = shares_of_users.next(turn[name])
        queued = turn[name][user]
        names = {each.tenant.name for each in self.requests}
        users = {each.tenant.user for each in self.requests if each.tenant.name == name}
        self._shares.serve(name, queued.tokens, turn.keys(), names)
        shares_of_users.serve(user, queued.tokens, turn[name].keys(), users)
        self.remove(queued.request_id)
        self._shares_of_users = {
            name: shares for name, shares in self._shares_of_users.items() if self._shares.has_clock(name)
        }
        return queued.request_id

    def expired(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed and that may be refused."""
        return [each.request_id for each in self.requests if each.deadline_s <= now_s and each.may_be_refused]

    def tokens_ahead(self, priority: int, tenant: Tenant) -> TokensAhead:
        """Estimate how many tokens leave the queue before a new request of `tenant` with this priority.

        These are all tokens of more urgent requests, and those of equally urgent requests whose turn comes first. Prompt and
        answer tokens are assumed to leave in the ratio in which these requests have them.
        """
        if not self._queued:
            return TokensAhead()
        urgent = prompts = answers = 0
        of_names, of_users = defaultdict[str, float](int), defaultdict[str, float](int)
        for _, of_prompt, of_answer, _, its_priority, (name, user), *_ in self.requests:
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
