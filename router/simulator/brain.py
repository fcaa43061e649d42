"""The real router of a simulated cluster: its index, policies and admission, its knowledge of the nodes' load. Pure.

It learns what a router learns, when a router would: blocks and loads arrive late, and what was sent since a node's last
report is counted as `router.nodes.node_table` counts it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from common.base.errors import Overloaded, Unavailable
from common.base.hashing import BlockHash
from common.control.messages import Role
from router.index.block_table import Keys
from router.index.prefix_index import PrefixIndex, block_keys
from router.policy import Decision, Fleet, Memory, Query, check_policy, place
from router.policy.costs import CostModel
from router.requests.admission import FairQueue, Objectives, QueuedRequest, crowded, enqueue_unless_idle
from router.simulator.decode import DecodeNode
from router.simulator.events import Events
from router.simulator.hardware import Hardware
from router.simulator.prefill import PrefillNode
from router.simulator.request import SimRequest

_LEARNED = 20_000
"""Requests after which costs count as known."""


@dataclass(frozen=True)
class Admission:
    """The router's settings of these names."""

    max_waiting: int = 256
    max_queue_wait_s: float = 60.0
    objectives: Objectives = field(default_factory=Objectives)


@dataclass(frozen=True)
class BrainSettings:
    """How the router is configured."""

    policy: str = "kv_aware"
    local_prefill_tokens: int | None = None
    admission: Admission | None = None
    """None: every request goes to the nodes at once."""
    index_blocks: int = 20_000_000
    block_tokens: int = 512
    seed: int = 0


@dataclass(slots=True, eq=False)
class Leg:
    """What a request asks of one node."""

    tokens: float
    blocks: int
    reported: bool = False
    """The node's last report includes it."""


@dataclass(slots=True)
class Ticket:
    """The router's note of a request that is not over."""

    prefill: Leg | None
    decode: Leg


@dataclass(slots=True)
class Known:
    """The router's note of a node."""

    role: Role
    node: PrefillNode | DecodeNode
    unreported: list[Leg] = field(default_factory=list[Leg])
    prompt_tokens: int = 0
    """Computed until the last report, as is `busy_s`."""
    busy_s: float = 0.0


class BrainOwner(Protocol):
    """Whom the brain tells where a request goes."""

    def placed(self, request: SimRequest) -> None:
        """It goes to its nodes now."""
        ...

    def refused(self, request: SimRequest, reason: str) -> None:
        """It was turned away."""
        ...


