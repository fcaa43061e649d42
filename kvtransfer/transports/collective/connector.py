"""The collective transport at a sender: a ZMQ link and a process group for each connection.

The sender asks the receiver for a group when it first connects. All code here runs on the sender's I/O thread, except the
blocking calls, which the group's own thread makes (`kvtransfer.transports.collective.process_group`).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import urlsplit

import zmq

from common.base.errors import PeerLost, ProtocolError
from common.base.sentences import counted
from kvtransfer.copy.cuda import as_tensor
from kvtransfer.mailbox import Command
from kvtransfer.transports.base import MESSAGE_BYTES, Buffer, Peer, Ready, StagingPool, TransportContext, fit_message
from kvtransfer.transports.choose import GLOO, TransportOffer
from kvtransfer.transports.collective import protocol
from kvtransfer.transports.collective.process_group import SENDING, GroupPlan, ProcessGroupThread, join_threads
from kvtransfer.transports.zmq import Context, DealerLink

log = logging.getLogger(__name__)

_LINGER_MS = 500


class CollectivePeer(Peer):
    """One connection: a ZMQ link, and a group once the receiver has answered. Raises: PeerLost."""

    def __init__(
        self,
        link: DealerLink,
        pool: StagingPool,
        plan: GroupPlan,
        incarnation: str,
        post: Callable[[Command], None],
        *,
        instead_of: str,
        window: int,
        now: float,
    ) -> None:
        super().__init__(plan.backend, incarnation, message_bytes=pool.buffer_bytes, window=window, now=now)
        self._link = link
        self._pool = pool
        self._name = plan.name
        self._usable = False
        self._answered = False
        self._thread_gone = False
        """The group's thread has ended, or was abandoned because it hangs."""
        self._failure = ""
        self._give_up_at = now + 2 * plan.timeout_s
        self._keep_alive_at = now + protocol.KEEP_ALIVE_S
        self.group = ProcessGroupThread(
            f"kv-group-to-{plan.name[:8]}",
            plan,
            on_ready=partial(post, self._ready),
            on_end=lambda reason: post(partial(self._ended, reason)),
        )
        try:
            self.group.start()
        except RuntimeError as error:
            link.close()
            raise PeerLost(f"no thread for a process group: {error}") from error
        link.send(protocol.CODEC.encode(protocol.GroupRequest(plan.name, plan.backend, pool.buffer_bytes, instead_of)))

    @property
    def has_room(self) -> bool:
        """Whether one more message may be sent; False until the group exists."""
        return self._usable and super().has_room

    def stage(self) -> Buffer:
        return self._pool.take()

    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        self._link.send(header, protocol.SIZE.pack(size_bytes))
        self.group.move(as_tensor(buffer)[:size_bytes], lambda: None)

    def _replies(self, ready: Ready, now: float) -> Iterator[bytes]:
        for data in self._link.replies(ready):
            if data[:1] == protocol.ACK_TAG:
                yield data[1:]
            else:
                self._on_reply(data[1:])
        if not self._usable and now >= self._give_up_at:
            self._failure = self._failure or "the process group was not built in time"
        if self._failure:
            raise PeerLost(self._failure)
        if now >= self._keep_alive_at:
            self._keep_alive_at = now + protocol.KEEP_ALIVE_S
            self._link.send(b"")

    def _on_reply(self, data: bytes) -> None:
        try:
            reply = protocol.CODEC.decode(data)
        except ProtocolError as error:
            log.warning("dropped a malformed group reply: %s", error)
            return
        if not isinstance(reply, protocol.GroupReply) or reply.name != self._name:
            return
        if reply.error:
            self._failure = reply.error
        else:
            self._answered = True
            self._link.send(protocol.CODEC.encode(protocol.GroupMeet()))
            self.group.meet(reply.port)

    def _ready(self) -> None:
        self._usable = True

    def _ended(self, reason: str) -> None:
        self._usable = False
        self._thread_gone = True
        self._failure = self._failure or reason
        if self.closed:
            self.close_link()

    def _free(self, buffer: Buffer) -> None:
        self._pool.give_back(buffer)

    def _close(self) -> None:
        # The link stays open until the thread has ended: the receiver may still wait for what is queued there.
        self._link.quiet()
        self.group.stop()
        if self._answered:
            self._link.send(protocol.CODEC.encode(protocol.GroupLeave()))
        if self._thread_gone:
            self.close_link()

    @property
    def link_closed(self) -> bool:
        """The peer is closed, and so is its link."""
        return self._link.closed

    def close_link(self) -> None:
        """Called after `close`, when the thread has ended or is abandoned."""
        self._link.close(linger_ms=_LINGER_MS if self._answered else 0)


class CollectiveConnector:
    """One backend at a sender, whose sockets are bound to `interface`, an address of this host.

    `gpu_id` is the GPU that holds this rank's KV, for NCCL. `message_bytes` and `window` (at most `WINDOW`) as in
    `ZmqConnector`.
    """

    def __init__(
        self,
        interface: str,
        *,
        backend: str = GLOO,
        gpu_id: str = "",
        message_bytes: int = MESSAGE_BYTES,
        window: int = protocol.WINDOW,
        timeout_s: float = protocol.TIMEOUT_S,
    ) -> None:
        self.offer = TransportOffer(backend, gpu_id=gpu_id)
        self._interface = interface
        self._backend = backend
        self._message_bytes = message_bytes
        self._window = min(window, protocol.WINDOW)
        self._timeout_s = timeout_s
        self._context: Context = zmq.Context()
        self._peers: list[CollectivePeer] = []
        self._names: dict[str, str] = {}
        """The last group at each endpoint, the latest last."""

    def attach(self, context: TransportContext) -> None:
        self._transport_context = context
        self._pool = StagingPool(
            fit_message(self._message_bytes, context.unit_bytes),
            keep=self._window,
            make=protocol.buffer_maker(self._backend, context),
        )

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> CollectivePeer:
        self._peers = [peer for peer in self._peers if not peer.link_closed]
        size = self._pool.buffer_bytes
        if not protocol.has_room(self._backend, [peer.message_bytes for peer in self._peers] + [size], size):
            count = counted(len(self._peers), "connection fills/connections fill")
            raise PeerLost(f"{count} the GPU memory that is set aside for staging")
        try:
            store_host = urlsplit(offer.endpoint).hostname or ""
        except ValueError as error:
            raise PeerLost(f"{offer.endpoint!r} is not a valid endpoint: {error}") from error
        link = DealerLink(self._context, self._transport_context.poller, offer.endpoint)
        plan = GroupPlan(
            backend=self._backend,
            name=secrets.token_hex(16),
            rank=SENDING,
            interface=self._interface,
            store_host=store_host,
            timeout_s=self._timeout_s,
        )
        peer = CollectivePeer(
            link,
            self._pool,
            plan,
            incarnation,
            self._transport_context.post,
            instead_of=self._names.pop(offer.endpoint, ""),
            window=self._window,
            now=now,
        )
        self._peers.append(peer)
        if len(self._names) >= protocol.MAX_GROUPS:
            del self._names[next(iter(self._names))]
        self._names[offer.endpoint] = plan.name
        return peer

    def close(self) -> None:
        join_threads(peer.group for peer in self._peers)
        for peer in self._peers:
            peer.close_link()
        self._context.destroy(linger=0)  # a link that was not closed must not block this for ever
