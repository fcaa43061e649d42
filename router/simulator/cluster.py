"""One simulated run: requests go from the router to the nodes, come back, and are counted. Pure.

`SimulatedCluster` owns every node; its methods are the stages of a request's life, in order.
"""

from __future__ import annotations

from collections.abc import Iterator

from common.control.messages import Role
from router.simulator.decode import SimulatedDecodeNode
from router.simulator.events import Events
from router.simulator.hardware import Shape
from router.simulator.node import SimulatedNode
from router.simulator.prefill import SimulatedPrefillNode
from router.simulator.report import Ledger
from router.simulator.request import SimRequest
from router.simulator.simulated_router import SimulatedRouter

_SPREAD = 0.618
"""Offsets of later nodes' reports: multiples of it are spread evenly."""


class SimulatedCluster:
    """Nodes in virtual time under one router. Call `run` once."""

    def __init__(self, shape: Shape, router: SimulatedRouter, events: Events) -> None:
        self.shape = shape
        self.ledger = Ledger()
        self._router = router
        self._events = events
        self.nodes: dict[Role, list[SimulatedNode]] = {
            "prefill": [SimulatedPrefillNode(i, shape, events, self) for i in range(shape.prefill)],
            "decode": [SimulatedDecodeNode(i, shape, events, self) for i in range(shape.decode)],
        }
        """The nodes that get new requests."""
        self._every = [*self.nodes["prefill"], *self.nodes["decode"]]
        """All nodes, also those that were retired."""
        self._phase_s = {node.node_id: i / len(self._every) * shape.report_s for i, node in enumerate(self._every)}
        """Offset of each node's load reports, so that they are spread in time."""
        self._publishing: set[str] = set()
        self._reporting: set[str] = set()
        self._arrivals: Iterator[SimRequest] = iter(())
        self.all_arrived = False
        router.on_placed, router.on_refused = self._placed, self.ledger.refuse
        self._meet()

    # -- nodes that come and go

    def add(self, role: Role) -> None:
        """A new node takes requests from now on."""
        number, kind = len(self._every), SimulatedPrefillNode if role == "prefill" else SimulatedDecodeNode
        node = kind(number, self.shape, self._events, self)
        self._phase_s[node.node_id] = number * _SPREAD % 1 * self.shape.report_s
        self._every.append(node)
        self.nodes[role].append(node)
        self._meet()

    def retire(self, role: Role) -> SimulatedNode:
        """The newest node of the role gets no new requests; it finishes those that it has."""
        node = self.nodes[role].pop()
        self._meet()
        return node

    def _meet(self) -> None:
        self._router.meet([*self.nodes["prefill"], *self.nodes["decode"]])

    def run(self, workload: Iterator[SimRequest]) -> Ledger:
        """Run all of `workload`, which must be ordered by arrival; returns when the last request has ended."""
        self._arrivals = workload
        self._next_arrival()
        self._events.run()
        self.ledger.close(self._every)
        return self.ledger

    # -- a request's life

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        self.all_arrived = request is None
        if request is not None:
            self._events.at(request.arrival_s, self._arrive, request)

    def _arrive(self, request: SimRequest) -> None:
        self._next_arrival()
        self.ledger.arrived(request)
        tokens = self.shape.block_tokens
        blocks = len(request.hashes)
        request.private_blocks = max(0, -(-(request.input_tokens + request.output_tokens) // tokens) - blocks)
        if blocks > self.shape.cache_blocks or blocks + request.private_blocks > self.shape.decode_blocks:
            self.ledger.refuse(request, "longer than a node's cache")
            return
        self._router.submit(request)

    def _placed(self, request: SimRequest) -> None:
        """The router sends the request to its nodes, at once or after a wait."""
        (request.prefill_node or request.decode_node).submit(request)

    def prefill_began(self, request: SimRequest) -> None:
        """The prefill node offers the KV."""
        request.decode_node.submit(request)

    def granted(self, request: SimRequest) -> None:
        """The decode node has room: reserve the link for the relay."""
        missing = request.input_tokens - request.hit_tokens(self.shape.block_tokens, request.decode_hit_blocks)
        request.sent_bytes = float(missing * self.shape.hardware.kv_token_bytes)
        arrives_s = request.prefill_node.send_s(request, request.sent_bytes)
        self._events.at(arrives_s, self._arrived, request)

    def first_token(self, request: SimRequest) -> None:
        """The client sees the first token; a one-token answer ends with it."""
        self.ledger.first_token(request)
        self._router.computed(request)
        if request.output_tokens > 1:
            return
        request.finished_s = request.first_token_s
        if request.prefill_node is not None:
            request.prefill_node.release(request)
            request.decode_node.drop(request)
        self.finished(request)

    def _arrived(self, request: SimRequest) -> None:
        if request.finished_s >= 0:
            return  # it ended with its first token
        request.prefill_node.release(request)
        self._router.relayed(request)
        request.decode_node.join(request)

    def finished(self, request: SimRequest) -> None:
        """The last token was generated."""
        self.ledger.finish(request)
        self._router.finished(request)

    # -- reports to the router, delayed

    def changed(self, node: SimulatedNode) -> None:
        """Schedule the publishing of the node's blocks and its next load report."""
        events, name = self._events, node.node_id
        if node.cache.journal and name not in self._publishing:
            self._publishing.add(name)
            events.after(self.shape.index_delay_s, self._publish, node)
        if name not in self._reporting:
            self._reporting.add(name)
            period_s, phase_s = self.shape.report_s, self._phase_s[name]
            turns = int((events.now_s - phase_s) / period_s + 1)
            events.at(turns * period_s + phase_s, self._report, node)

    def _publish(self, node: SimulatedNode) -> None:
        self._publishing.discard(node.node_id)
        journal, node.cache.journal = node.cache.journal, {}
        stored = [block for block, present in journal.items() if present]
        removed = [block for block, present in journal.items() if not present]
        self._router.blocks_changed(node.node_id, stored, removed)

    def _report(self, node: SimulatedNode) -> None:
        self._reporting.discard(node.node_id)
        self._router.report(node)
