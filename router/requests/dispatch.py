"""Between the HTTP side and the nodes: owns all generations, places attempts, routes messages to flows.

Runs on the router's event loop; everything here is synchronous except the ticking of `run`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from common.base.clock import Clock, monotonic
from common.base.errors import BadRequest, DeadlineExceeded, KvRelayError, Overloaded, Unavailable
from common.control.messages import (
    Abort,
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    Message,
    NodeRecord,
    PrefillRequest,
    TokenBatch,
)
from router.index.prefix_index import PrefixIndex
from router.metrics import Metrics
from router.nodes.breaker import Breakers
from router.nodes.node import Node, kv_kind
from router.nodes.node_table import NodeTable
from router.policy import Decision
from router.requests import flow_events as f
from router.requests.admission import Objectives
from router.requests.admission_queue import AdmissionQueue
from router.requests.deadlines import Deadlines
from router.requests.generation import Generation, GenerationRequest
from router.requests.placement import HashChain, Placement, PlacementRequest, Placer
from router.requests.retry_wait import RetryWait
from router.requests.story import Stories, Story
from router.text.detokenizer import TokenPieces

log = logging.getLogger(__name__)

REPLACEMENT_WAIT_S = 15.0
"""So long a request whose node died waits for another one before its client gets an error."""

_STARTS_PER_TURN = 32
"""So many requests are placed before everything else on the loop has its turn."""


@dataclass(frozen=True)
class DispatchSettings:
    """The router's settings that bear on serving."""

    lease_s: float = 3.0
    request_timeout_s: float = 600.0
    max_waiting: int = 256
    local_prefill_tokens: int | None = None
    policy: str = "kv_aware"
    max_attempts: int = 3
    objectives: Objectives = field(default_factory=Objectives)
    max_queue_wait_s: float = 60.0


@dataclass
class _Live:
    generation: Generation
    deadline_s: float
    chain: HashChain
    waiting: bool = True
    """No token yet."""
    admitted: bool = False
    """It may go to the nodes."""
    wanted: f.Place | None = None
    """While it is held back: what it waits for."""
    parked_until_s: float | None = None
    """While no node was found since it was parked first: when its client gets the error."""
    placement: Placement | None = None
    """Of the latest attempt."""
    kv_kind: str = ""
    """Of the attempt that brought the first token, or may still bring it."""
    unproven: set[str] = field(default_factory=lambda: set())
    """Incarnations that were given its prompt and have not reported: what is expected of them may be wrong."""


