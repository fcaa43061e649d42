"""The router of a simulated cluster: the real placer, prefix index, admission queue and node table in virtual time. Pure.

It gets the same information as a real router, with the same delays: blocks and loads arrive late, and requests sent since
a node's last report are counted by the real node table. Requests go to the simulated nodes directly; the links carry
only pings and load reports.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.base.errors import Overloaded, Unavailable
from common.base.hashing import BlockHash
from common.control.messages import AttemptKey, AttemptStats, Message, ModelInfo, NodeRecord, PeerRef, Ping, Pong
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from router.index.prefix_index import PrefixIndex
from router.nodes.node import Node
from router.nodes.node_table import NodeTable
from router.policy import Memory, Query
from router.policy.costs import Costs
from router.policy.fleet import ANY_CONTEXT
from router.requests.admission import Objectives
from router.requests.admission_queue import AdmissionQueue
from router.requests.placement import Placement, Placer
from router.requests.queued_request import QueuedRequest
from router.simulator.events import Events
from router.simulator.hardware import Shape
from router.simulator.node import SimulatedNode
from router.simulator.request import SimRequest

_LEARNED = 20_000
"""Number of requests after which costs count as known."""
_INDEX_BLOCKS = 20_000_000
_LEASE_S = 3.0
_MODEL = "simulated"


@dataclass(frozen=True)
class Admission:
    """The router's settings with the same names."""

    max_waiting: int = 256
    max_queue_wait_s: float = 60.0
    objectives: Objectives = field(default_factory=Objectives)


class _NodeLink:
    """A link to a simulated node, which answers a ping at once. Implements `NodeLink`."""

    refused: list[Message] = []  # never filled

    def __init__(self, node: SimulatedNode, on_message: Callable[[Message], None]) -> None:
        self._node = node
        self._on_message = on_message

    def send(self, message: Message) -> None:
        """Answer a ping with the node's load."""
        if isinstance(message, Ping):
            name = self._node.node_id
            self._on_message(Pong(name, name, self._node.load()))

    def close(self) -> None: ...


