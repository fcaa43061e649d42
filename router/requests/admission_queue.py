"""The admission queue: new requests wait here while all nodes have enough work, and leave in fair order.

Runs on the router's event loop. No node has seen a request that waits here, so it can still be refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from common.base.clock import Clock
from common.base.errors import Overloaded
from common.control.messages import Adapter, Role
from router.policy import Decision, Fleet, with_adapter
from router.requests.admission import Objectives, crowded, wait_s
from router.requests.fair_queue import FairQueue
from router.requests.full_queue import begun_of_others, victims
from router.requests.queued_request import QueuedRequest, Tenant
from router.requests.slot_shares import SlotShares

CallSoon = Callable[[Callable[[], None]], object]
"""Runs the callback after the current event has been handled."""


def _on_loop(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)


class QueueEntry(NamedTuple):
    """Why a request waits, and what is ahead of it."""

    reason: str
    ahead: int
    """Requests in the queue before it arrived."""
    ahead_s: float
    """Estimated time for the requests that leave the queue before it."""


class _Waiter(NamedTuple):
    tenant: str
    admit: Callable[[], None]
    refuse: Callable[[Overloaded], None]


class AdmissionQueue:
    """The queue before the nodes. When a request has left it, `admit()` is called, or `refuse(error)`."""

    def __init__(
        self,
        fleets: Mapping[Role, Fleet],
        objectives: Objectives,
        *,
        max_wait_s: float,
        clock: Clock,
        call_soon: CallSoon = _on_loop,
    ) -> None:
        self._prefill, self._decode = fleets["prefill"], fleets["decode"]
        self._objectives = objectives
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._call_soon = call_soon
        self._queue = FairQueue()
        self._slots = SlotShares()
        self._followers: dict[str, QueuedRequest] = {}
        """By id, requests that wait for a sibling before they enter. They only count."""
        self._waiters: dict[str, _Waiter] = {}
        self._release_due = False

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._queue or request_id in self._followers

    def enter(
        self,
        request: QueuedRequest,
        decision: Decision | None,
        *,
        admit: Callable[[], None],
        refuse: Callable[[Overloaded], None],
    ) -> QueueEntry | None:
        """Queue a new request, or return None if it may go to the nodes of `decision` at once; then no callback is called.

        Without a decision, or once a sibling was admitted, no objective applies. A tenant that has less than its share of the
        decode nodes' slots waits for no tenant that has more.

        Raises: Overloaded if it would miss an objective.
        """
        prefill, decode = self._prefill, self._decode
        tenant, siblings, adapter = request.tenant, request.siblings, request.adapter
        self._followers.pop(request.request_id, None)
        ahead, ahead_s = len(self._queue), wait_s(self._queue.tokens_ahead(request.priority, tenant), prefill, decode)
        reason, takes_its_share = self._crowded(adapter) or ("others wait before it" if ahead else ""), False
        if reason and self.has_free_share(tenant) and tenant.name not in self._queue.counts:
            reason = self._crowded(adapter, within_share=True)
            takes_its_share = not reason  # nodes make room for it: what they would estimate is too long
        if decision is not None and not takes_its_share and not (siblings is not None and siblings.admitted):
            self._objectives.check(decision, prefill, decode, ahead_s)
        if not reason:
            self._slots.add(request.request_id, tenant.name)
            return None
        answer_tokens = min(request.answer_tokens, int(decode.costs.output_tokens))
        self._queue.push(request._replace(answer_tokens=answer_tokens, deadline_s=self._clock() + self._max_wait_s))
        self._waiters[request.request_id] = _Waiter(tenant.name, admit, refuse)
        self.release_soon()
        return QueueEntry(reason, ahead, ahead_s)

    def follow(self, request: QueuedRequest) -> None:
        """A new request waits for a sibling before it enters: until then it counts as one of its tenant's."""
        self._followers[request.request_id] = request

    def has_free_share(self, tenant: Tenant, count: int = 1) -> bool:
        """Whether `count` more requests of this tenant are within its share of the decode nodes' slots."""
        return self._slots.has_room(tenant.name, count, self._queue.counts, self._num_slots)

    @property
    def _num_slots(self) -> float:
        return float(self._decode.columns.capacity.sum())

    def victims(self, tenant: Tenant, count: int, priority: int) -> list[str]:
        """The queued requests to refuse so that `tenant` gets up to `count` places of this priority."""
        return victims(self._queue.requests, self._followers.values(), tenant, count, priority)

    def begun_of_others(self, tenant: Tenant) -> int:
        """Number of other tenants' requests that may not be refused; they do not take the places of `tenant`."""
        return begun_of_others([*self._queue.requests, *self._followers.values()], tenant)

    def make_room(self, victims: Iterable[str]) -> None:
        """Refuse requests that `victims` named."""
        for victim in victims:
            self._give_up(
                victim,
                "the queue is full, and a more urgent request, or one of a client with fewer requests in it, took this place",
                1.0,
            )

    def remove(self, request_id: str) -> None:
        """The request is over; one that is not here is ignored."""
        self._followers.pop(request_id, None)
        self._queue.remove(request_id)
        self._waiters.pop(request_id, None)
        self._slots.remove(request_id)

    def release_soon(self) -> None:
        """Release requests after the current event: its request may not have carried out all its instructions yet."""
        if len(self._queue) and not self._release_due:
            self._release_due = True
            self._call_soon(self._release)

    def expire(self) -> None:
        """Refuse requests that have waited too long, unless a sibling was admitted."""
        for request_id in self._queue.expired(self._clock()):
            self._give_up(request_id, f"no node had room for {self._max_wait_s:g} s", self._max_wait_s / 4)
        self.release_soon()

    def _release(self) -> None:
        """Admit requests in fair order until the nodes have enough; first those of tenants that have less than their share."""
        self._release_due = False
        while len(self._queue):
            request_id = self._pop(self._slots.below(self._queue.counts, self._num_slots)) or self._pop()
            if request_id is None:
                return
            waiter = self._waiters.pop(request_id)
            self._slots.add(request_id, waiter.tenant)
            waiter.admit()

    def _pop(self, below_share: Collection[str] | None = None) -> str | None:
        """Take the request whose turn it is, of those that have room, out of the queue. `below_share`: only from these tenants."""
        crowded = partial(self._crowded, within_share=below_share is not None)
        if crowded() or (below_share is not None and not below_share):
            return None
        return self._queue.pop(list(filter(crowded, self._queue.adapters)), below_share)

    def _crowded(self, adapter: Adapter | None = None, *, within_share: bool = False) -> str:
        """Why a request must wait for all nodes, or for those that serve its adapter; empty if it need not wait."""
        prefill, decode = self._prefill, self._decode
        reason = crowded(prefill, decode, within_share=within_share)
        if reason or adapter is None:
            return reason
        able = with_adapter(prefill, adapter), with_adapter(decode, adapter)
        reason = crowded(*able, within_share=within_share)
        return reason and f"{reason}, of those with LoRA adapter {adapter.name!r}"

    def _give_up(self, request_id: str, reason: str, retry_after_s: float) -> None:
        self._queue.remove(request_id)
        self._waiters.pop(request_id).refuse(Overloaded(f"{reason}; try again shortly", retry_after_s=retry_after_s))
