"""The transfer ends of a node with several ranks, as its leader sees them: one `KVSender`, one `KVReceiver`.

The leader's own rank is called directly; the others get orders over their link (`common.node.ranks.links`) and report back.
An attempt is received when every rank has all its slices, and released when every rank has released it; the first
failure of any rank fails it for all. Methods are called by the engine's thread, reports come from transfer
threads and the link's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from common.base.errors import KvRelayError, TransferError, from_code
from common.control.messages import AttemptKey, Grant
from common.engine.kv_transfer import (
    DestinationReleased,
    IncomingTransfer,
    KVReceiver,
    KVSender,
    OnReceiverEvent,
    OnSenderEvent,
    OutgoingTransfer,
    Received,
    ReceiveFailed,
    ReceiverEvent,
    SenderEvent,
    SourceReleased,
    Traffic,
)
from kvtransfer.traffic import TrafficLog


@dataclass(frozen=True)
class Opened:
    """Every rank accepts slices of this attempt: the grant may go out."""

    key: AttemptKey


# Orders of the leader to the transfer end of another rank.


@dataclass(frozen=True)
class Open:
    """`KVSender.open` or `KVReceiver.open`; one of the two is set."""

    outgoing: OutgoingTransfer | None = None
    incoming: IncomingTransfer | None = None


@dataclass(frozen=True)
class Granted:
    """`KVSender.grant`."""

    grant: Grant


@dataclass(frozen=True)
class Stop:
    """`abort`."""

    key: AttemptKey


@dataclass(frozen=True)
class Disconnect:
    """`KVSender.disconnect`."""

    incarnation: str


@dataclass(frozen=True)
class TransferReport:
    """An event of a rank's transfer end, errors as (code, message)."""

    rank: int
    kind: str
    key: AttemptKey
    size_bytes: int = 0
    code: str | None = None
    message: str = ""
    traffic: tuple[Traffic, ...] = ()


TransferOrder = Open | Granted | Stop | Disconnect
ORDER_TYPES: tuple[type, ...] = (Open, Granted, Stop, Disconnect)


def apply(end: KVSender | KVReceiver, order: TransferOrder) -> None:
    """Carry an order out on a rank."""
    match order:
        case Open(outgoing, incoming):
            transfer = outgoing if outgoing is not None else incoming
            end.open(transfer)  # type: ignore[arg-type]  # the leader sends each end its own kind
        case Granted(grant):
            end.grant(grant)  # type: ignore[union-attr]
        case Stop(key):
            end.abort(key)
        case Disconnect(incarnation):
            end.disconnect(incarnation)  # type: ignore[union-attr]


def to_report(rank: int, event: SenderEvent | ReceiverEvent | Opened) -> TransferReport:
    """What travels to the leader."""
    error = event.error if isinstance(event, SourceReleased | ReceiveFailed) else None
    size_bytes = 0
    if isinstance(event, SourceReleased):
        size_bytes = event.bytes_sent
    elif isinstance(event, Received):
        size_bytes = event.bytes_received
    code = None if error is None else (error.code if isinstance(error, KvRelayError) else TransferError.code)
    message = "" if error is None else str(error)
    traffic = event.traffic if isinstance(event, SourceReleased | Received) else ()
    return TransferReport(rank, type(event).__name__, event.key, size_bytes, code, message, traffic)


@dataclass
class _Gathered:
    """What the ranks have said of one attempt."""

    peer: tuple[str, str] = ("", "")
    """The other node and its incarnation."""
    reports: int = 0
    opened: int = 1
    received: int = 0
    size_bytes: int = 0
    error: KvRelayError | None = None
    failed: bool = False
    traffic: list[Traffic] = field(default_factory=list[Traffic])


def _check_new(key: AttemptKey, live: dict[AttemptKey, _Gathered]) -> None:
    if key in live:
        raise TransferError(f"cannot open {key}: it is open already")


