"""The router's live view of the nodes: which ones are listed, connected and answering, and how loaded each is.

Runs on the router's event loop. A node is usable when membership lists it, its link stands, it has answered a ping
within the lease, its engine loop runs, and it is not draining. A broken link, silence longer than the lease, a stuck
engine loop and a new incarnation under the same name are losses: each is reported at once and only once. A node that
Redis no longer lists but that still answers finishes its work and gets no new requests.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial

from common.base.clock import Clock, monotonic
from common.base.errors import HandshakeRefused, Unavailable
from common.control.links import Link
from common.control.messages import Abort, AttemptKey, DecodeRequest, Message, NodeRecord, Ping, Pong, PrefillRequest
from common.control.pooling import PoolRequest
from common.kv.rank_layout import check_compatible
from router.nodes.fleets import ModelFleets
from router.nodes.node import Node, NodeLink, OpenLeg

log = logging.getLogger(__name__)

OpenLink = Callable[[str, Callable[[Message], None], Callable[[str], None]], NodeLink]
"""Opens a link: (address, on_message, on_lost) -> link. Raises: Unavailable for a malformed address."""

PINGS_PER_LEASE, PINGS_WHEN_IDLE = 6, 3
_STUCK_S = 30.0
"""An engine loop without progress for this long (or for ten leases) is stuck. One step may take seconds."""
_MAX_OWED_ABORTS = 10_000


class NodeTable:
    """All nodes. Call `tick` after each `tick_s`.

    `on_message(incarnation, message)` gets everything but pongs, `on_lost(incarnation, reason)` every loss; `on_usable()` is
    called when a node becomes usable, `on_load(node)` with every pong.
    """

    def __init__(
        self,
        router_id: str,
        *,
        lease_s: float,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[str, str], None],
        on_usable: Callable[[], None] = lambda: None,
        on_load: Callable[[Node], None] = lambda _: None,
        clock: Clock = monotonic,
        open_link: OpenLink = Link,
    ) -> None:
        self.router_id = router_id
        self._ping = Ping(router_id, lease_s)
        self._lease_s = lease_s
        self._stuck_s = max(_STUCK_S, 10 * lease_s)
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_usable = on_usable
        self._on_load = on_load
        self._clock = clock
        self._open_link = open_link
        self._last_tick_s = clock()
        self._was_late = False
        self._stalled_s: float | None = None
        """When a stall of this event loop for longer than the lease was last detected."""
        self._nodes: dict[str, Node] = {}
        self._fleets: defaultdict[str, ModelFleets] = defaultdict(ModelFleets)
        """By the name under which nodes registered their model; they stay when its last node is gone."""

    @property
    def idle(self) -> bool:
        """Whether all nodes answer and none has anything to do."""
        return all(node.works and not node.legs and node.load.idle for node in self._nodes.values())

    @property
    def tick_s(self) -> float:
        """Seconds until the next `tick`."""
        return self._lease_s / (PINGS_WHEN_IDLE if self.idle else PINGS_PER_LEASE)

    # -- membership

    def update(self, records: list[NodeRecord]) -> None:
        """Use the nodes that membership lists now."""
        listed = {record.peer.incarnation: record for record in records}
        names = {record.peer.node_id: record.peer.incarnation for record in records}
        replaced: list[Node] = []
        relisted = False
        for node in list(self._nodes.values()):
            did_work = node.works
            node.listed = node.incarnation in listed
            self._fleets[node.record.model.name].sync(node)
            relisted |= node.works and not did_work
            if names.get(node.node_id, node.incarnation) != node.incarnation:
                replaced.append(node)
                del self._nodes[node.incarnation]
            elif not node.listed and node.link is None:
                del self._nodes[node.incarnation]
        self._lose(replaced, lambda node: f"{node.node_id} restarted")
        for incarnation, record in listed.items():
            known = self._nodes.get(incarnation)
            if known is not None and known.record.adapters != record.adapters:
                known.record = record
                if known.fleet is not None:
                    known.fleet.set_adapters(incarnation, record.adapters)
                relisted |= known.usable  # requests may wait for a node with an adapter
            elif known is None:
                node = self._nodes[incarnation] = Node(record)
                log.info("%s node %s is listed at %s", record.role, node.node_id, record.peer.control_address)
                self._connect(node)
        if relisted:  # report them now: their next pongs show no change
            self._on_usable()

    def tick(self) -> None:
        """Ping every node, drop silent ones, reopen broken links."""
        now = self._clock()
        # If this loop stalled, every node seems silent: skip the check once, so that the messages that have arrived are
        # read before the next tick. Only once, because a loop that is always late must not keep dead nodes alive.
        last, self._last_tick_s = self._last_tick_s, now
        late = self._was_late = not self._was_late and now - last > self._lease_s / 2
        self._drop_expired(now, last)
        silent: set[str] = set() if late else self._drop_silent(now)
        for node in list(self._nodes.values()):
            if node.incarnation in silent:
                if not node.listed and node.link is not None:
                    self._forget(node)
            elif node.link is not None:
                self.ping(node)
            elif node.listed:
                self._connect(node)
            else:
                del self._nodes[node.incarnation]

    def _drop_silent(self, now: float) -> set[str]:
        """Close links that were silent for a lease. Returns the silent nodes; those that never answered keep their links."""
        silent = [
            node
            for node in self._nodes.values()
            if node.link is not None and now - (node.last_pong_s or node.linked_s) > self._lease_s
        ]
        fell_silent = [node for node in silent if node.last_pong_s is not None]
        self._lose(fell_silent, lambda node: f"{node.node_id} was silent for {self._lease_s:g} s")
        return {node.incarnation for node in silent}

    def _drop_expired(self, now: float, last_tick_s: float) -> None:
        """Replace the links on which this router was silent for longer than its lease: their nodes count it as failed."""
        expired = [
            node
            for node in self._nodes.values()
            if node.last_pong_s is not None and now - max(last_tick_s, node.linked_s) > self._lease_s
        ]
        if expired:
            self._stalled_s = now
        self._lose(
            expired,
            lambda node: (
                f"this router stalled for {now - max(last_tick_s, node.linked_s):.1f} s, longer than its lease at the node"
            ),
        )
        for node in expired:
            if node.listed and node.link is None:
                self._connect(node)

    @property
    def rejoining(self) -> bool:
        """Nodes are missing only because this router stalled; they are about to answer again."""
        return self._stalled_s is not None and self._clock() - self._stalled_s <= self._lease_s

    def close(self) -> None:
        """Close all links; losses are not reported."""
        for node in self._nodes.values():
            if node.link is not None:
                node.link.close()
                node.link = None
            self._fleets[node.record.model.name].sync(node)
        self._nodes.clear()

    # -- use

    def usable(self, role: str) -> list[Node]:
        """Nodes of this role that may get new requests to generate. Only `tick` checks for silence."""
        return [node for node in self._nodes.values() if node.record.role == role and node.usable and not node.pools]

    @property
    def num_pooling(self) -> int:
        """Number of usable nodes of pooling models."""
        return sum(node.usable and node.pools for node in self._nodes.values())

    def fleets(self, model: str) -> ModelFleets:
        """The nodes of the model that they registered under this name."""
        return self._fleets[model]

    def known(self) -> Iterable[Node]:
        """Every node, usable or not."""
        return self._nodes.values()

    def get(self, incarnation: str) -> Node | None:
        """The node with this incarnation, if it is known."""
        return self._nodes.get(incarnation)

    def answers(self, incarnation: str) -> bool:
        """The node answered a ping within the last half lease, or its answer may wait unread because this event loop stalled."""
        node, now = self._nodes.get(incarnation), self._clock()
        if node is None:
            return False
        if node.last_pong_s is None:
            return node.listed and self.rejoining
        since_tick_s = now - self._last_tick_s
        stalled = self._was_late or since_tick_s > self._lease_s / 2
        asked_just_now = len(node.pings) == 1 and since_tick_s < self._lease_s / 6
        return stalled or now - node.last_pong_s < self._lease_s / 2 or not node.pings or asked_just_now

    def send(
        self,
        incarnation: str,
        message: PrefillRequest | DecodeRequest | PoolRequest | Abort,
        *,
        tokens: float = 0.0,
        blocks: int = 0,
        work_s: float = 0.0,
    ) -> None:
        """Send a message. A request also opens its leg (`open_leg`).

        An abort that cannot be sent is kept for the next link. Raises: Unavailable for a request that cannot be sent.
        """
        node = self._nodes.get(incarnation)
        if isinstance(message, Abort):
            self._send_abort(node, message)
            return
        if node is None or node.link is None:
            raise Unavailable("it is not connected")
        node.link.send(message)
        self.open_leg(node, message.key, tokens=tokens, blocks=blocks, work_s=work_s)

    def open_leg(self, node: Node, key: AttemptKey, *, tokens: float, blocks: int, work_s: float) -> None:
        """Count a request as in flight at this node until `release`.

        `tokens`: prompt tokens to compute, which is estimated to take `work_s`; `blocks`: of KV to hold.
        """
        node.sent += 1
        node.legs[key] = OpenLeg(node.sent, tokens, blocks)
        if node.fleet is not None:
            node.fleet.sent(node.incarnation, tokens=tokens, blocks=blocks, work_s=work_s)

    def relayed(self, incarnation: str, source: str, size_bytes: int) -> None:
        """A request relayed `size_bytes` of KV from `source` to this node."""
        node = self._nodes.get(incarnation)
        if node is None or source not in self._nodes:
            return
        if source not in node.relayed_from:  # those that are gone must not add up
            node.relayed_from = {known: size for known, size in node.relayed_from.items() if known in self._nodes}
        node.relayed_from[source] = node.relayed_from.get(source, 0) + size_bytes

    def release(self, incarnation: str, key: AttemptKey) -> None:
        """This leg is over."""
        node = self._nodes.get(incarnation)
        leg = None if node is None else node.legs.pop(key, None)
        if node is not None and leg is not None and node.fleet is not None:
            reported = leg.order <= node.reported
            node.fleet.over(incarnation, tokens=leg.tokens, blocks=leg.blocks, reported=reported)

    def ping(self, node: Node) -> None:
        """Ask a connected node for its load; renews this router's lease there."""
        assert node.link is not None
        node.pings.append(node.sent)
        try:
            node.link.send(self._ping)
        except Unavailable as error:
            node.pings.pop()
            log.warning("cannot ping %s: %s", node.node_id, error)  # if this persists, the node counts as silent

    # -- links

    def _connect(self, node: Node) -> None:
        """Open a link. If that fails, the next tick tries again: one node's bad address must not affect the others."""
        incarnation = node.incarnation
        try:
            node.link = self._open_link(
                node.record.peer.control_address, partial(self._receive, incarnation), partial(self._lost, incarnation)
            )
        except Unavailable as error:
            if not node.unreachable:
                log.warning("cannot open a link to %s node %s: %s", node.record.role, node.node_id, error)
            node.unreachable = True
            return
        node.unreachable = False
        node.linked_s, node.last_pong_s = self._clock(), None
        node.pings.clear()
        owed, node.owed_aborts = node.owed_aborts, []
        for key in owed:
            self._send_abort(node, Abort(key))
        self.ping(node)

    def _send_abort(self, node: Node | None, message: Abort) -> None:
        if node is None:
            return
        if node.link is not None:
            try:
                node.link.send(message)
                return
            except Unavailable as error:
                log.warning("cannot send an abort to %s: %s", node.node_id, error)
        if len(node.owed_aborts) < _MAX_OWED_ABORTS:
            node.owed_aborts.append(message.key)

    def _receive(self, incarnation: str, message: Message) -> None:
        if isinstance(message, Pong):
            self._take_pong(incarnation, message)
        else:
            self._on_message(incarnation, message)

    def _take_pong(self, incarnation: str, pong: Pong) -> None:
        node = self._nodes.get(incarnation)
        if node is None:
            return
        if pong.incarnation != incarnation:
            self._lose([node], lambda node: f"{node.record.peer.control_address} now belongs to another incarnation")
            return
        was_usable, did_work = node.usable, node.works
        node.last_pong_s, node.lost = self._clock(), False
        node.load = pong.load
        # The link keeps order: the pong includes exactly the requests that were sent before its ping.
        if node.pings:
            node.reported = node.pings.popleft()
        was_stuck, node.stuck = node.stuck, not pong.load.step_age_s <= self._stuck_s
        self._fleets[node.record.model.name].sync(node)
        self._on_load(node)
        if node.stuck and not was_stuck:
            # The link stays open: it carries the aborts, and the pong that says that the engine loop runs again.
            self._report_loss(node, f"its engine loop has made no progress for {pong.load.step_age_s:.0f} s")
        usable, works = node.usable, node.works
        if usable and not was_usable:
            log.info("%s node %s is usable", node.record.role, node.node_id)
            self._warn_of_incompatible(node)
        if (usable and not was_usable) or (works and not did_work):
            self._on_usable()

    def _warn_of_incompatible(self, node: Node) -> None:
        """Log which nodes of the same model cannot exchange KV with `node`, and why: nothing is relayed between them."""
        prefills = node.record.role == "prefill"
        for other in self.usable("decode" if prefills else "prefill"):
            src, dst = (node, other) if prefills else (other, node)
            if node.record.model.name == other.record.model.name:
                try:
                    check_compatible(src.record.layout, dst.record.layout)
                except HandshakeRefused as error:
                    log.warning("no KV can be relayed from %s to %s: %s", src.node_id, dst.node_id, error)

    def _lost(self, incarnation: str, reason: str) -> None:
        node = self._nodes.get(incarnation)
        if node is not None:
            self._lose([node], lambda _: reason)

    def _lose(self, nodes: list[Node], why: Callable[[Node], str]) -> None:
        """Close all links, then report the losses, so that no attempt moves to a node that is lost next."""
        for node in nodes:
            self._close_link(node)
        for node in nodes:
            self._report_loss(node, why(node))

    def _close_link(self, node: Node) -> None:
        if node.link is not None:
            node.link.close()
            refused, node.link = node.link.refused, None
            for message in refused:
                if isinstance(message, Abort):
                    self._send_abort(node, message)
        node.last_pong_s = None
        self._fleets[node.record.model.name].sync(node)

    def _report_loss(self, node: Node, reason: str) -> None:
        node.lost = True
        log.warning("lost %s node %s: %s", node.record.role, node.node_id, reason)
        self._on_lost(node.incarnation, reason)

    def _forget(self, node: Node) -> None:
        """A node that is not listed any more does not answer on its latest link."""
        self._close_link(node)
        if not node.lost:
            self._report_loss(node, f"{node.node_id} never answered")
        self._nodes.pop(node.incarnation, None)
