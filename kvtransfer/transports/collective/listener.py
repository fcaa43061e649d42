"""The collective transport at a receiver: a process group for each connected sender.

KV travels by torch.distributed: gloo between CPUs, NCCL between CUDA devices. A group is made when a sender first
connects: the sender asks for one, the receiver opens the store at which both meet, and either end may tear it down. All
code here runs on the receiver's I/O thread, except the blocking calls, which the group's own thread makes
(`kvtransfer.transports.collective.process_group`).
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from functools import partial

import zmq

from common.base.errors import ProtocolError
from kvtransfer import wire
from kvtransfer.copy.cuda import as_tensor
from kvtransfer.transports.base import Arrival, Buffer, Ready, StagingPool, TransportContext
from kvtransfer.transports.choose import GLOO, TransportOffer
from kvtransfer.transports.collective import protocol
from kvtransfer.transports.collective.process_group import RECEIVING, GroupPlan, ProcessGroupThread, join_threads
from kvtransfer.transports.zmq import RouterSocket

log = logging.getLogger(__name__)


@dataclass(eq=False)
class _GroupSender:
    """One sender and its group, as the receiver sees them."""

    identity: bytes
    name: str
    group: ProcessGroupThread
    pool: StagingPool
    heard_at: float
    waiting: int = 0
    """Payloads announced and not acknowledged yet."""


@dataclass(frozen=True)
class _Origin:
    sender: _GroupSender
    buffer: Buffer


class CollectiveListener:
    """One backend at a receiver. Its ZMQ socket and its groups are bound to `interface`, an address of this host.

    Raises: ConfigError when it cannot listen on tcp `interface`:`port`.
    """

    def __init__(
        self, interface: str, port: int, *, backend: str = GLOO, gpu_id: str = "", timeout_s: float = protocol.TIMEOUT_S
    ) -> None:
        self._interface = interface
        self._backend = backend
        self._timeout_s = timeout_s
        self._router = RouterSocket(interface, port, wire.MAX_HEADER_BYTES)
        self.offer = TransportOffer(backend, self._router.endpoint, gpu_id=gpu_id)
        self._senders: dict[bytes, _GroupSender] = {}
        """By ZMQ identity."""
        self._groups: list[ProcessGroupThread] = []
        self._arrived: deque[Arrival] = deque()
        self._now = 0.0

    def attach(self, context: TransportContext) -> None:
        """Raises: ConfigError if the backend cannot use this rank's memory."""
        self._context = context
        self._make_buffer = protocol.buffer_maker(self._backend, context)
        context.poller.register(self._router.socket, zmq.POLLIN)

    def on_poll(self, ready: Ready, now: float) -> None:
        self._now = now
        for sender in list(self._senders.values()):
            if now - sender.heard_at > protocol.SILENCE_S:
                self._drop(sender, f"nothing heard from the sender for {protocol.SILENCE_S:g} s")

    def receive(self) -> Arrival | None:
        while frames := self._router.receive(3):
            try:
                self._on_frames(frames[0].bytes, frames[1:])
            except ProtocolError as error:
                log.warning("dropped a malformed message: %s", error)
        return self._arrived.popleft() if self._arrived else None

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        origin: _Origin = arrival.origin
        origin.sender.waiting -= 1
        origin.sender.pool.give_back(origin.buffer)
        if ack is not None:
            self._router.send(origin.sender.identity, protocol.ACK_TAG + wire.encode(ack))

    def close(self) -> None:
        for sender in list(self._senders.values()):
            self._drop(sender, "the receiver was closed")
        join_threads(self._groups)
        self._router.close()

    def _on_frames(self, identity: bytes, frames: list[zmq.Frame]) -> None:
        """Handle one message. Raises: ProtocolError."""
        sender = self._senders.get(identity)
        if sender is not None:
            sender.heard_at = self._now
        if len(frames) == 2:
            self._expect(sender, frames[0].bytes, frames[1].bytes)
        elif len(frames) != 1:
            raise ProtocolError(f"{len(frames)} frames instead of 1 or 2")
        elif frames[0].bytes:
            self._on_control(identity, sender, protocol.CODEC.decode(frames[0].buffer))

    def _on_control(self, identity: bytes, sender: _GroupSender | None, message: object) -> None:
        if isinstance(message, protocol.GroupRequest) and sender is None:
            self._open_group(identity, message)
        elif isinstance(message, protocol.GroupMeet) and sender is not None:
            sender.group.meet(0)  # the store is our own
        elif isinstance(message, protocol.GroupLeave):
            if sender is not None:
                self._drop(sender, "the sender closed it")
        else:
            raise ProtocolError(f"unexpected {type(message).__name__}")

    def _open_group(self, identity: bytes, request: protocol.GroupRequest) -> None:
        for sender in [s for s in self._senders.values() if s.name == request.instead_of]:
            self._drop(sender, "its sender has made another group")
        self._groups = [group for group in self._groups if not group.join(0.0)]
        message_bytes = [sender.pool.buffer_bytes for sender in self._senders.values()]
        fits = len(self._groups) < protocol.MAX_GROUPS and protocol.has_room(
            self._backend, message_bytes, request.message_bytes
        )
        if request.backend != self._backend or not fits:
            error = f"no room for a {request.backend} group here, beside {len(self._groups)} {self._backend} groups"
            self._reply(identity, protocol.GroupReply(request.name, error=error))
            return
        plan = GroupPlan(self._backend, request.name, RECEIVING, self._interface, self._interface, self._timeout_s)
        group = ProcessGroupThread(
            f"kv-group-from-{request.name[:8]}",
            plan,
            on_ready=lambda: None,
            on_end=lambda reason: self._context.post(partial(self._ended, identity, reason)),
        )
        try:
            port = group.listen()
            group.start()
        except (OSError, RuntimeError) as error:  # RuntimeError: no thread
            self._reply(identity, protocol.GroupReply(request.name, error=f"cannot open a store: {error}"))
            return
        pool = StagingPool(request.message_bytes, keep=protocol.WINDOW, make=self._make_buffer)
        self._senders[identity] = _GroupSender(identity, request.name, group, pool, self._now)
        self._groups.append(group)
        self._reply(identity, protocol.GroupReply(request.name, port))

    def _expect(self, sender: _GroupSender | None, header: bytes, size: bytes) -> None:
        """A payload will follow over the group. Raises: ProtocolError if it cannot be taken."""
        if sender is None:
            raise ProtocolError("a payload for a group that does not exist")
        size_bytes = protocol.SIZE.unpack(size)[0] if len(size) == protocol.SIZE.size else 0
        if not 0 < size_bytes <= sender.pool.buffer_bytes or sender.waiting >= protocol.WINDOW:
            self._drop(sender, "the sender exceeded its limits")
            raise ProtocolError(
                f"a payload of {size_bytes} bytes while {sender.waiting} wait; "
                f"at most {protocol.WINDOW} of {sender.pool.buffer_bytes} bytes may"
            )
        sender.waiting += 1
        buffer = sender.pool.take()
        arrival = Arrival(header, buffer[:size_bytes], _Origin(sender, buffer))
        sender.group.move(
            as_tensor(arrival.payload), partial(self._context.post, partial(self._arrived.append, arrival))
        )

    def _ended(self, identity: bytes, reason: str) -> None:
        sender = self._senders.get(identity)
        if sender is not None:
            self._drop(sender, reason)

    def _drop(self, sender: _GroupSender, reason: str) -> None:
        """Leave a group and tell its sender. No transfer fails here: another connection may resend its slices."""
        log.debug("left the group %s: %s", sender.name, reason)
        del self._senders[sender.identity]
        sender.group.stop()
        self._reply(sender.identity, protocol.GroupReply(sender.name, error=f"the receiver left the group: {reason}"))

    def _reply(self, identity: bytes, reply: protocol.GroupReply) -> None:
        self._router.send(identity, protocol.GROUP_TAG + protocol.CODEC.encode(reply))
