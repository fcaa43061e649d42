"""The sending end of the ZMQ transport: one I/O thread per prefill rank owns all that is here but the public calls."""

from __future__ import annotations

import logging
from functools import partial
from math import ceil

import zmq

from common.clock import Clock, monotonic
from common.errors import (
    ConfigError,
    PeerLost,
    TransferAborted,
    TransferError,
    from_code,
)
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from common.protocol import AttemptKey, Grant
from kvtransfer import wire
from kvtransfer.base import (
    OnSenderEvent,
    OutgoingTransfer,
    SenderEvent,
)
from kvtransfer.copying import SliceCopier
from kvtransfer.ends import SendingEnd
from kvtransfer.iothread import IOThread
from kvtransfer.state import Batch
from kvtransfer.zmq_peer import Peer, StagingPool

log = logging.getLogger(__name__)


class ZmqSender:
    """`KVSender` over ZMQ.

    `staging_bytes` is the most one message carries (raised to the size of one block of one layer where that is
    more), `window` how many messages a peer may have unacknowledged, `min_message_bytes` what is worth a message
    of its own while more will follow, `idle_s` after how long without an ack a connection is given up.
    """

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        on_event: OnSenderEvent,
        *,
        clock: Clock = monotonic,
        staging_bytes: int = 2 * 2**20,
        window: int = 8,
        min_message_bytes: int = 512 * 2**10,
        idle_s: float = 30.0,
    ) -> None:
        shard = layout.shards()[rank]
        unit_bytes = layout.slice_bytes_per_block * (shard.head_hi - shard.head_lo)
        self._staging_bytes = min(max(staging_bytes, unit_bytes), wire.MAX_PAYLOAD_BYTES)
        if unit_bytes > self._staging_bytes:
            raise ConfigError(
                f"one block of one layer has {unit_bytes} bytes; at most {self._staging_bytes} can be sent"
            )
        self._copier = SliceCopier(storage)
        self._end = SendingEnd(layout, rank, storage.num_blocks)
        self._rank = rank
        self._clock = clock
        self._window = window
        self._min_message_bytes = min_message_bytes
        self._idle_s = idle_s
        self._pool = StagingPool(self._staging_bytes, keep=2 * window)
        self._peers: dict[str, Peer] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._thread: IOThread[SenderEvent] = IOThread(
            f"kv-sender-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        self._poller.register(self._thread.mailbox.fileno(), zmq.POLLIN)
        self._thread.start()

    def open(self, transfer: OutgoingTransfer) -> None:
        """As `KVSender.open`.

        Raises: TransferError if this key is open already or the sender is closed.
        """
        self._thread.begin(transfer.key, lambda: self._end.open(transfer, self._clock()))

    def grant(self, grant: Grant) -> None:
        """As `KVSender.grant`."""
        self._thread.mailbox.put(partial(self._on_grant, grant))

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        """As `KVSender.blocks_final`."""
        self._thread.mailbox.put(partial(self._on_blocks_final, key, layer, num_blocks))

    def abort(self, key: AttemptKey) -> None:
        """As `KVSender.abort`."""
        self._thread.mailbox.put(partial(self._end.fail, key, TransferAborted(f"{key} was aborted by its sender")))

    def close(self) -> None:
        """As `KVSender.close`; returns when the thread has ended."""
        self._thread.stop()

    # ------------------------------------------------------------ the I/O thread

    def _turn(self) -> None:
        ready = {socket for socket, _ in self._poller.poll(self._poll_timeout_ms())}
        self._thread.run_commands()
        for peer in list(self._peers.values()):
            if peer.readable(ready):
                self._on_acks(peer)
            if peer.broken(ready):
                self._lose(peer, "the connection broke")
        now = self._clock()
        self._end.expire(now)
        self._drop_idle(now)
        self._report()
        # One message per peer and turn: commands and acks get their turn between any two.
        for peer in self._peers.values():
            if peer.has_room:
                self._send_next(peer)
        self._report()

    def _on_grant(self, grant: Grant) -> None:
        for dst_rank in self._end.grant(grant):
            try:
                peer = self._peer(grant.dst.data_addresses[dst_rank], grant.dst.incarnation)
            except zmq.ZMQError as error:
                address = grant.dst.data_addresses[dst_rank]
                self._end.fail(grant.key, PeerLost(f"{grant.key}: cannot connect to {address!r}: {error}"))
                return
            peer.transfers[grant.key] = dst_rank
            peer.waiting[grant.key] = None

    def _on_blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        if self._end.blocks_final(key, layer, num_blocks):
            for peer in self._peers.values():
                if key in peer.transfers:
                    peer.waiting[key] = None

    def _on_acks(self, peer: Peer) -> None:
        for ack in peer.acks(self._clock()):
            if ack.code:
                error = from_code(ack.code, ack.message)
                log.info("%s refused a message of %s: %s", peer.address, ack.key, error)
                self._end.fail(ack.key, error)

    def _peer(self, address: str, incarnation: str) -> Peer:
        """The connection to `incarnation` at `address`, made if there is none."""
        peer = self._peers.get(address)
        if peer is not None and peer.incarnation != incarnation:
            self._lose(peer, f"incarnation {incarnation} has taken its address")
            peer = None
        if peer is None:
            now = self._clock()
            peer = Peer(self._context, self._poller, self._pool, address, incarnation, window=self._window, now=now)
            self._peers[address] = peer
        return peer

    def _send_next(self, peer: Peer) -> None:
        """Send one message of the first transfer that has one ready."""
        for key in list(peer.waiting):
            batch = self._end.take(
                key, peer.transfers.get(key, -1), max_bytes=self._staging_bytes, min_bytes=self._min_message_bytes
            )
            if batch is not None:
                self._send(peer, batch)
                return
            del peer.waiting[key]

    def _send(self, peer: Peer, batch: Batch) -> None:
        state = self._end.state_of(batch)
        buffer = peer.stage()
        self._copier.gather_all(batch.slices, state.blocks, buffer)
        header = state.header(batch, peer.incarnation, peer.next_sequence())
        peer.send(header, buffer, batch.size_bytes, self._clock())
        self._end.handed(batch)

    def _lose(self, peer: Peer, reason: str) -> None:
        """Close a connection; its transfers fail."""
        del self._peers[peer.address]
        peer.close()
        for key in peer.transfers:
            self._end.fail(key, PeerLost(f"{key}: lost {peer.address} ({peer.incarnation}): {reason}"))

    def _drop_idle(self, now: float) -> None:
        for peer in list(self._peers.values()):
            if now - peer.last_progress < self._idle_s:
                continue
            if peer.in_flight:
                self._lose(peer, f"no ack for {self._idle_s} s")
            elif not peer.transfers:
                self._lose(peer, "idle")

    def _poll_timeout_ms(self) -> int:
        """0 while something can be sent, else until the next deadline, at most a second."""
        if any(peer.waiting and peer.has_room for peer in self._peers.values()):
            return 0
        deadline = self._end.next_deadline()
        return 1000 if deadline is None else ceil(1000 * min(max(deadline - self._clock(), 0.0), 1.0))

    def _report(self) -> None:
        events = self._end.take_events()
        for event in events:
            for peer in self._peers.values():
                peer.transfers.pop(event.key, None)
                peer.waiting.pop(event.key, None)
        self._thread.report(events)

    def _recover(self, error: Exception) -> None:
        self._end.give_up_batches()
        self._end.fail_all(TransferError(f"the sender's I/O thread failed: {error}"))
        for peer in list(self._peers.values()):
            self._lose(peer, "the I/O thread failed")
        self._report()

    def _finish(self) -> None:
        self._end.fail_all(TransferAborted("the sender was closed"))
        self._report()
        for peer in list(self._peers.values()):
            self._lose(peer, "closed")
        self._context.destroy(linger=0)
