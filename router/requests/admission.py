"""Who may go to the nodes now: objectives, a bounded queue, priorities, fair shares. Pure; the router's event loop.

A node that has more waiting than it can use soon serves nobody faster, and what waits there can no longer be put in
order. So while every node of a role is in that state, requests wait here. They leave by priority (lower first); of one
priority the tenant goes first that was given the least prompt and answer tokens (start-time fair queueing: each tenant
has a clock that its requests' tokens advance, and one that comes back starts at the present).

    Source: P. Goyal, H. Vin, H. Cheng, Start-Time Fair Queueing, 1996.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.base.errors import Overloaded
from router.policy import Decision, Fleet
from router.policy.costs import Costs
from router.policy.fleet import FEW, Figures

USEFUL_QUEUE_S = 1.0
"""A prefill node with so much to compute has no use for more yet: more than the time between its reports."""
_SPARE = 1.25
"""A node has no use for more than so many times the requests that it can run."""


@dataclass(frozen=True)
class Objectives:
    """What clients are promised; 0: nothing."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def check(self, decision: Decision, prefill: Fleet, decode: Fleet, ahead_s: float) -> None:
        """Refuse early what would probably come too late. `ahead_s`: the wait in this router before it goes.

        A node without any work is always used, whatever the estimate: nothing would be better later, and an estimate
        that is wrong is put right by trying. Nothing is refused before anything was measured.
        Raises: Overloaded with the reason.
        """
        if not (self.ttft_s or self.tpot_s):
            return
        ttft_s, tpot_s = decision.ttft_s + ahead_s, decision.tpot_s
        source = decision.prefill
        decodes = decode.node(decision.decode.picked.incarnation).requests > 0
        waits = decodes if source is None else prefill.node(source.picked.incarnation).requests > 0
        if 0 < self.ttft_s < ttft_s and (waits or ahead_s > 0) and max(prefill.costs.prefills, decode.costs.prefills):
            raise Overloaded(
                f"the first token would take about {ttft_s:.1f} s, longer than the {self.ttft_s:g} s that are the "
                "objective; try again later",
                retry_after_s=ttft_s - self.ttft_s,
            )
        if 0 < self.tpot_s < tpot_s and decodes and decode.costs.steps:
            raise Overloaded(
                f"each token would take about {tpot_s:.3f} s, longer than the {self.tpot_s:g} s that are the "
                "objective; try again later",
                retry_after_s=decode.costs.output_tokens * (tpot_s - self.tpot_s),
            )


def crowded(prefill: Fleet, decode: Fleet) -> str:
    """Why no node has use for another request now; empty if one has."""
    if decode.nodes and _all(_running, decode):
        return "every decode node has more requests than it can run"
    if prefill.nodes and _all(_computing, prefill):
        queue_s = float(prefill.columns.slow_backlog.min()) * prefill.costs.queued_token_s
        return f"every prefill node has work for {queue_s:.1f} s"
    return ""


def _running(at: Figures[Any], costs: Costs) -> Any:
    """Whether a decode node, or each, has as many requests as it has use for."""
    return at.requests >= at.capacity * _SPARE


def _computing(at: Figures[Any], costs: Costs) -> Any:
    """Whether a prefill node, or each, has."""
    queued = (at.slow_backlog * costs.queued_token_s >= USEFUL_QUEUE_S) & (at.requests >= 2)
    return queued | (at.requests >= at.capacity * _SPARE)


def _all(full: Callable[[Figures[Any], Costs], Any], fleet: Fleet) -> bool:
    """Nearly always one of the first nodes is not full, and that is quickly seen."""
    for at in fleet.nodes[:FEW]:
        if not full(at, fleet.costs):
            return False
    return len(fleet.nodes) <= FEW or bool(full(fleet.columns, fleet.costs).all())