class Brain:
    """Places requests. Invariant: it reads a node only in `load_reported`, and its blocks only in `blocks_changed`."""

    def __init__(self, settings: BrainSettings, hardware: Hardware, events: Events) -> None:
        self._settings = settings
        self._hardware = hardware
        self._events = events
        check_policy(settings.policy)
        self.index = PrefixIndex(settings.index_blocks, clock=lambda: events.now_s)
        self.fleets: dict[Role, Fleet] = {"prefill": Fleet("prefill"), "decode": Fleet("decode")}
        self.models: dict[Role, CostModel] = {"prefill": CostModel(), "decode": CostModel()}
        self._memory = Memory(random.Random(settings.seed))
        self._known: dict[str, Known] = {}
        self._held = FairQueue()
        self._held_requests: dict[str, SimRequest] = {}
        self._waiting = 0
        """Requests without a first token."""
        self._releasing = False

    def meet(self, owner: BrainOwner, prefill: Sequence[PrefillNode], decode: Sequence[DecodeNode]) -> None:
        """All nodes register with the router of `owner`."""
        self._owner = owner
        for node in prefill:
            self._add("prefill", node)
        for node in decode:
            self._add("decode", node)

    def _add(self, role: Role, node: PrefillNode | DecodeNode) -> None:
        self._known[node.node_id] = Known(role, node)
        self.fleets[role].add(
            node.node_id,
            node.node_id,
            capacity=self._hardware.max_num_seqs,  # of either role, as nodes register it
            token_bytes=self._hardware.kv_token_bytes,
            free_blocks=node.cache.room,
            total_blocks=node.cache.capacity,
        )

    # -- a new request

    def submit(self, request: SimRequest) -> None:
        """Place it, hold it back or turn it away."""
        admission = self._settings.admission
        if admission is not None and self._waiting >= admission.max_waiting:
            self._owner.refused(request, "429: too many wait")
            return
        self._waiting += 1
        self._place(request, admission)

    def _place(self, request: SimRequest, admission: Admission | None) -> None:
        keys = block_keys(request.hashes)
        try:
            decision = self._decide(request, keys)
            held = admission is not None and self._hold_back(request, admission, decision)
        except Unavailable as error:
            self._refuse(request, error.code)
        except Overloaded:
            self._refuse(request, "429: too late for the objectives")
        else:
            if not held:
                self._take(request, decision, keys)
                self._owner.placed(request)

    def _refuse(self, request: SimRequest, reason: str) -> None:
        self._waiting -= 1
        self._owner.refused(request, reason)

    def _decide(self, request: SimRequest, keys: Keys) -> Decision:
        settings = self._settings
        query = Query(
            request.input_tokens,
            hits=self.index.match(keys),
            block_size=settings.block_tokens,
            max_new_tokens=request.output_tokens,
            session=request.session or request.hashes[0].hex(),
        )
        return place(
            query,
            self.fleets["prefill"],
            self.fleets["decode"],
            policy=settings.policy,
            local_prefill_tokens=settings.local_prefill_tokens,
            memory=self._memory,
            shown_count=0,
        )

    def _take(self, request: SimRequest, decision: Decision, keys: Keys) -> None:
        """Note what was sent where."""
        blocks = len(request.hashes) + request.private_blocks
        target, source = decision.decode.picked, decision.prefill and decision.prefill.picked
        decode = self._known[target.incarnation]
        request.decode_node = decode.node
        own_tokens = request.input_tokens - target.hit_tokens if source is None else 0
        ticket = Ticket(None, self._send(decode, own_tokens, blocks))
        if source is not None:
            prefill = self._known[source.incarnation]
            request.prefill_node = prefill.node
            tokens = max(request.input_tokens - source.hit_tokens, 1)
            ticket.prefill = self._send(prefill, tokens, len(request.hashes), source.work_s)
            self.index.expect(source.incarnation, keys, target.incarnation)
        else:
            self.index.expect(target.incarnation, keys)
        request.ticket = ticket

    # -- held back

    def _hold_back(self, request: SimRequest, admission: Admission, decision: Decision) -> bool:
        """As the router's dispatcher does."""
        prefill, decode = self.fleets["prefill"], self.fleets["decode"]
        tokens = request.input_tokens + min(request.output_tokens, int(decode.costs.output_tokens))
        held = QueuedRequest(str(request.number), tokens, self._events.now_s + admission.max_queue_wait_s)
        if not enqueue_unless_idle(self._held, held, admission.objectives, decision, prefill, decode)[0]:
            return False
        self._held_requests[held.request_id] = request
        self._events.at(held.deadline_s, self._expire, held.request_id)
        return True

    def _expire(self, request_id: str) -> None:
        request = self._held_requests.pop(request_id, None)
        if request is not None:
            self._held.remove(request_id)
            self._refuse(request, "429: no node had room in time")

    def _soon_release(self) -> None:
        """Look for held ones that may go, once this event is dealt with."""
        if self._held_requests and not self._releasing:
            self._releasing = True
            self._events.after(0.0, self._release_held)

    def _release_held(self, _: None) -> None:
        self._releasing = False
        while len(self._held) and not crowded(self.fleets["prefill"], self.fleets["decode"]):
            self._place(self._held_requests.pop(self._held.pop() or ""), None)

    def _send(self, known: Known, tokens: float, blocks: int, work_s: float = 0.0) -> Leg:
        leg = Leg(tokens, blocks)
        known.unreported.append(leg)
        self._fleet(known).sent(known.node.node_id, tokens=tokens, blocks=blocks, work_s=work_s)
        return leg

    def _release(self, known: Known, leg: Leg) -> None:
        if not leg.reported:
            known.unreported.remove(leg)
        self._fleet(known).over(known.node.node_id, tokens=leg.tokens, blocks=leg.blocks, reported=leg.reported)
        self._soon_release()

    def _fleet(self, known: Known) -> Fleet:
        return self.fleets[known.role]

    # -- what the router hears

    def computed(self, request: SimRequest) -> None:
        """The first token arrived, and how the prompt was computed; a prefill leg is over with it."""
        self._waiting -= 1
        role: Role = "decode" if request.prefill_node is None else "prefill"
        node = request.prefill_node or request.decode_node
        context = request.hit_tokens(self._settings.block_tokens, request.hit_blocks)
        took_s = request.first_token_s - request.prefill_began_s
        if self._learns(request):
            self.models[role].prefilled(node.node_id, request.input_tokens - context, context, took_s)
            self._tell(role, node.node_id)
        if request.prefill_node is not None:
            self._release(self._known[node.node_id], request.ticket.prefill)

    def relayed(self, request: SimRequest) -> None:
        """The decode node has the whole KV, so long after the prompt was computed."""
        name, waited_s = request.decode_node.node_id, self._events.now_s - request.first_token_s
        if self._learns(request):
            self.models["decode"].relayed(name, int(request.sent_bytes), waited_s)
            self._tell("decode", name)

    def finished(self, request: SimRequest) -> None:
        """The last token arrived."""
        self._release(self._known[request.decode_node.node_id], request.ticket.decode)
        self.models["decode"].answered(request.output_tokens)
        request.ticket = None

    def _learns(self, request: SimRequest) -> bool:
        """Costs do not change here: once they are known, every eighth request is enough."""
        return request.number < _LEARNED or request.number % 8 == 0

    def _tell(self, role: Role, name: str) -> None:
        """Bring what was learned into the fleet's columns."""
        fleet, model = self.fleets[role], self.models[role]
        fleet.costs = model.costs
        fleet.update(
            name,
            slowness=model.slowness(name),
            link_slowness=model.link_slowness(name),
            step_slowness=model.step_slowness(name),
        )

    def blocks_changed(self, node_id: str, stored: list[BlockHash], removed: list[BlockHash]) -> None:
        """A batch of a node's block events."""
        self.index.removed(node_id, removed)
        self.index.stored(node_id, stored)
        self.index.tidy()

    def load_reported(self, node: PrefillNode | DecodeNode) -> None:
        """A node's report: from now on it includes what was sent before."""
        known = self._known[node.node_id]
        for leg in known.unreported:
            leg.reported = True
        known.unreported.clear()
        model = self.models[known.role]
        model.computed(node.prompt_tokens - known.prompt_tokens, node.busy_s - known.busy_s)
        known.prompt_tokens, known.busy_s = node.prompt_tokens, node.busy_s
        fleet = self._fleet(known)
        if isinstance(node, DecodeNode):
            model.stepped(node.node_id, node.running, node.step_s)
        fleet.costs = model.costs
        fleet.update(
            node.node_id,
            waiting=node.waiting,
            running=node.running,
            queued_tokens=node.queued_tokens,
            free_blocks=node.cache.room,
            in_flight=0,
            in_flight_tokens=0,
            in_flight_blocks=0,
            ended=0,
            ended_tokens=0,
            step_slowness=model.step_slowness(node.node_id),
        )
        self._soon_release()
