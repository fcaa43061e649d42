"""The end of all transfers of one rank: sends its KV to other nodes and receives theirs, over any transports.

All but the public methods runs on the end's one I/O thread. It turns orders into calls of the two tables
(`kvtransfer.tables`) and lets its two halves (`kvtransfer.send_half`, `kvtransfer.receive_half`) do their I/O in turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import zmq

from common.base.clock import Clock, monotonic
from common.base.errors import KvRelayError, TransferAborted, TransferError, from_code
from common.control.messages import AttemptKey
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    DisconnectOrder,
    GrantOrder,
    OnTransferEvent,
    OpenDestinationOrder,
    OpenSourceOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferEvent,
    TransferOrder,
)
from common.kernels.native.find import find_native
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import CudaDevice
from kvtransfer.copy.device import CLOSING_S, DeferredCommands, StreamMark
from kvtransfer.copy.device_copy import DeviceCopier
from kvtransfer.copy.host import SliceCopier
from kvtransfer.end_parts import EndParts, TrafficCounter
from kvtransfer.iothread import IOThread
from kvtransfer.peer_table import PeerTable
from kvtransfer.receive_half import ReceiveHalf
from kvtransfer.send_half import SendHalf
from kvtransfer.tables import ReceiveTable, SendTable
from kvtransfer.transports.base import Connector, Listener, TransportContext, poll, poll_timeout_ms

_MESSAGES_PER_TURN = 8
"""Messages taken from one transport before commands are looked at again, which bounds the delay of an abort. While
there is something to send, it is one, so that both directions get their share of the thread."""


class TransferEnd:
    """One rank's end of its transfers (`common.engine.kv_transfer.TransferEnd`): one object, one I/O thread, both directions.

    It sends over `connectors` (each pair of ranks uses one) and receives over all `listeners` at once. Without
    listeners it opens no socket that others could connect to.
    """

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        on_event: OnTransferEvent,
        connectors: Sequence[Connector],
        listeners: Sequence[Listener] = (),
        *,
        incarnation: str,
        device: CudaDevice | None = None,
        wanted: str = "auto",
        clock: Clock = monotonic,
        min_message_bytes: int = 256 * 2**10,
        idle_s: float = 30.0,
    ) -> None:
        """incarnation: of this node. device: holds the KV, if it is not in CPU memory; orders and `blocks_final` then refer
        to the work that the calling thread has started there. wanted: restricts the transports to send over, see
        `kvtransfer.transports.choose`. min_message_bytes: see `SendHalf`. idle_s: a connection without an ack for this
        time is given up.

        Takes over the connectors and listeners: it closes them, also when it raises.
        Raises: ConfigError if a transport's messages have no room for one block of one layer.
        """
        self._rank = rank
        self._device = device
        self._clock = clock
        self._transports = [*connectors, *listeners]
        self._final = DeferredCommands()
        """Reports of final blocks that the device has not computed yet."""
        self._poller = zmq.Poller()
        self._thread = IOThread(
            f"kv-transfers-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        shard = layout.rank_shard(rank)
        self._num_layers = shard.num_layers
        unit_bytes = layout.layer_bytes_per_block(shard)
        try:
            self._copier = SliceCopier(storage, find_native()) if device is None else DeviceCopier(device, storage)
            context = TransportContext(rank, unit_bytes, self._poller, self._thread.mailbox.put, device)
            for transport in self._transports:
                transport.attach(context)
        except BaseException:
            self._thread.mailbox.close()
            for transport in self._transports:
                transport.close()
            raise
        self._copying, self._traffic = DeferredCommands(), TrafficCounter(rank)
        parts = EndParts(incarnation, self._copier, self._copying, device, self._traffic, clock)
        sends = SendTable(layout, rank, storage.num_blocks)
        peers = PeerTable(rank, connectors, sends, wanted=wanted, idle_s=idle_s, clock=clock)
        self._send = SendHalf(sends, peers, parts, min_message_bytes)
        receives = ReceiveTable(layout, rank, storage.num_blocks, incarnation)
        self._receive = ReceiveHalf(receives, listeners, parts, self._run_commands)
        self.address = " ".join(str(listener.offer) for listener in listeners)
        """The offers of the listeners, see `kvtransfer.transports.choose`; empty if there are none."""
        self._poller.register(self._thread.mailbox.fileno(), zmq.POLLIN)
        self._thread.start()

    def apply(self, order: TransferOrder) -> None:
        put = self._thread.mailbox.put
        match order:
            case OpenSourceOrder(plan):
                self._thread.begin(plan.key, partial(self._open_source, order, self._mark()))
            case OpenDestinationOrder(plan):
                self._thread.begin(plan.key, partial(self._receive.open, order, self._mark()))
            case GrantOrder(grant):
                put(partial(self._send.grant, grant))
            case AbortOrder(key):
                put(partial(self._abort, key))
            case DisconnectOrder(incarnation):
                put(partial(self._send.connections.lose_all, "its node could not be reached", incarnation))

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        command = partial(self._send.blocks_final, key, layer, num_blocks)
        if self._device is not None:
            command = partial(self._final.add, self._device.mark(), command)
        self._thread.mailbox.put(command)

    def close(self) -> None:
        self._thread.stop()

    def _mark(self) -> StreamMark | None:
        return None if self._device is None else self._device.mark()

    # ------------------------------------------------------------ the I/O thread

    def _turn(self) -> None:
        ready = poll(self._poller, self._poll_timeout_ms(), self._final or self._copying)
        self._run_commands()
        for pending in (self._final, self._copying):
            for command in pending.due():
                command()
        now = self._clock()
        self._receive.take_messages(ready, now, at_most=1 if self._send.has_work else _MESSAGES_PER_TURN)
        self._send.take_acks(ready, now)
        self._report()
        self._send.send(now)
        self._report()

    def _run_commands(self) -> None:
        """Run what waits in the mailbox and report at once: a node's grant waits for `Opened` of all its ranks."""
        self._thread.run_commands()
        self._report()

    def _poll_timeout_ms(self) -> int:
        """0 while there is something to send or to receive that no socket reports, else the time to the next deadline."""
        if self._receive.has_more or self._send.has_work:
            return 0
        now = self._clock()
        deadlines = self._send.table.next_deadline(now), self._receive.table.next_deadline()
        return poll_timeout_ms(min((each for each in deadlines if each is not None), default=None), now)

    def _open_source(self, order: OpenSourceOrder, mark: StreamMark | None) -> None:
        if mark is None or not order.final_blocks:
            self._send.table.open(order)
            return
        # An earlier step may still be computing the cached blocks.
        self._send.table.open(replace(order, final_blocks=0))
        for layer in range(self._num_layers):
            self._final.add(mark, partial(self._send.blocks_final, order.plan.key, layer, order.final_blocks))

    def _abort(self, key: AttemptKey) -> None:
        self._send.table.fail(key, TransferAborted(f"{key} was aborted by its sender"))
        self._receive.table.abort(key)

    def _report(self) -> None:
        self._thread.report(self._ended(self._send.table.take_events()))
        self._thread.report(self._ended(self._receive.table.take_events()))

    def _ended(self, events: list[TransferEvent]) -> Iterator[TransferEvent]:
        """The events with their traffic, and with errors that name this rank."""
        for event in events:
            match event:
                case SourceReleased(key, error=error):
                    self._send.forget(key)
                    yield replace(event, error=self._named(error), traffic=self._traffic.take(key))
                case Received(key):
                    yield replace(event, traffic=self._traffic.take(key))
                case ReceiveFailed(error=error):
                    yield replace(event, error=self._named(error))
                case DestinationReleased(key):
                    self._traffic.take(key)
                    self._receive.forget(key)
                    yield event
                case _:
                    yield event

    def _named(self, error: Exception | None) -> KvRelayError | None:
        if error is None:
            return None
        code = error.code if isinstance(error, KvRelayError) else TransferError.code
        return from_code(code, f"rank {self._rank}: {error}")

    def _recover(self, error: Exception) -> None:
        failure = TransferError(f"its transfer end's I/O thread failed: {error}")
        self._send.table.fail_all(failure)
        self._send.connections.lose_all("the I/O thread failed")
        self._receive.table.fail_all(failure)
        self._report()
        while not self._stop_copying(CLOSING_S) and not self._thread.closing:
            pass
        self._send.table.drop_batches()
        self._receive.table.drop_claims()
        self._report()
        if not self._copying:
            self._receive.answer_all(failure)

    def _stop_copying(self, at_most_s: float) -> bool:
        """Wait for copies in progress. False if some have not ended: their memory must not be freed."""
        self._final.clear()
        ended = self._copier.wait(at_most_s)
        if ended:
            self._copying.clear()
        return ended

    def _finish(self) -> None:
        self._send.table.fail_all(TransferAborted("the sending node was closed"))
        self._send.connections.lose_all("this node was closed")
        self._stop_copying(CLOSING_S)
        self._send.table.drop_batches()
        self._receive.table.drop_claims()
        self._receive.table.abort_all()
        self._report()
        for transport in self._transports:
            transport.close()