class SimulatedRouter:
    """Places requests. Invariant: it reads a node's load only in `report`, and its blocks only in `blocks_changed`."""

    on_placed: Callable[[SimRequest], None]
    """Called when a request goes to its nodes. The cluster sets both."""
    on_refused: Callable[[SimRequest, str], None]
    """Called when a request is refused, with the reason."""

    def __init__(
        self,
        shape: Shape,
        events: Events,
        *,
        policy: str,
        local_prefill_tokens: int | None,
        admission: Admission | None = None,
        seed: int = 0,
    ) -> None:
        """`admission` None: every request goes to the nodes at once."""
        self._shape = shape
        self._events = events
        self._admission = admission
        self._nodes: dict[str, SimulatedNode] = {}
        clock = lambda: events.now_s  # noqa: E731
        self.index = PrefixIndex(_INDEX_BLOCKS, clock=clock)
        self._table = NodeTable(
            "router",
            lease_s=_LEASE_S,
            on_message=lambda _, message: None,
            on_lost=lambda _, reason: None,
            on_load=self._on_load,
            clock=clock,
            open_link=lambda name, on_message, _: _NodeLink(self._nodes[name], on_message),
        )
        fleets = self._table.fleets(_MODEL)
        self._placer = Placer(
            self._table,
            fleets,
            self.index,
            policy=policy,
            local_prefill_tokens=local_prefill_tokens,
            memory=Memory(random.Random(seed)),
            block_size=shape.block_tokens,
        )
        admission = admission or Admission()
        self._queue = AdmissionQueue(
            fleets.by_role,
            admission.objectives,
            max_wait_s=admission.max_queue_wait_s,
            clock=clock,
            call_soon=lambda call: events.after(0.0, lambda _: call()),
        )
        self._expiring = False
        self._waiting = 0
        """Requests without a first token."""

    def meet(self, nodes: Sequence[SimulatedNode]) -> None:
        """These nodes, and no others, are registered with the router."""
        self._nodes |= {node.node_id: node for node in nodes}
        self._table.update([self._record(node) for node in nodes])

    def _record(self, node: SimulatedNode) -> NodeRecord:
        hardware, name = self._shape.hardware, node.node_id
        plane = KVPlane("kv", max(1, hardware.kv_token_bytes))
        return NodeRecord(
            node.role,
            PeerRef(name, name, name, []),
            ModelInfo(_MODEL, "", vocab_size=1, max_model_len=ANY_CONTEXT),
            KVLayout("simulated", KVSpec((LayerGroup((0,), (plane,), 1, "float8_e4m3"),))),
            kv_blocks_total=node.cache.capacity,
            started_at=0.0,
            max_num_seqs=hardware.max_num_seqs,
        )

    @property
    def costs(self) -> tuple[Costs, Costs]:
        """What the router has learned of prefill and of decode nodes."""
        models = self._placer.models
        return models["prefill"].costs, models["decode"].costs

    # -- a new request

    def submit(self, request: SimRequest) -> None:
        """Place, queue or refuse the request."""
        admission = self._admission
        if admission is not None and self._waiting >= admission.max_waiting:
            self.on_refused(request, "429: too many requests are waiting")
            return
        self._waiting += 1
        request.key = AttemptKey(str(request.number), 1)
        self._place(request, admitted=admission is None)

    def _place(self, request: SimRequest, *, admitted: bool) -> None:
        query = Query(request.input_tokens, max_new_tokens=request.output_tokens, session=request.session)
        try:
            placement = self._placer.decide(query, lambda _: request.hashes, shown_count=0)
            queued = not admitted and self._enter_queue(request, placement)
        except Unavailable as error:
            self._refuse(request, error.code)
        except Overloaded:
            self._refuse(request, "429: too late for the objectives")
        else:
            if not queued:
                self._send(request, placement)
                self.on_placed(request)

    def _refuse(self, request: SimRequest, reason: str) -> None:
        self._waiting -= 1
        self.on_refused(request, reason)

    def _send(self, request: SimRequest, placement: Placement) -> None:
        """Count the request as in flight at its nodes."""
        decision, key = placement.decision, request.key
        incarnations = [leg.incarnation for leg in (decision.prefill, decision.decode) if leg is not None]
        for incarnation in incarnations:
            tokens, blocks, work_s = placement.leg(incarnation)
            self._table.open_leg(self._known(incarnation), key, tokens=tokens, blocks=blocks, work_s=work_s)
        self._placer.expect(placement, incarnations)
        request.decode_node = self._nodes[incarnations[-1]]
        if decision.prefill is not None:
            request.prefill_node = self._nodes[incarnations[0]]

    def _known(self, incarnation: str) -> Node:
        node = self._table.get(incarnation)
        assert node is not None, incarnation
        return node

    # -- the admission queue

    def _enter_queue(self, request: SimRequest, placement: Placement) -> bool:
        entry = self._queue.enter(
            QueuedRequest(request.key.request_id, request.input_tokens, request.output_tokens),
            placement.decision,
            admit=lambda: self._place(request, admitted=True),
            refuse=lambda _: self._refuse(request, "429: no node had room in time"),
        )
        if entry is None:
            return False
        if not self._expiring:
            self._expiring = True
            self._events.after(self._table.tick_s, self._expire)
        return True

    def _expire(self, _: None) -> None:
        self._queue.expire()
        self._expiring = len(self._queue) > 0
        if self._expiring:
            self._events.after(self._table.tick_s, self._expire)

    # -- reports from the nodes

    def computed(self, request: SimRequest) -> None:
        """The first token arrived, with a report of how the prompt was computed; a prefill leg is over with it."""
        self._waiting -= 1
        node = request.prefill_node or request.decode_node
        if self._learns(request):
            context = request.hit_tokens(self._shape.block_tokens, request.hit_blocks)
            took_s = request.first_token_s - request.prefill_began_s
            stats = AttemptStats(context, prefill_s=took_s, computed_tokens=request.input_tokens - context)
            self._placer.reported(node.role, node.node_id, stats)
        if request.prefill_node is not None:
            self._release(node.node_id, request.key)

    def relayed(self, request: SimRequest) -> None:
        """The decode node has the whole KV and reports how long it waited after the prompt was computed."""
        if self._learns(request):
            waited_s = self._events.now_s - request.first_token_s
            stats = AttemptStats(relayed_bytes=int(request.sent_bytes), transfer_s=waited_s)
            self._placer.reported("decode", request.decode_node.node_id, stats)

    def finished(self, request: SimRequest) -> None:
        """The last token arrived."""
        self._queue.remove(request.key.request_id)
        self._release(request.decode_node.node_id, request.key)
        self._placer.answered(request.output_tokens)

    def _release(self, incarnation: str, key: AttemptKey) -> None:
        self._table.release(incarnation, key)
        self._queue.release_soon()

    def _learns(self, request: SimRequest) -> bool:
        """Costs do not change in a simulation: once they are known, every eighth request is enough."""
        return request.number < _LEARNED or request.number % 8 == 0

    def blocks_changed(self, node_id: str, stored: list[BlockHash], removed: list[BlockHash]) -> None:
        """A batch of a node's block events."""
        self.index.removed(node_id, removed)
        self.index.stored(node_id, stored)
        self.index.tidy()

    def report(self, node: SimulatedNode) -> None:
        """A node reports its load, which includes all requests sent before."""
        self._table.ping(self._known(node.node_id))

    def _on_load(self, node: Node) -> None:
        self._placer.load_changed(node)
        self._queue.release_soon()
