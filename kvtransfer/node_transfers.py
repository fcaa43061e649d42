"""Transfers over all ranks of a node.

The leader uses a `NodeSender` or a `NodeReceiver`. It calls its own rank's sender or receiver directly and sends orders to
the other ranks over their links (`common.node.ranks.links`); there a `RankSender` or a `RankReceiver` applies them and
reports the events back. An attempt is received when every rank has all its slices, and released when every rank has released it; the
first failure of any rank fails it for all.

The leader's methods are called by the engine's thread; events come from transfer threads and the link's thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, TypeVar

from common.base.errors import KvRelayError, TransferError, from_code
from common.control.messages import AttemptKey, Grant
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    DisconnectOrder,
    GrantOrder,
    IncomingTransfer,
    KVReceiver,
    KVSender,
    OnBlocksFinal,
    OnReceiverEvent,
    OnSenderEvent,
    OnTransferEvent,
    OpenDestinationOrder,
    Opened,
    OpenSourceOrder,
    OutgoingTransfer,
    Received,
    ReceiveFailed,
    ReceiverEvent,
    SenderEvent,
    SourceReleased,
    Traffic,
    TransferEvent,
    TransferOrder,
)
from kvtransfer.traffic import TrafficLog

EndT = TypeVar("EndT", KVSender, KVReceiver)
EventT = TypeVar("EventT", SenderEvent, ReceiverEvent)


def name_rank(rank: int, event: TransferEvent) -> TransferEvent:
    """`event` with its error, if any, as a `KvRelayError` that names the rank."""
    if not isinstance(event, SourceReleased | ReceiveFailed) or event.error is None:
        return event
    error = event.error
    code = error.code if isinstance(error, KvRelayError) else TransferError.code
    return replace(event, error=from_code(code, f"rank {rank}: {error}"))


@dataclass
class _Gathered:
    """Sums up the reports of the ranks about one attempt."""

    peer: tuple[str, str] = ("", "")
    """The other node and its incarnation."""
    released: int = 0
    opened: int = 1
    received: int = 0
    size_bytes: int = 0
    error: Exception | None = None
    failed: bool = False
    traffic: list[Traffic] = field(default_factory=list[Traffic])
    layers: dict[int, float] = field(default_factory=dict[int, float])
    """Layer -> seconds until all ranks had it, with a timeline."""


class _AllRanks(ABC, Generic[EndT, EventT]):
    """What `NodeSender` and `NodeReceiver` share. `local` is the end of the leader's own rank."""

    _direction: ClassVar[str]

    def __init__(
        self,
        world_size: int,
        broadcast: Callable[[TransferOrder], None],
        on_event: Callable[[EventT], None],
        make_local: Callable[[Callable[[EventT], None]], EndT],
    ) -> None:
        self._world_size = world_size
        self._broadcast = broadcast
        self._on_event = on_event
        self._lock = threading.Lock()
        self._open: dict[AttemptKey, _Gathered] = {}
        self._traffic = TrafficLog(self._direction)
        self.local = make_local(lambda event: self.on_event(name_rank(0, event)))

    def _begin(self, key: AttemptKey, gathered: _Gathered) -> None:
        with self._lock:
            if key in self._open:
                raise TransferError(f"cannot open {key}: it is open already")
            self._open[key] = gathered

    def abort(self, key: AttemptKey) -> None:
        """As `KVSender.abort` and `KVReceiver.abort`."""
        self._broadcast(AbortOrder(key))
        self.local.abort(key)

    def describe(self) -> list[dict[str, Any]]:
        """The bytes moved, by pair of ranks, as plain data."""
        return self._traffic.describe()

    def close(self) -> None:
        """Close the leader's own rank."""
        self.local.close()

    @abstractmethod
    def on_event(self, event: TransferEvent) -> None:
        """Take an event of one rank; the node's own event follows when all ranks have reported."""


class NodeSender(_AllRanks[KVSender, SenderEvent]):
    """`KVSender` over all ranks: `SourceReleased` once, when the last rank has released."""

    _direction = "to"
    address = ""

    @property
    def on_blocks_final(self) -> OnBlocksFinal | None:
        """`KVSender.blocks_final` of the leader's rank."""
        return self.local.blocks_final

    def open(self, transfer: OutgoingTransfer) -> None:
        """As `KVSender.open`. Raises: TransferError if it is open already; then no rank was told."""
        self._begin(transfer.key, _Gathered())
        self._broadcast(OpenSourceOrder(transfer))
        self.local.open(transfer)

    def grant(self, grant: Grant) -> None:
        """As `KVSender.grant`."""
        with self._lock:
            if gathered := self._open.get(grant.key):
                gathered.peer = (grant.dst.node_id, grant.dst.incarnation)
        self._broadcast(GrantOrder(grant))
        self.local.grant(grant)

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        """As `KVSender.blocks_final`, for the leader's rank; every other rank reports its own layers."""
        self.local.blocks_final(key, layer, num_blocks)

    def disconnect(self, incarnation: str) -> None:
        """As `KVSender.disconnect`."""
        self._broadcast(DisconnectOrder(incarnation))
        self.local.disconnect(incarnation)

    def on_event(self, event: TransferEvent) -> None:
        """One rank has released its source blocks; the node's event follows the last rank's."""
        assert isinstance(event, SourceReleased), event
        with self._lock:
            gathered = self._open[event.key]
            gathered.released += 1
            gathered.size_bytes += event.bytes_sent
            gathered.traffic += event.traffic
            first_error = gathered.error is None and event.error is not None
            gathered.error = gathered.error or event.error
            done = gathered.released == self._world_size
            if done:
                del self._open[event.key]
        if done:
            self._traffic.add(*gathered.peer, gathered.traffic)
            self._on_event(SourceReleased(event.key, gathered.size_bytes, gathered.error, tuple(gathered.traffic)))
        elif first_error:
            self.abort(event.key)