class Dispatcher:
    """All generations of this router and the nodes that serve them. Implements `generation.Shell`.

    Raises: ConfigError for an unknown policy.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        metrics: Metrics,
        *,
        index: PrefixIndex | None = None,
        clock: Clock = monotonic,
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._live: dict[str, _Live] = {}
        self._retry_wait = RetryWait()
        self._deadlines = Deadlines(settings.request_timeout_s, self._on_deadline)
        self.breakers = Breakers(clock=clock)
        self.stories = Stories()
        self._waiting = 0
        self._fresh: list[Generation] = []
        """Submitted and not started."""
        self._stopping: Unavailable | None = None
        """What every request is told since `fail_all`."""
        self.nodes = NodeTable(
            f"router-{secrets.token_hex(6)}",
            lease_s=settings.lease_s,
            on_message=self._on_message,
            on_lost=self._on_lost,
            on_usable=self._on_usable,
            on_load=self._on_load,
            clock=clock,
        )
        self.admission_queue = AdmissionQueue(
            self.nodes.fleets,
            settings.objectives,
            max_wait_s=settings.max_queue_wait_s,
            admit=self._let_in,
            refuse=self._refuse,
            clock=clock,
        )
        """New requests that no node has use for yet."""
        self.placer = Placer(
            self.nodes,
            PrefixIndex(clock=clock) if index is None else index,  # an empty one is false, too
            policy=settings.policy,
            local_prefill_tokens=settings.local_prefill_tokens,
        )

    # -- for the HTTP side

    @property
    def running(self) -> int:
        """Generations that are not over."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Of these, the ones without a token."""
        return self._waiting

    def submit(
        self,
        request_id: str,
        requests: list[GenerationRequest],
        pieces: TokenPieces,
        on_news: Callable[[], None],
        client_id: str = "",
    ) -> list[Generation]:
        """Start the generations of one client request: all of them or none. `client_id` is its own name for it.

        They are placed a moment later, in a row with those of other requests that come now (as `router.fast.yield_turn`).

        Raises: as `check_room`.
        """
        self.check_room(len(requests), requests[0].tenant)
        if self._waiting + len(requests) > self._settings.max_waiting:
            self.admission_queue.make_room(requests[0].tenant)
        timeout_s = self._settings.request_timeout_s
        generations: list[Generation] = []
        try:
            for index, request in enumerate(requests):
                own_id = request_id if len(requests) == 1 else f"{request_id}-{index}"
                story = Story(own_id, client_id)
                sizes = {
                    "prompt_tokens": len(request.engine.prompt_ids),
                    "max_tokens": request.engine.sampling.max_tokens,
                }
                story.add("arrived", data=sizes)
                attempts = self._settings.max_attempts
                generation = Generation(
                    own_id, request, pieces, self, max_attempts=attempts, on_news=on_news, story=story
                )
                self.stories.enter(story)
                self._deadlines.add(own_id)
                self._live[own_id] = _Live(generation, self._clock() + timeout_s, HashChain(request.engine.cache_salt))
                self._waiting += 1
                generations.append(generation)
        except Exception:
            for generation in generations:
                generation.feed(f.GiveUp(KvRelayError("internal error in the router")))
            raise
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._start_fresh)
        self._fresh += generations
        return generations

    def _start_fresh(self) -> None:
        """Start what was submitted; a burst in portions, between which streams go on."""
        self._start(_STARTS_PER_TURN)
        if self._fresh:
            asyncio.get_running_loop().call_soon(self._start_fresh)

    def _start(self, count: int) -> None:
        portion, self._fresh = self._fresh[:count], self._fresh[count:]
        for generation in portion:
            generation.start()

    def _is_full(self, count: int) -> bool:
        """Whether there is no room for `count` more, once those that came just now stand in the queue: whose place a
        newcomer may take is told from who has how many there.
        """
        most = self._settings.max_waiting
        if self._waiting + count > most:
            self._start(len(self._fresh))
        return self._waiting + count > most

    def check_room(self, count: int, tenant: str = "") -> None:
        """Refuse early what `submit` would refuse.

        Raises: BadRequest for more than the whole queue takes; Overloaded when it has no room for `count` more, and
        nobody has taken more of it than `tenant`; Unavailable when the router stops.
        """
        if self._stopping is not None:
            raise Unavailable(self._stopping.message)
        if count > self._settings.max_waiting:
            raise BadRequest(f"at most {self._settings.max_waiting} prompts in one request are served", param="prompt")
        if self._is_full(count) and (count > 1 or not self.admission_queue.has_victim(tenant)):
            raise Overloaded(f"{self._waiting} requests are waiting already; try again shortly", retry_after_s=1.0)

    async def run(self) -> None:
        """Keep the nodes' leases, for ever."""
        while True:
            await asyncio.sleep(self.nodes.tick_s)
            try:
                self.nodes.tick()
                self.admission_queue.expire()
            except Exception:
                log.exception("a tick failed")

    def set_nodes(self, records: list[NodeRecord]) -> None:
        """Take over what membership lists now."""
        self.nodes.update(records)
        self.breakers.keep(node.incarnation for node in self.nodes.known())
        self.placer.keep({node.incarnation for node in self.nodes.known()})

    def fail_all(self, error: Unavailable) -> None:
        """End every generation, and every one that is still to come, with this error where a client still listens."""
        self._stopping = error
        for live in list(self._live.values()):
            live.generation.feed(f.GiveUp(error))

    def close(self) -> None:
        """End everything and close all links."""
        for live in list(self._live.values()):
            live.generation.cancel()
        self._retry_wait.close()
        self._deadlines.close()
        self.nodes.close()

    # -- generation.Shell

    def place(self, generation: Generation, wanted: f.Place) -> None:
        """Pick nodes; a new request is refused at once if there are none, one that was let in waits a while.

        As does a new one while the nodes come back to a router that was held up.
        """
        if wanted.backoff_s and not wanted.at_once:
            self._pause(generation, wanted, "not the first failure in a row")
            return
        live = self._live[generation.request_id]
        try:
            placement = self.placer.decide(self._order(live, wanted))
        except Unavailable as error:
            drained = Unavailable("every decode node that is left is draining; try again later")
            # Without its traceback: that holds this very frame, and the request with it.
            why = drained if self.nodes.finishing.nodes else error.with_traceback(None)
            if wanted.attempt == 1 and not live.admitted and not self.nodes.rejoining:
                generation.feed(f.Unplaceable(why))
            else:
                self._park(generation, wanted, why)
            return
        decision = placement.decision
        if wanted.attempt == 1 and not live.admitted and not self._admit(live, wanted, decision):
            return
        incarnations = [leg.picked.incarnation for leg in (decision.prefill, decision.decode) if leg is not None]
        if wanted.backoff_s and not wanted.avoid.isdisjoint(incarnations):
            self._pause(generation, wanted, "only nodes that just failed it are left")
            return
        for incarnation in incarnations:
            self.breakers.chosen(incarnation)
        live.unproven.update(incarnations)
        self.placer.expect(placement, incarnations)
        generation.decision, live.placement, live.parked_until_s = decision, placement, None
        decode = self.nodes.get(decision.decode.picked.incarnation)
        prefill = None if decision.prefill is None else self.nodes.get(decision.prefill.picked.incarnation)
        assert decode is not None
        if not generation.flow.token_ids:
            live.kv_kind = kv_kind(decode.record.layout)
        self._metrics.attempt(decision.mode, wanted.attempt)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s#%d goes to %s", generation.request_id, wanted.attempt, decision.explain())
        timeout_s = max(0.001, live.deadline_s - self._clock())
        generation.feed(f.Placed(None if prefill is None else prefill.record.peer, decode.record.peer, timeout_s))

    # -- held back

    def _admit(self, live: _Live, wanted: f.Place, decision: Decision) -> bool:
        """Whether a new request may go at once; if not, it was refused or waits."""
        generation = live.generation
        try:
            request = generation.request
            entry = self.admission_queue.enter(
                generation.request_id,
                decision,
                prompt_tokens=wanted.num_tokens,
                max_tokens=request.engine.sampling.max_tokens,
                priority=request.engine.priority,
                tenant=request.tenant,
            )
        except Overloaded as error:
            generation.story.add("refused", error.message, decision)
            generation.feed(f.Unplaceable(error))
            return False
        if entry is None:
            live.admitted = True
            return True
        generation.story.add("queued", entry.reason, {"ahead": entry.ahead, "ahead_s": round(entry.ahead_s, 3)})
        live.wanted = wanted
        return False

    def _let_in(self, request_id: str) -> None:
        live = self._live.get(request_id)
        if live is not None and live.wanted is not None:
            live.admitted, live.parked_until_s = True, None  # nodes were found when it came to be held back
            self._place_again(live.generation, live.wanted)

    def _refuse(self, request_id: str, error: Overloaded) -> None:
        """End a request that no node has seen."""
        self._feed(request_id, f.Unplaceable(error))

    def _order(self, live: _Live, wanted: f.Place) -> PlacementRequest:
        flow, request = live.generation.flow, live.generation.request
        return PlacementRequest(
            request.engine.prompt_ids + flow.token_ids,
            live.chain,
            request.engine.sampling.max_tokens - len(flow.token_ids),
            request.session,
            wanted.avoid | self.breakers.not_admitted(),
            wanted.last,
            frozenset(live.unproven),
            live.kv_kind if flow.token_ids else "",
            wanted.attempt > 1,
        )

    def _park(self, generation: Generation, wanted: f.Place, error: Unavailable) -> None:
        """Wait for a node. Being woken in vain, by nodes that come and go, does not prolong the wait."""
        live, now_s = self._live[generation.request_id], self._clock()
        if live.parked_until_s is None:
            live.parked_until_s = now_s + REPLACEMENT_WAIT_S
        elif now_s >= live.parked_until_s:
            generation.feed(f.Unplaceable(error))
            return
        generation.story.add("parked", error.message)
        self._retry_wait.park(
            generation.request_id,
            live.parked_until_s - now_s,
            wake=lambda: self._place_again(generation, wanted),
            give_up=lambda: generation.feed(f.Unplaceable(error)),
        )

    def _pause(self, generation: Generation, wanted: f.Place, why: str) -> None:
        generation.story.add("backoff", why, {"seconds": round(wanted.backoff_s, 3)})
        rested = wanted._replace(backoff_s=0.0)
        self._retry_wait.pause(generation.request_id, wanted.backoff_s, lambda: self._place_again(generation, rested))

    def _place_again(self, generation: Generation, wanted: f.Place) -> None:
        """`place`, not at the flow's own wish: what goes wrong ends this request and not whoever woke it."""
        if generation.request_id not in self._live:
            return
        try:
            self.place(generation, wanted)
        except Exception:
            log.exception("%s could not be placed", generation.request_id)
            generation.feed(f.GiveUp(KvRelayError("internal error in the router")))

    def send(self, incarnation: str, message: PrefillRequest | DecodeRequest | Abort) -> None:
        """As `NodeTable.send`."""
        live = self._live.get(message.key.request_id)
        if isinstance(message, Abort) or live is None or live.placement is None:
            self.nodes.send(incarnation, message)
            return
        tokens, blocks, work_s = live.placement.leg(incarnation)
        self.nodes.send(incarnation, message, tokens=tokens, blocks=blocks, work_s=work_s)

    def release(self, incarnation: str, key: AttemptKey) -> None:
        """As `NodeTable.release`."""
        self.nodes.release(incarnation, key)
        self.admission_queue.release_soon()

    def on_tokens(self, generation: Generation, count: int, *, first: bool) -> None:
        """Account for tokens that go to the client."""
        if first:
            self._no_longer_waiting(generation)
        self._metrics.tokens(generation, count, first=first)

    def on_report(self, generation: Generation, report: f.Report) -> None:
        """Account for a leg's report, which comes with its first tokens."""
        self.breakers.succeeded(report.incarnation)
        self._metrics.leg(report.role_is_prefill, report.stats)
        role = "prefill" if report.role_is_prefill else "decode"
        self._live[generation.request_id].unproven.discard(report.incarnation)
        self.placer.reported(role, report.incarnation, report.stats)

    def blame(self, incarnation: str, error: KvRelayError) -> None:
        """An attempt ended by this node's fault."""
        self.breakers.failed(incarnation, error)

    def on_end(self, generation: Generation) -> None:
        """Forget a generation; its timers go with it."""
        self._no_longer_waiting(generation)
        del self._live[generation.request_id]
        self._deadlines.remove(generation.request_id)
        self._retry_wait.forget(generation.request_id)
        self.admission_queue.remove(generation.request_id)
        if generation.outcome is not None and generation.outcome.finish_reason is not None:
            self.placer.answered(len(generation.flow.token_ids))
        self.stories.end(generation.story)
        self._metrics.end(generation)

    def _no_longer_waiting(self, generation: Generation) -> None:
        live = self._live[generation.request_id]
        if live.waiting:
            live.waiting = False
            self._waiting -= 1

    # -- from the nodes

    def _on_deadline(self, request_id: str) -> None:
        timeout_s = self._deadlines.timeout_s
        self._feed(
            request_id, f.GiveUp(DeadlineExceeded(f"the request took longer than the {timeout_s:g} s that it may"))
        )

    def _on_message(self, incarnation: str, message: Message) -> None:
        match message:
            case TokenBatch(chunks):
                for chunk in chunks:
                    self._feed(chunk.key.request_id, f.Chunk(incarnation, chunk))
            case AttemptFailed(key, code, text):
                log.warning("%s failed at %s: %s: %s", key, incarnation, code, text)
                self._feed(key.request_id, f.LegFailed(incarnation, message))
            case _:
                log.warning("dropped a %s, which a router has no use for", type(message).__name__)

    def _on_lost(self, incarnation: str, reason: str) -> None:
        if not self.nodes.rejoining:  # else it was this router that was away
            self.breakers.failed(incarnation, Unavailable(reason))
        for request_id in list(self._live):
            self._feed(request_id, f.NodeLost(incarnation, reason))

    def _feed(self, request_id: str, event: f.Event) -> None:
        live = self._live.get(request_id)
        if live is not None:
            live.generation.feed(event)

    def _on_load(self, node: Node) -> None:
        self.placer.load_changed(node)
        self.admission_queue.release_soon()

    def _on_usable(self) -> None:
        self._retry_wait.wake_soon()
        self.admission_queue.release_soon()
