"""A transport inside one process: a message is a copy that the sender's thread puts into the receiver's mailbox.

Used with the real sender and receiver, by tests of traffic reports and by the conformance suite.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from common.base.errors import PeerLost
from common.engine.kv_transfer import OnTransferEvent
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer import wire
from kvtransfer.transfer_end import TransferEnd
from kvtransfer.transports.base import Arrival, Buffer, Peer, Ready, TransportContext, fit_message
from kvtransfer.transports.choose import TransportOffer

LOOPBACK = "loopback"


class LoopbackNetwork:
    """The listeners by endpoint. All senders and receivers that reach each other share one."""

    def __init__(self) -> None:
        self.listeners: dict[str, LoopbackListener] = {}
        self._bound = 0

    def bind(self, listener: LoopbackListener) -> str:
        """A new endpoint for `listener`."""
        self._bound += 1
        endpoint = f"memory://{self._bound}"
        self.listeners[endpoint] = listener
        return endpoint


class LoopbackPeer(Peer):
    """One connection inside the process."""

    def __init__(
        self,
        endpoint: str,
        network: LoopbackNetwork,
        context: TransportContext,
        incarnation: str,
        *,
        size: int,
        now: float,
    ) -> None:
        super().__init__(LOOPBACK, incarnation, message_bytes=size, window=4, now=now)
        self._endpoint, self._network, self._context = endpoint, network, context
        self._waiting_replies: deque[bytes] = deque()

    def stage(self) -> Buffer:
        """As `Peer.stage`."""
        return np.empty(self.message_bytes, dtype=np.uint8)

    def _put(self, header: bytes, buffer: Buffer, size_bytes: int) -> None:
        listener = self._network.listeners.get(self._endpoint)
        if listener is not None:
            listener.deliver(Arrival(header, buffer[:size_bytes], self._reply))

    def _reply(self, data: bytes) -> None:
        self._context.post(partial(self._waiting_replies.append, data))

    def _replies(self, ready: Ready, now: float) -> Iterator[bytes]:
        while self._waiting_replies:
            yield self._waiting_replies.popleft()
        if self._endpoint not in self._network.listeners:
            raise PeerLost(f"nobody listens at {self._endpoint}")

    def _free(self, buffer: Buffer) -> None:
        pass

    def _close(self) -> None:
        pass


class LoopbackConnector:
    """The transport at a sender."""

    offer = TransportOffer(LOOPBACK)

    def __init__(self, network: LoopbackNetwork, message_bytes: int = 2**20) -> None:
        self._network = network
        self._message_bytes = message_bytes

    def attach(self, context: TransportContext) -> None:
        """As `Connector.attach`."""
        self._context = context
        self._message_bytes = fit_message(self._message_bytes, context.unit_bytes)

    def connect(self, offer: TransportOffer, incarnation: str, now: float) -> LoopbackPeer:
        """As `Connector.connect`."""
        return LoopbackPeer(
            offer.endpoint, self._network, self._context, incarnation, size=self._message_bytes, now=now
        )

    def close(self) -> None:
        """As `Connector.close`."""


class LoopbackListener:
    """The transport at a receiver."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self._network = network
        self._endpoint = network.bind(self)
        self._arrived: deque[Arrival] = deque()
        self.offer = TransportOffer(LOOPBACK, self._endpoint)

    def attach(self, context: TransportContext) -> None:
        """As `Listener.attach`."""
        self._context = context

    def deliver(self, arrival: Arrival) -> None:
        """Called by a sender's thread."""
        self._context.post(partial(self._arrived.append, arrival))

    def on_poll(self, ready: Ready, now: float) -> None:
        """As `Listener.on_poll`."""

    def receive(self) -> Arrival | None:
        """As `Listener.receive`."""
        return self._arrived.popleft() if self._arrived else None

    def acknowledge(self, arrival: Arrival, ack: wire.SliceAck | None) -> None:
        """As `Listener.acknowledge`."""
        if ack is not None:
            arrival.origin(wire.encode(ack))

    def close(self) -> None:
        """As `Listener.close`."""
        self._network.listeners.pop(self._endpoint, None)


def loopback_sender(
    storage: KVStorage, layout: KVLayout, rank: int, on_event: OnTransferEvent, network: LoopbackNetwork, **options: Any
) -> TransferEnd:
    given = {"incarnation": "src-1", "wanted": LOOPBACK} | options
    return TransferEnd(storage, layout, rank, on_event, [LoopbackConnector(network)], **given)


def loopback_receiver(
    storage: KVStorage, layout: KVLayout, rank: int, on_event: OnTransferEvent, network: LoopbackNetwork, **options: Any
) -> TransferEnd:
    given = {"incarnation": "dst-1"} | options
    return TransferEnd(storage, layout, rank, on_event, [], [LoopbackListener(network)], **given)
