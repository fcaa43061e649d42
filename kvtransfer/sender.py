"""The sender of one prefill rank, over any transports. All but its public methods runs on its one I/O thread.

It turns commands and acks into calls of the state machines (`kvtransfer.rank_transfers`), gathers the batches they return
into buffers of a peer, and sends them. Peers are connected at the grant (`kvtransfer.peer_table`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import zmq

from common.base.clock import Clock, monotonic
from common.base.errors import PeerLost, TransferAborted, TransferError, from_code
from common.control.messages import AttemptKey, Grant
from common.engine.kv_transfer import OnSenderEvent, OutgoingTransfer, SenderEvent
from common.kv.rank_layout import KVLayout
from common.kv.storage import KVStorage
from common.security.sealed_endpoints import without_keys
from kvtransfer.copy.device import CLOSING_S, DeferredCommands, RelayDevice, StreamMark
from kvtransfer.copy.host import make_copier
from kvtransfer.iothread import IOThread
from kvtransfer.outgoing import Batch
from kvtransfer.peer_table import PeerTable, RankPair
from kvtransfer.rank_transfers import SendingTransfers
from kvtransfer.traffic import TrafficCounter
from kvtransfer.transports.base import Buffer, Connector, Peer, Ready, TransportContext, poll, poll_timeout_ms
from kvtransfer.wire import SliceHeader

log = logging.getLogger(__name__)


class Sender:
    """`KVSender` over the given transports; each pair of ranks uses one of them.

    `device` holds the KV, if it is not in CPU memory; `open` and `blocks_final` then refer to the work that the calling
    thread has started there. `wanted` restricts the choice, as in `kvtransfer.transports.choose`. A message below
    `min_message_bytes`, or below its peer's, is sent only if no more will follow or it has waited long; a connection without
    an ack for `idle_s` is given up.

    Takes over the connectors: it closes them, also when it raises.
    Raises: ConfigError if a transport's messages have no room for one block of one layer.
    """

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        on_event: OnSenderEvent,
        connectors: Sequence[Connector],
        *,
        device: RelayDevice | None = None,
        wanted: str = "auto",
        clock: Clock = monotonic,
        min_message_bytes: int = 256 * 2**10,
        idle_s: float = 30.0,
    ) -> None:
        self._device = device
        self._final = DeferredCommands()
        """Reports of final blocks that the device has not computed yet."""
        self._copying = DeferredCommands()
        """Messages whose buffers the device has not filled yet."""
        self._transfers = SendingTransfers(layout, rank, storage.num_blocks)
        self._clock = clock
        self._min_message_bytes = min_message_bytes
        self._connectors = {connector.offer.transport: connector for connector in connectors}
        self._table = PeerTable(rank, self._connectors, self._transfers, wanted=wanted, idle_s=idle_s, clock=clock)
        self._peers = self._table.peers
        self._traffic = TrafficCounter(rank)
        self._poller = zmq.Poller()
        self._thread: IOThread[SenderEvent] = IOThread(
            f"kv-sender-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        shard = layout.rank_shard(rank)
        unit_bytes = layout.layer_bytes_per_block(shard)
        self._num_layers = shard.num_layers
        context = TransportContext(rank, unit_bytes, self._poller, self._thread.mailbox.put, device)
        try:
            self._copier = make_copier(storage, device)
            for connector in connectors:
                connector.attach(context)
        except BaseException:
            self._thread.mailbox.close()
            for connector in connectors:
                connector.close()
            raise
        self._poller.register(self._thread.mailbox.fileno(), zmq.POLLIN)
        self._thread.start()

    @property
    def pairs(self) -> Sequence[RankPair]:
        """The transport chosen for each destination rank so far, the latest last. For any thread."""
        return self._table.pairs

    def open(self, transfer: OutgoingTransfer) -> None:
        """As `KVSender.open`.

        Raises: TransferError if this key is open already or the sender is closed.
        """
        if self._device is None:
            self._thread.begin(transfer.key, partial(self._transfers.open, transfer))
            return
        # An earlier step may still be computing the cached blocks.
        mark, waiting = self._device.mark(), replace(transfer, final_blocks=0)
        self._thread.begin(transfer.key, partial(self._open_after, mark, waiting, transfer.final_blocks))

    def grant(self, grant: Grant) -> None:
        """As `KVSender.grant`."""
        self._thread.mailbox.put(partial(self._on_grant, grant))

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        """As `KVSender.blocks_final`."""
        command = partial(self._on_blocks_final, key, layer, num_blocks)
        if self._device is not None:
            command = partial(self._final.add, self._device.mark(), command)
        self._thread.mailbox.put(command)

    def abort(self, key: AttemptKey) -> None:
        """As `KVSender.abort`."""
        self._thread.mailbox.put(
            partial(self._transfers.fail, key, TransferAborted(f"{key} was aborted by its sender"))
        )

    def disconnect(self, incarnation: str) -> None:
        """As `KVSender.disconnect`."""
        self._thread.mailbox.put(partial(self._table.disconnect, incarnation))

    def close(self) -> None:
        """As `KVSender.close`; returns when the thread has ended."""
        self._thread.stop()

    # ------------------------------------------------------------ the I/O thread

    def _turn(self) -> None:
        ready = poll(self._poller, self._poll_timeout_ms(), self._final or self._copying)
        self._thread.run_commands()
        for pending in (self._final, self._copying):
            for command in pending.due():
                command()
        now = self._clock()
        for address, peer in list(self._peers.items()):
            self._take_acks(address, peer, ready, now)
        self._transfers.expire(now)
        self._table.drop_idle(now)
        self._revoke_loans()
        self._report()
        for key in self._transfers.overdue(now):
            self._wake(key)
        # One message per peer and turn, so that commands and acks are handled between messages.
        for peer in self._peers.values():
            if peer.has_room:
                self._send_next(peer)
        self._report()

    def _open_after(self, mark: StreamMark, transfer: OutgoingTransfer, final_blocks: int) -> None:
        self._transfers.open(transfer)
        if final_blocks:
            for layer in range(self._num_layers):
                self._final.add(mark, partial(self._on_blocks_final, transfer.key, layer, final_blocks))

    def _on_grant(self, grant: Grant) -> None:
        for dst_rank in self._transfers.grant(grant, self._clock()):
            try:
                peer = self._table.get_or_connect(grant, dst_rank)
            except TransferError as error:
                self._transfers.fail(grant.key, error)
                return
            peer.transfers[grant.key] = dst_rank
            peer.waiting[grant.key] = None

    def _on_blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        if self._transfers.blocks_final(key, layer, num_blocks, self._clock()):
            self._wake(key)

    def _wake(self, key: AttemptKey) -> None:
        """Transfer `key` may have something to send."""
        for peer in self._peers.values():
            if key in peer.transfers:
                peer.waiting[key] = None

    def _take_acks(self, address: str, peer: Peer, ready: Ready, now: float) -> None:
        latest = -1
        try:
            for ack, batch in peer.acks(ready, now):
                latest = ack.sequence
                if ack.code:
                    error = from_code(ack.code, ack.message)
                    log.info("%s refused a message of %s: %s", without_keys(address), batch.key, error)
                    self._transfers.refused(batch, error)
                if peer.returned(ack.sequence) is not None:
                    self._count(peer, batch)
                    self._transfers.sent(batch, now)
                if not ack.code:
                    self._transfers.acknowledged(batch, now)
        except PeerLost as error:
            self._table.fail(address, peer, error.message)
        if latest >= 0:
            for key in peer.behind(latest):
                self._transfers.progressed(key, now)

    def _send_next(self, peer: Peer) -> None:
        """Send one message of the first transfer that has a batch ready."""
        for key in list(peer.waiting):
            batch = self._transfers.take(
                key,
                peer.transfers.get(key, -1),
                max_bytes=peer.message_bytes,
                min_bytes=min(max(self._min_message_bytes, peer.min_message_bytes), peer.message_bytes),
                now=self._clock(),
            )
            if batch is not None:
                self._send(peer, batch)
                return
            del peer.waiting[key]

    def _send(self, peer: Peer, batch: Batch) -> None:
        state = self._transfers.state_of(batch)
        buffer = peer.stage()
        header = state.header(batch, peer.incarnation, peer.next_sequence())
        if peer.lend(buffer, header, batch, state.blocks):
            peer.send(header, buffer, batch, self._clock())  # counted when its ack arrives: nothing has moved yet
            return
        mark = self._copier.gather_all(batch.slices, state.blocks, buffer)
        if mark is None:
            self._put(peer, batch, header, buffer)
            self._transfers.sent(batch, self._clock())
        else:
            peer.reserved += 1
            self._copying.add(mark, partial(self._gathered, peer, batch, header, buffer))

    def _gathered(self, peer: Peer, batch: Batch, header: SliceHeader, buffer: Buffer) -> None:
        peer.reserved -= 1
        if peer.closed:
            self._transfers.dropped(batch)
        else:
            self._put(peer, batch, header, buffer)
            self._transfers.sent(batch, self._clock())

    def _put(self, peer: Peer, batch: Batch, header: SliceHeader, buffer: Buffer) -> None:
        peer.send(header, buffer, batch, self._clock())
        self._count(peer, batch)

    def _count(self, peer: Peer, batch: Batch) -> None:
        self._traffic.add(batch.key, batch.dst_rank, peer.transport, peer.why, batch.size_bytes)

    def _revoke_loans(self) -> None:
        """End the loans of attempts that have failed: their blocks must be free again, whatever the receivers do."""
        for key in self._transfers.ending:
            for peer in self._peers.values():
                for sequence, batch in list(peer.lent.items()):
                    if batch.key == key:
                        self._transfers.dropped(peer.revoke(sequence))

    def _poll_timeout_ms(self) -> int:
        """0 while something can be sent, else as `poll_timeout_ms`."""
        if any(peer.waiting and peer.has_room for peer in self._peers.values()):
            return 0
        now = self._clock()
        return poll_timeout_ms(self._transfers.next_deadline(now), now)

    def _report(self) -> None:
        events = [replace(event, traffic=self._traffic.take(event.key)) for event in self._transfers.take_events()]
        for event in events:
            for peer in self._peers.values():
                peer.transfers.pop(event.key, None)
                peer.waiting.pop(event.key, None)
        self._thread.report(events)

    def _recover(self, error: Exception) -> None:
        self._transfers.fail_all(TransferError(f"the sender's I/O thread failed: {error}"))
        self._table.lose_all("the I/O thread failed")
        self._report()
        while not self._stop_copying(CLOSING_S) and not self._thread.closing:
            pass
        self._transfers.drop_batches()
        self._report()

    def _stop_copying(self, at_most_s: float) -> bool:
        """Wait for copies in progress. False if some have not ended: their memory must not be freed."""
        self._final.clear()
        ended = self._copier.wait(at_most_s)
        if ended:
            self._copying.clear()
        return ended

    def _finish(self) -> None:
        self._transfers.fail_all(TransferAborted("the sender was closed"))
        self._table.lose_all("the sender was closed")
        self._stop_copying(CLOSING_S)
        self._transfers.drop_batches()
        self._report()
        for connector in self._connectors.values():
            connector.close()
