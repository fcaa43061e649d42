"""Carries out the instructions of one request's state machine: the queue, timers, sending, and the request's story.

Runs on the router's event loop. The dispatcher feeds events.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from common.base.errors import KvRelayError, Overloaded, Unavailable
from common.control.messages import Abort, Adapter
from router.policy import Decision
from router.requests import flow_events as f
from router.requests.placed_request import PlacedRequest
from router.requests.queued_request import QueuedRequest, Tenant
from router.requests.router_state import RouterState
from router.requests.story import Story

log = logging.getLogger(__name__)

_Flow = TypeVar("_Flow", bound=PlacedRequest)


class RunningRequest(Generic[_Flow]):
    """A generation, or a part of a pooling call. Call `enter`, then `start`.

    Invariants: `_notify` is called when the request has ended; from then on it is in no table of the router, and no node
    works on it. It waits for at most one thing at a time. `start`, `feed`, `on_ready` and `on_refused` never raise: a bug
    ends this request and does not reach the caller.
    """

    def __init__(
        self,
        request_id: str,
        flow: _Flow,
        router: RouterState,
        story: Story,
        tenant: Tenant,
        priority: int,
        deadline_s: float,
    ) -> None:
        """`deadline_s`: when the request must be over."""
        self.request_id = request_id
        self.flow = flow
        self.story = story
        flow.story = story.events
        self._router = router
        self.tenant, self._priority = tenant, priority
        self._deadline_s = deadline_s
        self.outcome: Any = None
        """How the request ended; None while it runs."""
        self._events: deque[f.Event] = deque()
        self._busy = False

    # -- what a subclass provides

    def prepare(self, choose: f.Choose) -> f.Answer:
        """Choose nodes, or say what the request waits for."""
        raise NotImplementedError

    def admit(self) -> None:
        """Count the attempt at the nodes that `prepare` chose last."""
        raise NotImplementedError

    def _on_sent(self) -> None:
        """A node has got the attempt."""

    def _leg(self, incarnation: str) -> tuple[float, int, float]:
        """(prompt tokens to compute, KV blocks to hold, prefill work in seconds) of the attempt at this incarnation."""
        raise NotImplementedError

    _OUTCOME: ClassVar[Callable[..., Any]]
    """Makes an `outcome`: with `error=...`, or, of a request whose client has disconnected, with nothing."""

    def _record_end(self, outcome: Any) -> None:
        """Add the end to the story and to the metrics."""
        raise NotImplementedError

    def _notify(self) -> None:
        """Tell the HTTP side that the request has ended."""
        raise NotImplementedError

    # -- events

    def enter(self) -> None:
        """Enter the router's tables; its end takes the request out of all of them."""
        self._router.enter(self.request_id, self, self.story)

    def start(self) -> None:
        """Place the first attempt; call once."""
        if self.outcome is None:
            self._run(self.flow.start())

    def cancel(self) -> None:
        """The client disconnected: abort what nodes do for the request. Nothing happens if it has ended."""
        if self.outcome is None:
            self.feed(f.ClientGone())

    def on_ready(self) -> None:
        """What the request waited for has happened."""
        self.feed(f.Ready())

    def on_refused(self, error: KvRelayError) -> None:
        """What the request waited for will not happen."""
        self.feed(f.GiveUp(error))

    def feed(self, event: f.Event) -> None:
        """Handle one event, after all instructions of the one that is being handled.

        Otherwise an abort could overtake the request that it aborts.
        """
        self._events.append(event)
        if not self._busy:
            self._run([])

    def _run(self, instructions: f.Instructions) -> None:
        self._busy = True
        pending = deque(instructions)
        try:
            while pending or self._events:
                if pending:
                    instruction = pending.popleft()
                    self._EXECUTE[type(instruction)](self, instruction)
                else:
                    pending += self.flow.handle(self._events.popleft())
        except Exception:
            log.exception("%s failed because of a bug", self.flow.key)
            try:
                self._break_off(pending)
            except Exception:
                log.exception("%s could not be ended cleanly", self.flow.key)
        finally:
            self._busy = False

    def _break_off(self, pending: Iterable[f.Instruction]) -> None:
        """End at once after a bug, even if the flow has ended already: close the legs, tell the client."""
        self._events.clear()
        error = KvRelayError("internal error in the router")
        for instruction in [*pending, *self.flow.handle(f.GiveUp(error))]:
            if isinstance(instruction, f.Release) or (
                isinstance(instruction, f.Send) and isinstance(instruction.message, Abort)
            ):
                try:
                    self._EXECUTE[type(instruction)](self, instruction)
                except Exception:
                    log.exception("%s: closing a leg failed", self.flow.key)
        self._events.clear()
        if self.outcome is None:
            self._end(self._OUTCOME(error=error))
        else:
            self._notify()

    def _end(self, outcome: Any) -> None:
        """End the request and remove it from all tables. A second call does nothing."""
        if self.outcome is not None:  # a stop string in the chunk that ends the attempt has decided it
            return
        self.outcome = outcome
        self._router.leave(self.request_id)
        self._record_end(outcome)
        self._router.stories.end(self.story)
        self._notify()

    # -- answers to `Choose`

    def _queued(self, prompt_tokens: int = 0, max_tokens: int = 0, adapter: Adapter | None = None) -> QueuedRequest:
        """The request as the admission queue knows it."""
        siblings = self.flow.siblings
        return QueuedRequest(
            self.request_id, prompt_tokens, max_tokens, math.inf, self._priority, self.tenant, siblings, adapter
        )

    def _enter_queue(self, decision: Decision | None, request: QueuedRequest) -> f.Queued | f.GiveUp | None:
        """None if a new request may go to the nodes at once; otherwise it waits in the admission queue, or is refused."""
        queue = self._router.admission_queue
        try:
            entry = queue.enter(request, decision, admit=self.on_ready, refuse=self.on_refused)
        except Overloaded as error:
            self.story.add("refused", error.message, decision)
            return f.GiveUp(error)
        if entry is None:
            return None
        self.story.add("queued", entry.reason, {"ahead": entry.ahead, "ahead_s": round(entry.ahead_s, 3)})
        return f.Queued()

    def _no_node(self, error: Unavailable) -> f.NoNode:
        error.__traceback__ = None  # its frames refer to the request, which would wait for the garbage collector
        return f.NoNode(error, self._router.clock(), self._router.nodes.rejoining)

    def _timeout_s(self) -> float:
        """What is left until the deadline."""
        return max(0.001, self._deadline_s - self._router.clock())

    # -- instructions

    def _choose(self, choose: f.Choose) -> None:
        self._events.append(self.prepare(choose))

    def _await_node(self, wait: f.AwaitNode) -> None:
        self.story.add("waiting_for_node", wait.error.message)
        self._router.retry_wait.until_node(
            self.request_id, wait.wait_s, wake=self.on_ready, give_up=partial(self.on_refused, wait.error)
        )

    def _back_off(self, backoff: f.BackOff) -> None:
        self.story.add("backoff", backoff.why, {"seconds": round(backoff.wait_s, 3)})
        self._router.retry_wait.pause(self.request_id, backoff.wait_s, self.on_ready)

    def _send(self, send: f.Send) -> None:
        peer, message = send
        try:
            if isinstance(message, Abort):
                self._router.nodes.send(peer.incarnation, message)
                return
            tokens, blocks, work_s = self._leg(peer.incarnation)
            self._router.nodes.send(peer.incarnation, message, tokens=tokens, blocks=blocks, work_s=work_s)
            self.story.add("sent", type(message).__name__, {"node": peer.node_id})
            self._on_sent()
        except Unavailable as error:
            self._events.append(f.NodeLost(peer.incarnation, error.message))

    def _release(self, leg: f.Release) -> None:
        self._router.nodes.release(leg.incarnation, leg.key)
        self._router.admission_queue.release_soon()

    _EXECUTE: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        f.Choose: _choose,
        f.Admit: lambda self, _: self.admit(),
        f.AwaitNode: _await_node,
        f.BackOff: _back_off,
        f.Send: _send,
        f.Release: _release,
        f.Blame: lambda self, blame: self._router.breakers.failed(blame.incarnation, blame.error),
        f.Note: lambda self, note: self.story.add(*note),
        f.Fail: lambda self, fail: self._end(self._OUTCOME(error=fail.error)),
        f.Cancelled: lambda self, _: self._end(self._OUTCOME()),
    }
    """Carries out each kind of instruction."""