class NodeReceiver(_AllRanks[KVReceiver, ReceiverEvent]):
    """`KVReceiver` over all ranks: `Received` when every rank has all its slices; one `ReceiveFailed`, one
    `DestinationReleased`.

    A slice must not reach a rank that does not expect it yet, so `open` may be answered later, by `Opened`.
    """

    _direction = "from"
    on_blocks_final: OnBlocksFinal | None = None

    def open(self, transfer: IncomingTransfer) -> bool:
        """As `KVReceiver.open`, and returns whether every rank is open already; if not, `Opened` will follow.

        Raises: TransferError if it is open already; then no rank was told.
        """
        self._begin(transfer.key, _Gathered((transfer.src.node_id, transfer.src.incarnation)))
        self.local.open(transfer)
        self._broadcast(OpenDestinationOrder(transfer))
        return self._world_size == 1

    @property
    def address(self) -> str:
        """Where senders reach the leader's own rank."""
        return self.local.address

    def on_event(self, event: TransferEvent) -> None:
        """As `_AllRanks.on_event`."""
        with self._lock:
            of_node = self._gather(event)
        if of_node is not None:
            self._on_event(of_node)

    def _gather(self, event: TransferEvent) -> ReceiverEvent | None:
        gathered = self._open[event.key]
        match event:
            case Opened(key):
                gathered.opened += 1
                return event if gathered.opened == self._world_size else None
            case Received(key, bytes_received, traffic, layers):
                gathered.received += 1
                gathered.size_bytes += bytes_received
                gathered.traffic += traffic
                for layer, after_s in layers:
                    gathered.layers[layer] = max(after_s, gathered.layers.get(layer, 0.0))
                if gathered.received < self._world_size:
                    return None
                self._traffic.add(*gathered.peer, gathered.traffic)
                return Received(key, gathered.size_bytes, tuple(gathered.traffic), tuple(gathered.layers.items()))
            case ReceiveFailed():
                first, gathered.failed = not gathered.failed, True
                return event if first else None
            case DestinationReleased(key):
                gathered.released += 1
                if gathered.released < self._world_size:
                    return None
                del self._open[key]
                return event
            case SourceReleased():
                raise AssertionError("a receiver reports no source")


class RankSender:
    """`KVSender` of a rank other than the leader's: applies the leader's orders, reports events with `report`."""

    data_address = ""

    def __init__(self, rank: int, report: OnTransferEvent, make_local: Callable[[OnSenderEvent], KVSender]) -> None:
        self._sender = make_local(lambda event: report(name_rank(rank, event)))
        self.on_blocks_final: OnBlocksFinal | None = self._sender.blocks_final

    def apply(self, order: TransferOrder) -> None:
        """Carry out one order."""
        match order:
            case OpenSourceOrder(transfer):
                self._sender.open(transfer)
            case GrantOrder(grant):
                self._sender.grant(grant)
            case AbortOrder(key):
                self._sender.abort(key)
            case DisconnectOrder(incarnation):
                self._sender.disconnect(incarnation)
            case OpenDestinationOrder():
                raise AssertionError("a sender opens no destination")

    def close(self) -> None:
        """Close this rank's sender."""
        self._sender.close()


class RankReceiver:
    """`KVReceiver` of a rank other than the leader's: applies the leader's orders, reports events with `report`."""

    on_blocks_final: OnBlocksFinal | None = None

    def __init__(self, rank: int, report: OnTransferEvent, make_local: Callable[[OnReceiverEvent], KVReceiver]) -> None:
        self._rank = rank
        self._report = report
        self._lock = threading.Lock()
        self._receiver = make_local(self._on_event)

    @property
    def data_address(self) -> str:
        """Where senders reach this rank."""
        return self._receiver.address

    def apply(self, order: TransferOrder) -> None:
        """Carry out one order."""
        match order:
            case OpenDestinationOrder(transfer):
                with self._lock:  # events of this transfer are reported after `Opened`
                    self._receiver.open(transfer)
                    self._report(Opened(transfer.key))
            case AbortOrder(key):
                self._receiver.abort(key)
            case OpenSourceOrder() | GrantOrder() | DisconnectOrder():
                raise AssertionError("a receiver has no source")

    def _on_event(self, event: ReceiverEvent) -> None:
        with self._lock:
            self._report(name_rank(self._rank, event))

    def close(self) -> None:
        """Close this rank's receiver."""
        self._receiver.close()
