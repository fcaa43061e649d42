"""The dispatcher: the table of a router's requests, to which it passes the messages from nodes.

Runs on the router's event loop; everything here is synchronous except `run`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from common.base.clock import Clock, monotonic, until_next
from common.base.errors import BadRequest, DeadlineExceeded, Overloaded, Unavailable
from common.base.sentences import counted
from common.config.service_configs import RouterConfig
from common.control.links import Link
from common.control.messages import AttemptFailed, Message, NodeRecord, TokenBatch
from common.control.pooling import PoolResult
from common.security.tls import open_credentials
from router.index.prefix_index import PrefixIndex
from router.metrics import Metrics
from router.nodes.breaker import Breakers
from router.nodes.node import Node
from router.nodes.node_table import NodeTable
from router.policy import find_policy
from router.requests import flow_events as f
from router.requests.admission import Objectives
from router.requests.admission_queue import AdmissionQueue
from router.requests.deadlines import Deadlines
from router.requests.generation import Generation
from router.requests.placement import Placer
from router.requests.queued_request import NOBODY, Siblings, Tenant
from router.requests.request import GenerationRequest
from router.requests.retry_wait import RetryWait
from router.requests.router_state import RouterState
from router.requests.running_request import RunningRequest
from router.requests.story import Stories
from router.text.detokenizer import TokenPieces

log = logging.getLogger(__name__)

_STARTS_PER_TURN = 32
"""Requests placed in a row before other tasks of the event loop run."""


class Dispatcher:
    """All requests of this router and the nodes that serve them.

    Raises: ConfigError for an unknown policy.
    """

    def __init__(
        self, config: RouterConfig, metrics: Metrics, *, index: PrefixIndex | None = None, clock: Clock = monotonic
    ) -> None:
        self.config = config
        self.objectives = Objectives(config.slo_ttft, config.slo_tpot)
        self._clock = clock
        self._metrics = metrics
        self._index = PrefixIndex(clock=clock) if index is None else index  # an empty one is false, too
        self._requests: dict[str, RunningRequest[Any]] = {}
        self._states: dict[str, RouterState] = {}
        self._retry_wait = RetryWait()
        self._deadlines = Deadlines(config.request_timeout_s, self._on_deadline)
        self._fresh: list[RunningRequest[Any]] = []
        """Submitted but not started."""
        self._stopping: Unavailable | None = None
        """The error of every later request."""
        self.draining = False
        """An operator asked for a restart: health checks fail, so that load balancers send requests elsewhere."""
        self.breakers = Breakers(clock=clock)
        self.stories = Stories()
        self.nodes = NodeTable(
            f"router-{secrets.token_hex(6)}",
            lease_s=config.lease_s,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_usable=self._on_usable,
            on_load=self._on_load,
            clock=clock,
            open_link=partial(Link, credentials=open_credentials(config.tls_dir)),
        )
        find_policy(config.policy)

    def state(self, model: str) -> RouterState:
        """What the requests for the model share that nodes registered under this name."""
        known = self._states.get(model)
        if known is not None:
            return known
        config, clock, fleets = self.config, self._clock, self.nodes.fleets(model)
        placer = Placer(
            self.nodes, fleets, self._index, policy=config.policy, local_prefill_tokens=config.local_prefill_tokens
        )
        queue = AdmissionQueue(fleets.by_role, self.objectives, max_wait_s=config.max_queue_wait_s, clock=clock)
        made = self._states[model] = RouterState(
            self.nodes,
            fleets,
            self.breakers,
            placer,
            self._metrics.of_model(model),
            self.stories,
            self._requests,
            set(),
            self._deadlines,
            queue,
            self._retry_wait,
            clock,
        )
        return made

    # -- for the HTTP side

    @property
    def running(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    @property
    def waiting(self) -> int:
        """Number of requests without a token."""
        return sum(len(state.unanswered) for state in self._states.values())

    @property
    def queued(self) -> int:
        """Number of requests in admission queues."""
        return sum(len(state.admission_queue) for state in self._states.values())

    def new_deadline_s(self) -> float:
        """When a request that arrives now must be over."""
        return self._clock() + self.config.request_timeout_s

    def submit(
        self,
        model: str,
        request_id: str,
        requests: list[GenerationRequest],
        pieces: TokenPieces,
        on_news: Callable[[], None],
        client_id: str = "",
    ) -> list[Generation]:
        """Start the generations of one client request: all of them or none. Raises: what `check_room` raises.

        They are placed a moment later, in a row with others submitted now (`router.http.turns` says why). `model`: the name
        under which its nodes registered it. `client_id`: the client's id of the request.
        """
        state = self._take_room(model, len(requests), requests[0].tenant, requests[0].engine.priority)
        siblings, deadline_s = Siblings(), self.new_deadline_s()
        generations = [
            Generation(
                request_id if len(requests) == 1 else f"{request_id}-{index}",
                request,
                pieces,
                state,
                max_attempts=self.config.max_attempts,
                deadline_s=deadline_s,
                on_news=on_news,
                client_id=client_id,
                siblings=siblings,
            )
            for index, request in enumerate(requests)
        ]
        for generation in generations:  # only now, so that a bug in one of them leaves none behind
            generation.enter()
        self._start_soon(generations)
        return generations

    def run_parts(self, model: str, parts: Sequence[RunningRequest[Any]], tenant: Tenant, priority: int) -> None:
        """Start the parts of a pooling call: all of them or none. Raises: what `check_room` raises."""
        self._take_room(model, len(parts), tenant, priority)
        for part in parts:
            part.enter()
        self._start_soon(parts)

    def _start_soon(self, requests: Sequence[RunningRequest[Any]]) -> None:
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._start_fresh)
        self._fresh += requests

    def _start_fresh(self) -> None:
        """Start what was submitted. A burst is started in portions, so that streams continue in between."""
        self._start(_STARTS_PER_TURN)
        if self._fresh:
            asyncio.get_running_loop().call_soon(self._start_fresh)

    def _start(self, count: int) -> None:
        portion, self._fresh = self._fresh[:count], self._fresh[count:]
        for generation in portion:
            generation.start()

    def check_room(self, model: str, count: int, tenant: Tenant = NOBODY, priority: int = 0) -> None:
        """Refuse early what `submit` would refuse.

        A tenant with less than its share of the decode nodes' slots is not refused because of other tenants' requests.
        Raises: BadRequest for more prompts times n than the whole queue takes; Overloaded when it has no room for `count` more
        and too few requests that these may replace; Unavailable when the router stops.
        """
        self._victims(model, count, tenant, priority)

    def _victims(self, model: str, count: int, tenant: Tenant, priority: int) -> list[str]:
        """The requests to refuse so that a full queue has room for `count` more. Raises: what `check_room` raises."""
        if self._stopping is not None:
            raise Unavailable(self._stopping.message)
        most = self.config.max_waiting
        if count > most:
            raise BadRequest(f"a request may have at most {most} prompts times n, not {count}", param="n")
        state = self.state(model)
        if len(state.unanswered) + count <= most:
            return []
        self._start(len(self._fresh))  # what each tenant has in the admission queue decides which requests are replaced
        queue, too_many = state.admission_queue, len(state.unanswered) + count - most
        own = sum(self._requests[each].tenant.name == tenant.name for each in state.unanswered)
        if own + count <= most and queue.has_free_share(tenant, count):
            return []
        victims = queue.victims(tenant, min(count, too_many), priority)
        begun_of_others = min(queue.begun_of_others(tenant), most)  # at most 2 * most wait, however many tenants
        if len(victims) < min(count, too_many - begun_of_others):
            raise Overloaded(
                f"{counted(len(state.unanswered), 'request is/requests are')} waiting already; try again shortly",
                retry_after_s=1.0,
            )
        return victims

    def _take_room(self, model: str, count: int, tenant: Tenant, priority: int) -> RouterState:
        """Refuse queued requests so that `count` more have room. Raises: what `check_room` raises."""
        victims = self._victims(model, count, tenant, priority)
        state = self.state(model)
        state.admission_queue.make_room(victims)
        return state

    async def run(self) -> None:
        """Renew the leases at the nodes and expire queued requests; never returns."""
        while True:
            await asyncio.sleep(until_next(self.nodes.tick_s, monotonic()))
            try:
                self.nodes.tick()
                for state in self._states.values():
                    state.admission_queue.expire()
            except Exception:
                log.exception("a tick failed")

    def set_nodes(self, records: list[NodeRecord]) -> None:
        """Use the nodes that membership lists now."""
        self.nodes.update(records)
        known = {node.incarnation for node in self.nodes.known()}
        self.breakers.keep(known)
        for state in self._states.values():
            state.placer.keep(known)

    def refuse_new(self, error: Unavailable) -> None:
        """End every later generation with this error; those that have begun go on."""
        self._stopping = error

    def fail_all(self, error: Unavailable) -> None:
        """End every generation, and every later one, with this error."""
        self.refuse_new(error)
        for generation in list(self._requests.values()):
            generation.feed(f.GiveUp(error))

    def close(self) -> None:
        """End everything and close all links."""
        for generation in list(self._requests.values()):
            generation.cancel()
        self._retry_wait.close()
        self._deadlines.close()
        self.nodes.close()

    # -- from the nodes

    def _on_message(self, incarnation: str, message: Message) -> None:
        match message:
            case TokenBatch(chunks):
                for chunk in chunks:
                    self._feed(chunk.key.request_id, f.Chunk(incarnation, chunk))
            case PoolResult(key):
                self._feed(key.request_id, f.Pooled(incarnation, message))
            case AttemptFailed(key, code, text):
                node = self.nodes.get(incarnation)
                log.warning("%s failed at %s: %s: %s", key, node.node_id if node else incarnation, code, text)
                self._feed(key.request_id, f.LegFailed(incarnation, message))
            case _:
                log.warning("dropped a %s message, which nodes do not send to routers", type(message).__name__)

    def _on_lost(self, incarnation: str, reason: str) -> None:
        if not self.nodes.rejoining:  # otherwise this router stalled, and the node did not fail
            self.breakers.failed(incarnation, Unavailable(reason))
        for generation in list(self._requests.values()):
            generation.feed(f.NodeLost(incarnation, reason))

    def _on_load(self, node: Node) -> None:
        state = self.state(node.record.model.name)
        state.placer.load_changed(node)
        state.admission_queue.release_soon()

    def _on_usable(self) -> None:
        self._retry_wait.wake_soon()
        for state in self._states.values():
            state.admission_queue.release_soon()

    def _on_deadline(self, request_id: str) -> None:
        timeout_s = self.config.request_timeout_s
        self._feed(request_id, f.GiveUp(DeadlineExceeded(f"the request took longer than its limit of {timeout_s:g} s")))

    def _feed(self, request_id: str, event: f.Event) -> None:
        generation = self._requests.get(request_id)
        if generation is not None:
            generation.feed(event)