def wait_s(tokens: float, prefill: Fleet, decode: Fleet) -> float:
    """How long `tokens` of requests that wait here will keep those busy that compute prompts: without prefill nodes the
    decode nodes, at their own pace once it was measured.
    """
    if not tokens:
        return 0.0
    computing = prefill if len(prefill) or not decode.costs.prefills else decode
    return tokens * computing.costs.queued_token_s / max(1, len(prefill) or len(decode))


class QueuedRequest(NamedTuple):
    """A request that waits in the router."""

    request_id: str
    tokens: int
    """That it will probably cost."""
    deadline_s: float
    priority: int = 0
    tenant: str = ""


class FairQueue:
    """Queued requests. Invariant: one tenant's requests of one priority leave in order of arrival."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, dict[str, QueuedRequest]]] = {}
        """priority -> tenant -> request id -> request, in order of arrival; no empty ones."""
        self._where: dict[str, QueuedRequest] = {}
        self._clocks: dict[str, float] = {}
        """Tenants whose clock is ahead of `_now`."""
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._where)

    def push(self, held: QueuedRequest) -> None:
        """Queue a request. Its id must be new."""
        assert held.request_id not in self._where, held.request_id
        self._where[held.request_id] = held
        self._held.setdefault(held.priority, {}).setdefault(held.tenant, {})[held.request_id] = held

    def remove(self, request_id: str) -> None:
        """Take a request out; one that is not here is ignored."""
        held = self._where.pop(request_id, None)
        if held is None:
            return
        tenants = self._held[held.priority]
        del tenants[held.tenant][request_id]
        if not tenants[held.tenant]:
            del tenants[held.tenant]
        if not tenants:
            del self._held[held.priority]

    def pop(self) -> str | None:
        """The request whose turn it is."""
        if not self._held:
            return None
        tenants = self._held[min(self._held)]
        tenant = min(tenants, key=self._clock)
        held = next(iter(tenants[tenant].values()))
        self.remove(held.request_id)
        self._now = self._clock(tenant)
        self._clocks[tenant] = self._now + held.tokens
        self._clocks = {name: clock for name, clock in self._clocks.items() if clock > self._now}
        return held.request_id

    def expired(self, now_s: float) -> list[str]:
        """Requests whose deadline has passed."""
        return [held.request_id for held in self._where.values() if held.deadline_s <= now_s]

    def tokens_ahead(self, priority: int) -> int:
        """Of the requests that go before a new one of this priority."""
        return sum(held.tokens for held in self._where.values() if held.priority <= priority)

    def victim(self, tenant: str) -> str | None:
        """Who should go so that `tenant` gets a place in a full queue: the latest, least urgent request of whoever has
        the most, if that is at least two more than `tenant` has.
        """
        counts: dict[str, int] = {}
        for held in self._where.values():
            counts[held.tenant] = counts.get(held.tenant, 0) + 1
        greedy = max(counts, key=lambda name: counts[name], default=tenant)
        if counts.get(greedy, 0) < counts.get(tenant, 0) + 2:
            return None
        theirs = [held for held in self._where.values() if held.tenant == greedy]
        return max(enumerate(theirs), key=lambda item: (item[1].priority, item[0]))[1].request_id

    def _clock(self, tenant: str) -> float:
        return max(self._clocks.get(tenant, 0.0), self._now)


def enqueue_unless_idle(
    queue: FairQueue, newcomer: QueuedRequest, objectives: Objectives, decision: Decision, prefill: Fleet, decode: Fleet
) -> tuple[str, float]:
    """Queue a new request unless it may go at once. Returns why it waits (empty: it may go) and about how long those
    before it take, in seconds.

    Raises: Overloaded where it would come too late.
    """
    ahead_s = wait_s(queue.tokens_ahead(newcomer.priority), prefill, decode)
    objectives.check(decision, prefill, decode, ahead_s)
    why = crowded(prefill, decode) or ("others wait before it" if len(queue) else "")
    if why:
        queue.push(newcomer)
    return why, ahead_s