class NodeSender:
    """`KVSender` over all ranks: `SourceReleased` once, when the last rank has released."""

    def __init__(
        self,
        world_size: int,
        broadcast: Callable[[TransferOrder], None],
        on_event: OnSenderEvent,
        make_local: Callable[[OnSenderEvent], KVSender],
    ) -> None:
        self._world_size = world_size
        self._broadcast = broadcast
        self._on_event = on_event
        self._lock = threading.Lock()
        self._open: dict[AttemptKey, _Gathered] = {}
        self.traffic = TrafficLog("to")
        self.local = make_local(lambda event: self.on_report(to_report(0, event)))

    def open(self, transfer: OutgoingTransfer) -> None:
        """As `KVSender.open`. Raises: TransferError if it is open already; no rank has heard of it then."""
        with self._lock:
            _check_new(transfer.key, self._open)
            self._open[transfer.key] = _Gathered()
        self._broadcast(Open(outgoing=transfer))
        self.local.open(transfer)

    def grant(self, grant: Grant) -> None:
        with self._lock:
            if gathered := self._open.get(grant.key):
                gathered.peer = (grant.dst.node_id, grant.dst.incarnation)
        self._broadcast(Granted(grant))
        self.local.grant(grant)

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        """For the leader's rank; every other rank reports its own layers."""
        self.local.blocks_final(key, layer, num_blocks)

    def abort(self, key: AttemptKey) -> None:
        self._broadcast(Stop(key))
        self.local.abort(key)

    def disconnect(self, incarnation: str) -> None:
        self._broadcast(Disconnect(incarnation))
        self.local.disconnect(incarnation)

    def close(self) -> None:
        self.local.close()

    def on_report(self, report: TransferReport) -> None:
        """Any rank's end has released its source blocks."""
        with self._lock:
            gathered = self._open[report.key]
            gathered.reports += 1
            gathered.size_bytes += report.size_bytes
            gathered.traffic += report.traffic
            first_error = gathered.error is None and report.code is not None
            if first_error and report.code is not None:
                gathered.error = from_code(report.code, f"rank {report.rank}: {report.message}")
            done = gathered.reports == self._world_size
            if done:
                del self._open[report.key]
        if done:
            self.traffic.add(*gathered.peer, gathered.traffic)
            self._on_event(SourceReleased(report.key, gathered.size_bytes, gathered.error, tuple(gathered.traffic)))
        elif first_error:
            self.abort(report.key)


class NodeReceiver:
    """`KVReceiver` over all ranks: `Received` when all have all, one `ReceiveFailed`, one `DestinationReleased`.

    A slice must not reach a rank that does not expect it yet, so `open` may be answered later, by `Opened`.
    """

    def __init__(
        self,
        world_size: int,
        broadcast: Callable[[TransferOrder], None],
        on_event: Callable[[ReceiverEvent | Opened], None],
        make_local: Callable[[OnReceiverEvent], KVReceiver],
    ) -> None:
        self._world_size = world_size
        self._broadcast = broadcast
        self._on_event = on_event
        self._lock = threading.Lock()
        self._open: dict[AttemptKey, _Gathered] = {}
        self.traffic = TrafficLog("from")
        self.local = make_local(lambda event: self.on_report(to_report(0, event)))

    def open(self, transfer: IncomingTransfer) -> bool:
        """As `KVReceiver.open`. Returns whether every rank is open already; if not, `Opened` will follow.

        Raises: TransferError if it is open already; no rank has heard of it then.
        """
        with self._lock:
            _check_new(transfer.key, self._open)
            self._open[transfer.key] = _Gathered((transfer.src.node_id, transfer.src.incarnation))
        self.local.open(transfer)
        self._broadcast(Open(incoming=transfer))
        return self._world_size == 1

    @property
    def address(self) -> str:
        """The leader's own; `Leader.data_addresses` has all ranks'."""
        return self.local.address

    def abort(self, key: AttemptKey) -> None:
        self._broadcast(Stop(key))
        self.local.abort(key)

    def close(self) -> None:
        self.local.close()

    def on_report(self, report: TransferReport) -> None:
        """Any rank's end has something to say."""
        events: list[ReceiverEvent | Opened] = []
        with self._lock:
            gathered = self._open[report.key]
            if report.kind == Opened.__name__:
                gathered.opened += 1
                if gathered.opened == self._world_size:
                    events.append(Opened(report.key))
            elif report.kind == Received.__name__:
                gathered.received += 1
                gathered.size_bytes += report.size_bytes
                gathered.traffic += report.traffic
                if gathered.received == self._world_size:
                    self.traffic.add(*gathered.peer, gathered.traffic)
                    events.append(Received(report.key, gathered.size_bytes, tuple(gathered.traffic)))
            elif report.kind == ReceiveFailed.__name__:
                if not gathered.failed:
                    gathered.failed = True
                    error = from_code(report.code or TransferError.code, f"rank {report.rank}: {report.message}")
                    events.append(ReceiveFailed(report.key, error))
            else:
                gathered.reports += 1
                if gathered.reports == self._world_size:
                    del self._open[report.key]
                    events.append(DestinationReleased(report.key))
        for event in events:
            self._on_event(event)
