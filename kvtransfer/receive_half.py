"""The receiving half of a transfer end: messages in, KV written, acks out. Runs on the end's I/O thread.

All transports feed one receive table: the slices of an attempt may arrive from several ranks over different transports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from common.base.errors import CorruptSlice, KvRelayError, ProtocolError, TransferAborted, TransferError
from common.control.messages import AttemptKey
from common.engine.kv_transfer import OpenDestinationOrder
from kvtransfer import wire
from kvtransfer.copy.device import StreamMark
from kvtransfer.end_parts import EndParts
from kvtransfer.receive_state import Claim
from kvtransfer.tables import ReceiveTable
from kvtransfer.transports.base import Arrival, Listener, Ready

log = logging.getLogger(__name__)


class ReceiveHalf:
    """Places the messages of all listeners into the blocks of the attempts in `table`."""

    def __init__(
        self, table: ReceiveTable, listeners: Sequence[Listener], parts: EndParts, run_commands: Callable[[], None]
    ) -> None:
        """run_commands: runs what waits in the thread's mailbox."""
        self.table = table
        self._listeners = listeners
        self._parts = parts
        self._clock = parts.clock
        self._run_commands = run_commands
        self._unanswered: dict[int, tuple[Listener, Arrival, wire.SliceHeader]] = {}
        """Messages taken and not acknowledged yet, by the identity of their arrival."""
        self._blocks_free: dict[AttemptKey, StreamMark] = {}
        """Marks after which the device no longer uses the destination blocks for earlier work."""
        self.has_more = False
        """Some listener has more messages than the last call of `take_messages` took; no socket reports them."""

    def open(self, order: OpenDestinationOrder, mark: StreamMark | None) -> None:
        """Expect a transfer, whose blocks the device may use for earlier work until `mark`."""
        self.table.open(order, self._clock())
        if mark is not None:
            self._blocks_free[order.plan.key] = mark

    def forget(self, key: AttemptKey) -> None:
        """Attempt `key` has ended."""
        self._blocks_free.pop(key, None)

    def take_messages(self, ready: Ready, now: float, at_most: int) -> None:
        """Handle at most that many messages of each transport, then give up what has waited too long."""
        self.has_more = False
        for listener in self._listeners:
            listener.on_poll(ready, now)
            for _ in range(at_most):
                arrival = listener.receive()
                if arrival is None:
                    break
                # The order to open came before the grant that led to this message, but may still be in the mailbox.
                self._run_commands()
                self._on_message(listener, arrival)
            else:
                self.has_more = True
        self.table.expire(self._clock())

    def answer_all(self, error: KvRelayError) -> None:
        """Refuse all messages that were taken; nothing may read them any more."""
        for _, arrival, _ in list(self._unanswered.values()):
            self._answer(arrival, error)

    def _on_message(self, listener: Listener, arrival: Arrival) -> None:
        try:
            header = wire.decode_header(arrival.header)
        except ProtocolError as error:
            log.warning("dropped a data message: %s", error, extra={"peer": arrival.sender})
            listener.acknowledge(arrival, None)
            return
        self._unanswered[id(arrival)] = listener, arrival, header
        try:
            claim = self.table.accept(header, len(arrival.payload))
        except TransferError as error:
            self._refuse(arrival, error)
            return
        done = partial(self._placed, listener, arrival, header, claim)
        try:
            mark = self._write(claim, arrival)
        except CorruptSlice as error:
            self.table.fail(claim.key, error)
            self.table.placed(claim, self._clock())
            self._refuse(arrival, error)
            return
        if mark is None:
            done()
        else:
            self._parts.copying.add(mark, done)

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
        device = self._parts.device
        if device is not None and before is not None and not before.done():
            device.follow(before)
        return self._parts.copier.scatter_all(claim.slices, claim.blocks, arrival.payload)

    def _placed(self, listener: Listener, arrival: Arrival, header: wire.SliceHeader, claim: Claim) -> None:
        if arrival.revoked():
            self.table.fail(claim.key, TransferAborted(f"{claim.key}: its sender took the blocks back"))
        self.table.placed(claim, self._clock())
        self._parts.traffic.add(header.key, header.src_rank, listener.offer.transport, "", claim.size_bytes)
        self._answer(arrival)
