"""The router's live view of the nodes: who is listed, connected and answering, and how loaded each is.

Runs on the router's event loop. A node is usable when membership lists it, its link stands, it has ponged
within the lease and its engine turns. A broken link, silence past the lease, an engine that stands still or a new
incarnation under the same name is a loss: reported at once, once per link or standstill. What Redis no longer lists but still answers finishes its work and gets no more.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from common.base.clock import Clock, monotonic
from common.base.errors import HandshakeRefused, Unavailable
from common.control.links import Link
from common.control.messages import (
    Abort,
    AttemptKey,
    DecodeRequest,
    Message,
    NodeLoad,
    NodeRecord,
    Ping,
    Pong,
    PrefillRequest,
    Role,
)
from common.kv.layout import DTYPE_BYTES, KVLayout, check_compatible
from router.policy import Fleet

log = logging.getLogger(__name__)

PINGS_PER_LEASE = 6
_STUCK_S = 30.0
"""An engine whose loop has not come round for so long (or for ten leases) is stuck. A step may take seconds."""
_MAX_OWED_ABORTS = 10_000


def kv_kind(layout: KVLayout) -> str:
    """Equal for nodes between which KV can be relayed; the parallel split does not matter."""
    shape = (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.dtype)
    return f"{layout.fingerprint}/{shape}"


def token_bytes(layout: KVLayout) -> int:
    """KV bytes of one token, over all ranks."""
    return 2 * layout.num_layers * layout.num_kv_heads * layout.head_dim * DTYPE_BYTES[layout.dtype]


class OpenLeg(NamedTuple):
    """What a request asks of a node: prompt tokens to compute and KV blocks to hold."""

    order: int
    """Among all requests sent to this node."""
    tokens: float
    blocks: int


@dataclass
class Node:
    """One incarnation as this router knows it."""

    record: NodeRecord
    link: Link | None = None
    listed: bool = True
    load: NodeLoad = field(default_factory=NodeLoad)
    last_pong_s: float | None = None
    linked_s: float = 0.0
    stuck: bool = False
    """It answers, but its engine stands still."""
    unreachable: bool = False
    """Its address is none, or this process has no socket left."""
    legs: dict[AttemptKey, OpenLeg] = field(default_factory=dict[AttemptKey, OpenLeg])
    """The open ones."""
    sent: int = 0
    reported: int = 0
    """Of the requests sent, the last pong can include so many: the first ones."""
    pings: deque[int] = field(default_factory=deque[int])
    """For each unanswered ping, how many requests had been sent before it."""
    owed_aborts: list[AttemptKey] = field(default_factory=list[AttemptKey])
    """For attempts given up while there was no link; they might still run there."""

    @property
    def node_id(self) -> str:
        return self.record.peer.node_id

    @property
    def incarnation(self) -> str:
        return self.record.peer.incarnation

    @property
    def works(self) -> bool:
        """Listed, connected, and has answered that its engine turns."""
        return self.listed and self.link is not None and self.last_pong_s is not None and not self.stuck

    @property
    def usable(self) -> bool:
        """It works and is not draining."""
        return self.works and not self.load.draining

    @property
    def unreported(self) -> list[OpenLeg]:
        """Open legs that the last pong cannot include."""
        return [leg for leg in self.legs.values() if leg.order > self.reported]

    def columns(self) -> dict[str, float]:
        """What the last pong and the requests since say, as the columns of a `Fleet`."""
        load, unreported = self.load, self.unreported
        return {
            "waiting": load.waiting,
            "running": load.running,
            "queued_tokens": load.queued_tokens,
            "free_blocks": load.kv_blocks_total - load.kv_blocks_used,
            "total_blocks": load.kv_blocks_total,
            "in_flight": len(unreported),
            "in_flight_tokens": sum(leg.tokens for leg in unreported),
            "in_flight_blocks": sum(leg.blocks for leg in unreported),
            "ended": 0,
            "ended_tokens": 0,
        }


class NodeTable:
    """All nodes. `on_message(incarnation, message)` gets everything but pongs; `on_lost(incarnation, reason)`
    every loss; `on_usable()` is called when a node becomes usable, `on_load(node)` with every report. Call `tick` every `tick_s`.
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
    ) -> None:
        self.tick_s = lease_s / PINGS_PER_LEASE
        self._ping = Ping(router_id, lease_s)
        self._lease_s = lease_s
        self._stuck_s = max(_STUCK_S, 10 * lease_s)
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_usable = on_usable
        self._on_load = on_load
        self._clock = clock
        self._last_tick_s = clock()
        self._was_late = False
        self._held_up_s: float | None = None
        """When it was last found that this loop had been held up past the lease."""
        self._nodes: dict[str, Node] = {}
        self.fleets: dict[Role, Fleet] = {"prefill": Fleet("prefill"), "decode": Fleet("decode")}
        """The usable nodes as the policies see them."""
        self.finishing = Fleet("decode")
        """The decode nodes that drain and work: where a stream whose node is lost goes on if there is no other."""

    # -- membership

    def update(self, records: list[NodeRecord]) -> None:
        """Take over what membership lists now."""
        listed = {record.peer.incarnation: record for record in records}
        names = {record.peer.node_id: record.peer.incarnation for record in records}
        replaced: list[Node] = []
        relisted = False
        for node in list(self._nodes.values()):
            was_usable = node.usable
            node.listed = node.incarnation in listed
            self._sync(node)
            relisted |= node.usable and not was_usable
            if names.get(node.node_id, node.incarnation) != node.incarnation:
                replaced.append(node)
                self._close_link(node)
                del self._nodes[node.incarnation]
            elif not node.listed and node.link is None:
                del self._nodes[node.incarnation]
        for node in replaced:  # all of them are closed: no attempt moves to a node that is next
            self._report_loss(node, f"{node.node_id} restarted")
        for incarnation, record in listed.items():
            if incarnation not in self._nodes:
                node = self._nodes[incarnation] = Node(record)
                log.info("%s node %s is listed at %s", record.role, node.node_id, record.peer.control_address)
                self._connect(node)
        if relisted:  # its next pong finds it usable already
            self._on_usable()

    def tick(self) -> None:
        """Ping every node, give up the silent ones, renew links that broke."""
        now = self._clock()
        # If this loop itself was held up, everybody seems silent: hear them out before judging. Once: what had come is
        # read until the next tick, and a loop that is late each time must not keep the dead alive.
        last, self._last_tick_s = self._last_tick_s, now
        late = self._was_late = not self._was_late and now - last > self._lease_s / 2
        self._drop_expired(now, last)
        silent: set[str] = set() if late else self._drop_silent(now)
        for node in list(self._nodes.values()):
            if node.incarnation in silent:
                if not node.listed and node.link is not None:
                    self._forget(node, f"{node.node_id} never answered")
            elif node.link is not None:
                self._send_ping(node)
            elif node.listed:
                self._connect(node)
            else:
                del self._nodes[node.incarnation]

    def _drop_silent(self, now: float) -> set[str]:
        """Give up the links on which nothing came for a lease. Returns which nodes are silent, also those that never
        spoke, whose links stay.

        All of them before any loss is reported, so that no attempt moves to a node that is next.
        """
        silent = [
            node
            for node in self._nodes.values()
            if node.link is not None and now - (node.last_pong_s or node.linked_s) > self._lease_s
        ]
        fell_silent = [node for node in silent if node.last_pong_s is not None]
        for node in fell_silent:
            self._close_link(node)
        for node in fell_silent:
            self._report_loss(node, f"{node.node_id} was silent for {self._lease_s:g} s")
        return {node.incarnation for node in silent}

    def _drop_expired(self, now: float, last_tick_s: float) -> None:
        """Give up the links on which this router itself was silent past the lease, as their nodes have done.

        All of them before any loss is reported, so that no attempt moves to a node that is next. New links at once.
        """
        expired = [
            node
            for node in self._nodes.values()
            if node.last_pong_s is not None and now - max(last_tick_s, node.linked_s) > self._lease_s
        ]
        for node in expired:
            self._close_link(node)
        if expired:
            self._held_up_s = now
        for node in expired:
            held_up_s = now - max(last_tick_s, node.linked_s)
            self._report_loss(node, f"this router was held up for {held_up_s:.1f} s, longer than its lease there")
        for node in expired:
            if node.listed and node.link is None:
                self._connect(node)

    @property
    def rejoining(self) -> bool:
        """Nodes are missing only because this router was held up; they are about to answer again."""
        return self._held_up_s is not None and self._clock() - self._held_up_s <= self._lease_s

    def close(self) -> None:
        """Close all links; losses are not reported."""
        for node in self._nodes.values():
            if node.link is not None:
                node.link.close()
                node.link = None
            self._sync(node)
        self._nodes.clear()

    # -- use

    def usable(self, role: str) -> list[Node]:
        """Nodes of this role that may get new work. Silence is judged by `tick` alone."""
        return [node for node in self._nodes.values() if node.record.role == role and node.usable]

    def known(self) -> Iterable[Node]:
        """Every node, usable or not."""
        return self._nodes.values()

    def get(self, incarnation: str) -> Node | None:
        """The node with this incarnation, if it is known."""
        return self._nodes.get(incarnation)

    def answers(self, incarnation: str) -> bool:
        """Whether it has ponged within the last half of a lease."""
        node = self._nodes.get(incarnation)
        return (
            node is not None and node.last_pong_s is not None and self._clock() - node.last_pong_s < self._lease_s / 2
        )

    def send(
        self,
        incarnation: str,
        message: PrefillRequest | DecodeRequest | Abort,
        *,
        tokens: float | None = None,
        blocks: int = 0,
        work_s: float = 0.0,
    ) -> None:
        """Send, and count a request as in flight until `release`, with `tokens` to compute (None: all of the
        prompt, estimated to take `work_s`) and `blocks` of KV.

        An abort that cannot be sent is kept for the next link. Raises: Unavailable for a request that cannot be sent.
        """
        node = self._nodes.get(incarnation)
        if isinstance(message, Abort):
            self._send_abort(node, message)
            return
        if node is None or node.link is None:
            raise Unavailable("it is not connected")
        node.link.send(message)
        node.sent += 1
        tokens = len(message.token_ids) if tokens is None else tokens
        node.legs[message.key] = OpenLeg(node.sent, tokens, blocks)
        self._fleet(node).sent(incarnation, tokens=tokens, blocks=blocks, work_s=work_s)

    def release(self, incarnation: str, key: AttemptKey) -> None:
        """This leg is over."""
        node = self._nodes.get(incarnation)
        leg = None if node is None else node.legs.pop(key, None)
        if node is not None and leg is not None:
            reported = leg.order <= node.reported
            self._fleet(node).over(incarnation, tokens=leg.tokens, blocks=leg.blocks, reported=reported)

    # -- columns

    def _fleet(self, node: Node) -> Fleet:
        return self.finishing if node.incarnation in self.finishing else self.fleets[node.record.role]

    def _sync(self, node: Node) -> None:
        """Bring the node's row up to date: it has one exactly while it is usable, or finishes what it has."""
        finishes = node.works and node.load.draining and node.record.role == "decode"
        fleet, other = self.fleets[node.record.role], self.finishing
        if finishes:
            fleet, other = other, fleet
        other.drop(node.incarnation)
        if not node.usable and not finishes:
            fleet.drop(node.incarnation)
        elif node.incarnation in fleet:
            fleet.update(node.incarnation, **node.columns())
        else:
            record = node.record
            fleet.add(
                node.node_id,
                node.incarnation,
                kv_kind=kv_kind(record.layout),
                context=record.model.max_model_len,
                capacity=record.max_num_seqs,
                token_bytes=token_bytes(record.layout),
                **node.columns(),
            )

    # -- links

    def _connect(self, node: Node) -> None:
        """Open a link; where that fails, the next tick tries again: one node's address must not cost the others."""
        incarnation = node.incarnation
        try:
            node.link = Link(
                node.record.peer.control_address,
                lambda message: self._receive(incarnation, message),
                lambda reason: self._lost(incarnation, reason),
            )
        except Unavailable as error:
            if not node.unreachable:
                log.warning("no link to %s node %s: %s", node.record.role, node.node_id, error)
            node.unreachable = True
            return
        node.unreachable = False
        node.linked_s, node.last_pong_s = self._clock(), None
        node.pings.clear()
        owed, node.owed_aborts = node.owed_aborts, []
        for key in owed:
            self._send_abort(node, Abort(key))
        self._send_ping(node)

    def _send_ping(self, node: Node) -> None:
        assert node.link is not None
        try:
            node.link.send(self._ping)
        except Unavailable as error:
            log.warning("cannot ping %s: %s", node.node_id, error)  # silence will decide
            return
        node.pings.append(node.sent)

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
            self._drop_link(node, f"{node.record.peer.control_address} now belongs to another incarnation")
            return
        was_usable, did_work = node.usable, node.works
        node.last_pong_s = self._clock()
        node.load = pong.load
        # The link keeps order: the pong's figures include what was sent before its ping, and nothing later.
        if node.pings:
            node.reported = node.pings.popleft()
        was_stuck, node.stuck = node.stuck, not pong.load.step_age_s <= self._stuck_s
        self._sync(node)
        self._on_load(node)
        if node.stuck and not was_stuck:
            # The link stays: it carries the aborts, and the pong that says that the engine turns again.
            self._report_loss(node, f"its engine has not come round for {pong.load.step_age_s:.0f} s")
        if node.usable and not was_usable:
            log.info("%s node %s is usable", node.record.role, node.node_id)
            self._tell_strangers(node)
        if (node.usable and not was_usable) or (node.works and not did_work):
            self._on_usable()

    def _tell_strangers(self, node: Node) -> None:
        """Say which nodes of the same model cannot exchange KV with `node`, and why: nothing is relayed between them."""
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
            self._drop_link(node, reason)

    def _drop_link(self, node: Node, reason: str) -> None:
        """Give the link up; a listed node gets a new one with the next tick."""
        self._close_link(node)
        self._report_loss(node, reason)

    def _close_link(self, node: Node) -> None:
        if node.link is not None:
            node.link.close()
            refused, node.link = node.link.refused, None
            for message in refused:
                if isinstance(message, Abort):
                    self._send_abort(node, message)
        node.last_pong_s = None
        self._sync(node)

    def _report_loss(self, node: Node, reason: str) -> None:
        log.warning("lost %s node %s: %s", node.record.role, node.node_id, reason)
        self._on_lost(node.incarnation, reason)

    def _forget(self, node: Node, reason: str) -> None:
        self._drop_link(node, reason)
        self._nodes.pop(node.incarnation, None)
