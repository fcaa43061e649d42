"""The sending half of a transfer end: acks in, batches of slices out. Runs on the end's I/O thread.

It gathers the batches that the send table gives into buffers of a peer, and sends them. Peers are connected at the grant
(`kvtransfer.peer_table`).
"""

from __future__ import annotations

import logging
from functools import partial

from common.base.errors import PeerLost, TransferError, from_code
from common.control.messages import AttemptKey, Grant
from common.security.sealed_endpoints import without_keys
from kvtransfer.end_parts import EndParts
from kvtransfer.peer_table import PeerTable
from kvtransfer.send_state import Batch
from kvtransfer.tables import SendTable
from kvtransfer.transports.base import Buffer, Peer, Ready
from kvtransfer.wire import SliceHeader

log = logging.getLogger(__name__)


class SendHalf:
    """Sends the attempts of `table` to the peers of `connections`.

    A message below `min_message_bytes`, or below its peer's, is sent only if no more will follow or it has waited long.
    """

    def __init__(self, table: SendTable, connections: PeerTable, parts: EndParts, min_message_bytes: int) -> None:
        self.table = table
        self.connections = connections
        self._peers = connections.peers
        self._parts = parts
        self._clock = parts.clock
        self._min_message_bytes = min_message_bytes

    @property
    def has_work(self) -> bool:
        """Whether a message can be sent now."""
        return any(peer.waiting and peer.has_room for peer in self._peers.values())

    def grant(self, grant: Grant) -> None:
        """Connect to the ranks that want slices from this one."""
        for dst_rank in self.table.grant(grant, self._clock()):
            try:
                peer = self.connections.get_or_connect(grant, dst_rank)
            except TransferError as error:
                self.table.fail(grant.key, error)
                return
            peer.transfers[grant.key] = dst_rank
            peer.waiting[grant.key] = None

    def blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        """These blocks of a layer may be sent."""
        if self.table.blocks_final(key, layer, num_blocks, self._clock()):
            self._wake(key)

    def forget(self, key: AttemptKey) -> None:
        """Attempt `key` has ended."""
        for peer in self._peers.values():
            peer.transfers.pop(key, None)
            peer.waiting.pop(key, None)

    def take_acks(self, ready: Ready, now: float) -> None:
        """Handle all acks that have arrived, then give up what has waited too long."""
        for address, peer in list(self._peers.items()):
            self._take_acks(address, peer, ready, now)
        self.table.expire(now)
        self.connections.drop_idle(now)
        self._revoke_loans()

    def send(self, now: float) -> None:
        """Send at most one message to each peer, so that commands and acks are handled between messages."""
        for key in self.table.overdue(now):
            self._wake(key)
        for peer in self._peers.values():
            if peer.has_room:
                self._send_next(peer)

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
                    self.table.refused(batch, error)
                if peer.returned(ack.sequence) is not None:
                    self._count(peer, batch)
                    self.table.sent(batch, now)
                if not ack.code:
                    self.table.acknowledged(batch, now)
        except PeerLost as error:
            self.connections.fail(address, peer, error.message)
        if latest >= 0:
            for key in peer.behind(latest):
                self.table.progressed(key, now)

    def _send_next(self, peer: Peer) -> None:
        """Send one message of the first transfer that has a batch ready."""
        for key in list(peer.waiting):
            batch = self.table.take(
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
        state = self.table.state_of(batch)
        buffer = peer.stage()
        header = state.header(batch, self._parts.incarnation, peer.incarnation, peer.next_sequence())
        if peer.lend(buffer, header, batch):
            peer.send(header, buffer, batch, self._clock())  # counted when its ack arrives: nothing has moved yet
            return
        mark = self._parts.copier.gather_all(batch.slices, batch.blocks, buffer)
        if mark is None:
            self._put(peer, batch, header, buffer)
        else:
            peer.reserved += 1
            self._parts.copying.add(mark, partial(self._gathered, peer, batch, header, buffer))

    def _gathered(self, peer: Peer, batch: Batch, header: SliceHeader, buffer: Buffer) -> None:
        peer.reserved -= 1
        if peer.closed:
            self.table.dropped(batch)
        else:
            self._put(peer, batch, header, buffer)

    def _put(self, peer: Peer, batch: Batch, header: SliceHeader, buffer: Buffer) -> None:
        peer.send(header, buffer, batch, self._clock())
        self._count(peer, batch)
        self.table.sent(batch, self._clock())

    def _count(self, peer: Peer, batch: Batch) -> None:
        self._parts.traffic.add(batch.key, batch.dst_rank, peer.transport, peer.why, batch.size_bytes)

    def _revoke_loans(self) -> None:
        """End the loans of attempts that have failed: their blocks must be free again, whatever the receivers do."""
        for key in self.table.ending:
            for peer in self._peers.values():
                for sequence, (batch, _) in list(peer.lent.items()):
                    if batch.key == key:
                        self.table.dropped(peer.revoke(sequence))
