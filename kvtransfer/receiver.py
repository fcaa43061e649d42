"""The receiver of one decode rank, over any transports. All but its public methods runs on its one I/O thread.

All transports feed the same state machines (`kvtransfer.rank_transfers`): the slices of one attempt may arrive from several
ranks over different transports.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import zmq

from common.base.clock import Clock, monotonic
from common.base.errors import CorruptSlice, KvRelayError, ProtocolError, TransferAborted, TransferError
from common.control.messages import AttemptKey
from common.engine.kv_transfer import DestinationReleased, IncomingTransfer, OnReceiverEvent, Received, ReceiverEvent
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer import wire
from kvtransfer.copy.device import CLOSING_S, DeferredCommands, RelayDevice, StreamMark
from kvtransfer.copy.host import make_copier
from kvtransfer.incoming import Claim
from kvtransfer.iothread import IOThread
from kvtransfer.rank_transfers import ReceivingTransfers
from kvtransfer.traffic import TrafficCounter
from kvtransfer.transports.base import Arrival, Listener, TransportContext, poll, poll_timeout_ms
from kvtransfer.transports.choose import format_offers

log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 8
"""Messages taken from one transport before commands are looked at again, which bounds the delay of an abort."""


class Receiver:
    """`KVReceiver` over the given transports, all of them at once.

    With `incarnation`, messages for another incarnation of this node are refused. Takes over the listeners: it closes
    them, also when it raises.
    """

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        on_event: OnReceiverEvent,
        listeners: Sequence[Listener],
        *,
        device: RelayDevice | None = None,
        clock: Clock = monotonic,
        incarnation: str | None = None,
    ) -> None:
        self._listeners = listeners
        self._device = device
        self._copying = DeferredCommands()
        """Messages that the device is copying into the destination blocks."""
        self._unanswered: dict[int, tuple[Listener, Arrival, wire.SliceHeader]] = {}
        """Messages taken and not acknowledged yet, by the identity of their arrival."""
        self._blocks_free: dict[AttemptKey, StreamMark] = {}
        """Marks after which the device no longer uses the destination blocks for earlier work."""
        self._address = format_offers(listener.offer for listener in listeners)
        self._clock = clock
        self._more = False
        """Some listener has more messages than one turn takes."""
        self._transfers = ReceivingTransfers(layout, rank, storage.num_blocks, incarnation)
        self._traffic = TrafficCounter(rank)
        self._poller = zmq.Poller()
        self._thread: IOThread[ReceiverEvent] = IOThread(
            f"kv-receiver-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        unit_bytes = layout.layer_bytes_per_block(layout.rank_shard(rank))
        try:
            self._copier = make_copier(storage, device)
            for listener in listeners:
                listener.attach(TransportContext(rank, unit_bytes, self._poller, self._thread.mailbox.put, device))
        except BaseException:
            self._thread.mailbox.close()
            for listener in listeners:
                listener.close()
            raise
        self._poller.register(self._thread.mailbox.fileno(), zmq.POLLIN)
        self._thread.start()

    @property
    def address(self) -> str:
        """As `KVReceiver.address`."""
        return self._address

    @property
    def discarded_messages(self) -> int:
        """Number of messages so far that named no live transfer or could not be read."""
        return self._transfers.discarded_messages + sum(listener.malformed_messages for listener in self._listeners)

    def open(self, transfer: IncomingTransfer) -> None:
        """As `KVReceiver.open`.

        Raises: TransferError if this key is open already or the receiver is closed.
        """
        mark = None if self._device is None else self._device.mark()
        self._thread.begin(transfer.key, partial(self._open, transfer, mark))

    def abort(self, key: AttemptKey) -> None:
        """As `KVReceiver.abort`."""
        self._thread.mailbox.put(partial(self._transfers.abort, key))

    def close(self) -> None:
        """As `KVReceiver.close`; returns when the thread has ended."""
        self._thread.stop()

    # ------------------------------------------------------------ the I/O thread

    def _turn(self) -> None:
        ready = poll(self._poller, self._poll_timeout_ms(), self._copying)
        self._thread.run_commands()
        for command in self._copying.due():
            command()
        self._more = False
        now = self._clock()
        for listener in self._listeners:
            listener.on_poll(ready, now)
            for _ in range(_MESSAGES_PER_TURN):
                arrival = listener.receive()
                if arrival is None:
                    break
                # `open` was called before the grant that led to this message, but may still be in the mailbox.
                self._thread.run_commands()
                self._on_message(listener, arrival)
            else:
                self._more = True
        self._transfers.expire(self._clock())
        self._report()

    def _open(self, transfer: IncomingTransfer, mark: StreamMark | None) -> None:
        self._transfers.open(transfer, self._clock())
        if mark is not None:
            self._blocks_free[transfer.key] = mark

    def _on_message(self, listener: Listener, arrival: Arrival) -> None:
        try:
            header = wire.decode_header(arrival.header)
        except ProtocolError as error:
            log.warning("dropped a data message: %s", error, extra={"peer": arrival.sender})
            listener.acknowledge(arrival, None)
            return
        self._unanswered[id(arrival)] = listener, arrival, header
        try:
            claim = self._transfers.accept(header, len(arrival.payload))
        except TransferError as error:
            self._refuse(arrival, error)
            return
        done = partial(self._placed, listener, arrival, header, claim)
        try:
            mark = self._write(claim, arrival)
        except CorruptSlice as error:
            self._transfers.fail(claim.key, error)
            self._transfers.placed(claim, self._clock())
            self._refuse(arrival, error)
            return
        if mark is None:
            done()
        else:
            self._copying.add(mark, done)

    def _refuse(self, arrival: Arrival, error: TransferError) -> None:
        log.info("refused a data message: %s", error, extra={"peer": arrival.sender})
        self._answer(arrival, error)

    def _answer(self, arrival: Arrival, error: KvRelayError | None = None) -> None:
        """Acknowledge a message, once; nothing may read it any more."""
        listener, _, header = self._unanswered.pop(id(arrival))
        code, message = ("", "") if error is None else (error.code, error.message[:1024])
        listener.acknowledge(arrival, wire.SliceAck(header.key, header.sequence, code, message))

    def _write(self, claim: Claim, arrival: Arrival) -> StreamMark | None:
        """Start to place a message; None if it is placed already. Raises: CorruptSlice."""
        before = self._blocks_free.get(claim.key)
        if self._device is not None and before is not None and not before.done():
            self._device.follow(before)
        return self._copier.scatter_all(claim.slices, self._transfers.state_of(claim).blocks, arrival.payload)

    def _placed(self, listener: Listener, arrival: Arrival, header: wire.SliceHeader, claim: Claim) -> None:
        if arrival.revoked():
            self._transfers.fail(claim.key, TransferAborted(f"{claim.key}: its sender took the blocks back"))
        self._transfers.placed(claim, self._clock())
        self._traffic.add(header.key, header.src_rank, listener.offer.transport, "", claim.size_bytes)
        self._answer(arrival)

    def _poll_timeout_ms(self) -> int:
        """0 while messages wait that no socket reports, else as `poll_timeout_ms`."""
        if self._more:
            return 0
        return poll_timeout_ms(self._transfers.next_deadline(), self._clock())

    def _report(self) -> None:
        self._thread.report(self._with_traffic(self._transfers.take_events()))

    def _with_traffic(self, events: list[ReceiverEvent]) -> Iterator[ReceiverEvent]:
        for event in events:
            if isinstance(event, Received):
                yield replace(event, traffic=self._traffic.take(event.key))
                continue
            if isinstance(event, DestinationReleased):
                self._traffic.take(event.key)
                self._blocks_free.pop(event.key, None)
            yield event

    def _recover(self, error: Exception) -> None:
        failure = TransferError(f"the receiver's I/O thread failed: {error}")
        self._transfers.fail_all(failure)
        self._report()
        while not self._stop_copying(CLOSING_S) and not self._thread.closing:
            pass
        self._transfers.drop_claims()
        self._report()
        if not self._copying:
            for _, arrival, _ in list(self._unanswered.values()):
                self._answer(arrival, failure)

    def _stop_copying(self, at_most_s: float) -> bool:
        """Wait for copies in progress. False if some have not ended: their memory must not be freed."""
        ended = self._copier.wait(at_most_s)
        if ended:
            self._copying.clear()
        return ended

    def _finish(self) -> None:
        self._stop_copying(CLOSING_S)
        self._transfers.drop_claims()
        self._transfers.abort_all()
        self._report()
        for listener in self._listeners:
            listener.close()
