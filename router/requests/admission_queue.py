"""New requests that no node has use for yet: they wait in the router, and leave in fair order.

Runs on the router's event loop. Whoever waits here has been seen by no node, so that it can still be refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from common.base.clock import Clock
from common.base.errors import Overloaded
from common.control.messages import Role
from router.policy import Decision, Fleet
from router.requests.admission import FairQueue, Objectives, QueuedRequest, crowded, enqueue_unless_idle
from router.requests.generation import Generation


class AdmissionQueue:
    """The queue before the nodes. `let_in(request_id)` is called for each whose turn has come, `refuse(request_id, error)`
    for each that is given up; both are out of the queue by then.
    """

    def __init__(
        self,
        fleets: Mapping[Role, Fleet],
        objectives: Objectives,
        *,
        max_wait_s: float,
        let_in: Callable[[str], None],
        refuse: Callable[[str, Overloaded], None],
        clock: Clock,
    ) -> None:
        self._prefill, self._decode = fleets["prefill"], fleets["decode"]
        self._objectives = objectives
        self._max_wait_s = max_wait_s
        self._let_in = let_in
        self._refuse = refuse
        self._clock = clock
        self._queue = FairQueue()
        self._will_look = False

    def __len__(self) -> int:
        return len(self._queue)

    def admit(self, generation: Generation, num_tokens: int, decision: Decision) -> bool:
        """Whether a new request of so many prompt tokens may go at once; if not, it waits here from now on.

        Raises: Overloaded where it would break an objective.
        """
        request, decode = generation.request, self._decode
        tokens = num_tokens + min(request.engine.sampling.max_tokens, int(decode.costs.output_tokens))
        until_s = self._clock() + self._max_wait_s
        newcomer = QueuedRequest(generation.request_id, tokens, until_s, request.engine.priority, request.tenant)
        why, ahead_s = enqueue_unless_idle(self._queue, newcomer, self._objectives, decision, self._prefill, decode)
        if not why:
            return True
        generation.story.add("queued", why, {"ahead": len(self._queue) - 1, "ahead_s": round(ahead_s, 3)})
        self.look_soon()
        return False

    def has_victim(self, tenant: str) -> bool:
        """Whether a newcomer of this tenant may take another one's place."""
        return self._queue.victim(tenant) is not None

    def make_room(self, tenant: str) -> None:
        """A newcomer takes the place of the tenant's that has taken the most, if that is more than its own."""
        victim = self._queue.victim(tenant)
        if victim is not None:
            self._give_up(victim, "the queue is full, and others have fewer requests in it", 1.0)

    def remove(self, request_id: str) -> None:
        """The request is over; one that is not here is ignored."""
        self._queue.remove(request_id)

    def look_soon(self) -> None:
        """Look once this event is dealt with: whoever ends may be in the middle of its own instructions."""
        if len(self._queue) and not self._will_look:
            self._will_look = True
            asyncio.get_running_loop().call_soon(self._look)

    def expire(self) -> None:
        """Refuse those that have waited too long."""
        for request_id in self._queue.expired(self._clock()):
            self._give_up(request_id, f"no node had room for {self._max_wait_s:g} s", self._max_wait_s / 4)
        self.look_soon()

    def _look(self) -> None:
        """Let requests go to the nodes, in fair order, while these have use for more."""
        self._will_look = False
        while len(self._queue) and not crowded(self._prefill, self._decode):
            request_id = self._queue.pop()
            if request_id is not None:
                self._let_in(request_id)

    def _give_up(self, request_id: str, reason: str, retry_after_s: float) -> None:
        self._queue.remove(request_id)
        self._refuse(request_id, Overloaded(f"{reason}; try again shortly", retry_after_s=retry_after_s))
