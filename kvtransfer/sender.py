"""The sending end of every transport: one I/O thread per prefill rank owns all that is here but the public calls.

It turns commands and acks into calls of the state machines (`kvtransfer.rank_transfers`), gathers what they give into a
connection's buffer, and sends it. Which connection a destination gets is chosen at the grant (`kvtransfer.transports.choose`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import zmq

from common.base.clock import Clock, monotonic
from common.base.errors import PeerLost, TransferAborted, TransferError, from_code
from common.control.messages import AttemptKey, Grant
from common.engine.kv_transfer import OnSenderEvent, OutgoingTransfer, SenderEvent
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from kvtransfer.copy.device import CLOSING_S, Mark, Pending, RelayDevice
from kvtransfer.copy.host import make_copier
from kvtransfer.iothread import IOThread
from kvtransfer.rank_transfers import SendingEnd
from kvtransfer.traffic import Tally
from kvtransfer.transfer_state import Batch
from kvtransfer.transports.base import Buffer, Connector, EndContext, Peer, Ready, poll
from kvtransfer.transports.choose import Choice, Failures, choose, parse_offers
from kvtransfer.wire import SliceHeader

log = logging.getLogger(__name__)

_MAX_PAIRS = 1024


@dataclass(frozen=True)
class Pair:
    """What this rank uses to reach one rank of one incarnation of a node."""

    node_id: str
    incarnation: str
    dst_rank: int
    choice: Choice


class Sender:
    """`KVSender` over the given transports, one of them for each pair of ranks.

    `device` is where the KV is, if not in CPU memory; `open` and `blocks_final` then speak of what the calling thread
    has started there. `wanted` narrows the choice down, as in `kvtransfer.transports.choose`. `min_message_bytes` is what is worth a message of
    its own while more will follow, `idle_s` after how long without an ack a connection is given up.

    Takes the connectors over: it closes them, also when it raises.
    Raises: ConfigError if some transport's messages cannot carry one block of one layer.
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
        self._final = Pending()
        """Reports of final blocks, which the device has yet to compute."""
        self._copying = Pending()
        """Messages whose buffers the device has yet to fill."""
        self._end = SendingEnd(layout, rank, storage.num_blocks)
        self._rank = rank
        self._wanted = wanted
        self._clock = clock
        self._min_message_bytes = min_message_bytes
        self._idle_s = idle_s
        self._connectors = {connector.offer.transport: connector for connector in connectors}
        self._peers: dict[str, Peer] = {}
        """By data address."""
        self._failures = Failures()
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._bytes: dict[str, int] = dict.fromkeys(self._connectors, 0)
        self._tally = Tally(rank)
        self._poller = zmq.Poller()
        self._thread: IOThread[SenderEvent] = IOThread(
            f"kv-sender-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        shard = layout.shards()[rank]
        unit_bytes = layout.slice_bytes_per_block * (shard.head_hi - shard.head_lo)
        self._num_layers = shard.layer_hi - shard.layer_lo
        context = EndContext(rank, unit_bytes, self._poller, self._thread.mailbox.put, device)
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
    def bytes_by_transport(self) -> Mapping[str, int]:
        """KV bytes handed to each transport so far. For any thread."""
        return dict(self._bytes)

    @property
    def pairs(self) -> Sequence[Pair]:
        """What was chosen for each destination so far, the latest last. For any thread."""
        return list(self._pairs.values())

    def open(self, transfer: OutgoingTransfer) -> None:
        """As `KVSender.open`.

        Raises: TransferError if this key is open already or the sender is closed.
        """
        if self._device is None:
            self._thread.begin(transfer.key, partial(self._end.open, transfer))
            return
        # What the cache holds may still be under way: an earlier step is computing it.
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
        self._thread.mailbox.put(partial(self._end.fail, key, TransferAborted(f"{key} was aborted by its sender")))

    def disconnect(self, incarnation: str) -> None:
        """As `KVSender.disconnect`."""
        self._thread.mailbox.put(partial(self._disconnect, incarnation))

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
        self._end.expire(now)
        self._drop_idle(now)
        self._take_back()
        self._report()
        for key in self._end.overdue(now):
            self._wake(key)
        # One message per peer and turn: commands and acks get their turn between any two.
        for peer in self._peers.values():
            if peer.has_room:
                self._send_next(peer)
        self._report()

    def _open_after(self, mark: Mark, transfer: OutgoingTransfer, final_blocks: int) -> None:
        self._end.open(transfer)
        if final_blocks:
            for layer in range(self._num_layers):
                self._final.add(mark, partial(self._on_blocks_final, transfer.key, layer, final_blocks))

    def _on_grant(self, grant: Grant) -> None:
        for dst_rank in self._end.grant(grant, self._clock()):
            try:
                peer = self._peer(grant, dst_rank)
            except TransferError as error:
                self._end.fail(grant.key, error)
                return
            peer.transfers[grant.key] = dst_rank
            peer.waiting[grant.key] = None

    def _on_blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        if self._end.blocks_final(key, layer, num_blocks, self._clock()):
            self._wake(key)

    def _wake(self, key: AttemptKey) -> None:
        """It may have something to send."""
        for peer in self._peers.values():
            if key in peer.transfers:
                peer.waiting[key] = None

    def _take_acks(self, address: str, peer: Peer, ready: Ready, now: float) -> None:
        try:
            for ack, batch in peer.acks(ready, now):
                if ack.code:
                    error = from_code(ack.code, ack.message)
                    log.info("%s refused a message of %s: %s", address, batch.key, error)
                    self._end.refused(batch, error)
                if peer.returned(ack.sequence) is not None:
                    self._count(peer, batch)
                    self._end.handed(batch, now)
                if not ack.code:
                    self._end.acknowledged(batch, now)
        except PeerLost as error:
            self._break(address, peer, error.message)

    def _peer(self, grant: Grant, dst_rank: int) -> Peer:
        """The connection to that rank of that incarnation, made if there is none.

        Raises: HandshakeRefused if no transport serves both ends, PeerLost if it cannot be reached.
        """
        address, incarnation = grant.dst.data_addresses[dst_rank], grant.dst.incarnation
        peer = self._peers.get(address)
        if peer is not None and peer.incarnation != incarnation:
            self._lose(address, f"incarnation {incarnation} has taken its address")
            peer = None
        elif peer is not None and peer.second_best and peer.unused and not self._failures.of(address, self._clock()):
            self._lose(address, "a better transport may come about again")
            peer = None
        if peer is None:
            peer = self._peers[address] = self._connect(grant, dst_rank)
        return peer

    def _connect(self, grant: Grant, dst_rank: int) -> Peer:
        """A connection over the best transport that comes about: that both ends name it is no proof that it does.

        Raises: as `_peer`.
        """
        address, incarnation = grant.dst.data_addresses[dst_rank], grant.dst.incarnation
        ours, theirs = [c.offer for c in self._connectors.values()], parse_offers(address)
        while True:
            failed = self._failures.of(address, self._clock())
            choice = choose(ours, theirs, self._wanted, failed)
            try:
                peer = self._connectors[choice.transport].connect(choice.offer, incarnation, self._clock())
            except PeerLost as error:
                if choice.transport in failed:  # and so did all others
                    raise
                self._note_failure(address, choice.transport, error.message)
                continue
            peer.why = choice.why
            peer.second_best = bool(failed)
            self._note_choice(Pair(grant.dst.node_id, incarnation, dst_rank, choice))
            return peer

    def _note_failure(self, address: str, transport: str, reason: str) -> None:
        """For a while, connections to `address` take another transport, if there is one."""
        log.warning("%s to %s failed: %s", transport, address, reason)
        self._failures.note(address, transport, reason, self._clock())

    def _note_choice(self, pair: Pair) -> None:
        place = f"{pair.dst_rank}", pair.incarnation
        if place not in self._pairs:
            log.info(
                "rank %d sends to rank %d of %s (%s) over %s: %s",
                self._rank,
                pair.dst_rank,
                pair.node_id,
                pair.incarnation,
                pair.choice.transport,
                pair.choice.why,
            )
            if len(self._pairs) >= _MAX_PAIRS:
                del self._pairs[next(iter(self._pairs))]
        self._pairs[place] = pair

    def _send_next(self, peer: Peer) -> None:
        """Send one message of the first transfer that has one ready."""
        for key in list(peer.waiting):
            batch = self._end.take(
                key,
                peer.transfers.get(key, -1),
                max_bytes=peer.message_bytes,
                min_bytes=min(self._min_message_bytes, peer.message_bytes),
                now=self._clock(),
            )
            if batch is not None:
                self._send(peer, batch)
                return
            del peer.waiting[key]

    def _send(self, peer: Peer, batch: Batch) -> None:
        state = self._end.state_of(batch)
        buffer = peer.stage()
        header = state.header(batch, peer.incarnation, peer.next_sequence())
        if peer.lend(buffer, header, batch, state.blocks):
            peer.send(header, buffer, batch, self._clock())  # counted when it comes back: nothing has moved yet
            return
        mark = self._copier.gather_all(batch.slices, state.blocks, buffer)
        if mark is None:
            self._put(peer, batch, header, buffer)
            self._end.handed(batch, self._clock())
        else:
            peer.reserved += 1
            self._copying.add(mark, partial(self._gathered, peer, batch, header, buffer))

    def _gathered(self, peer: Peer, batch: Batch, header: SliceHeader, buffer: Buffer) -> None:
        peer.reserved -= 1
        if peer.closed:
            self._end.given_up(batch)
        else:
            self._put(peer, batch, header, buffer)
            self._end.handed(batch, self._clock())

    def _put(self, peer: Peer, batch: Batch, header: SliceHeader, buffer: Buffer) -> None:
        peer.send(header, buffer, batch, self._clock())
        self._count(peer, batch)

    def _count(self, peer: Peer, batch: Batch) -> None:
        self._bytes[peer.transport] += batch.size_bytes
        self._tally.add(batch.key, batch.dst_rank, peer.transport, peer.why, batch.size_bytes)

    def _take_back(self) -> None:
        """End the loans of attempts that have failed: their blocks are wanted back, whatever their readers do."""
        for key in self._end.ending:
            for peer in self._peers.values():
                for sequence, batch in list(peer.lent.items()):
                    if batch.key == key:
                        self._end.given_up(peer.take_back(sequence))

    def _break(self, address: str, peer: Peer, reason: str) -> None:
        """It does not work: what never did is not taken again for a while."""
        if not peer.proven:
            self._note_failure(address, peer.transport, reason)
        self._lose(address, reason)

    def _lose(self, address: str, reason: str) -> None:
        """Close a connection; its transfers fail."""
        peer = self._peers.pop(address)
        lent = [peer.take_back(sequence) for sequence in list(peer.lent)]
        peer.close()
        for key in peer.transfers:
            self._end.fail(key, PeerLost(f"{key}: lost {address} ({peer.incarnation}): {reason}"))
        for batch in lent:
            self._end.given_up(batch)

    def _disconnect(self, incarnation: str) -> None:
        for address, peer in list(self._peers.items()):
            if peer.incarnation == incarnation:
                self._lose(address, "its node could not be reached")

    def _drop_idle(self, now: float) -> None:
        for address, peer in list(self._peers.items()):
            if now - peer.last_progress < self._idle_s:
                continue
            if peer.in_flight:
                self._break(address, peer, f"no ack for {self._idle_s} s")
            elif peer.unused:
                self._lose(address, "idle")

    def _poll_timeout_ms(self) -> int:
        """0 while something can be sent, else until the next deadline, at most a second."""
        if any(peer.waiting and peer.has_room for peer in self._peers.values()):
            return 0
        deadline = self._end.next_deadline()
        return 1000 if deadline is None else math.ceil(1000 * min(max(deadline - self._clock(), 0.0), 1.0))

    def _report(self) -> None:
        events = [replace(event, traffic=self._tally.take(event.key)) for event in self._end.take_events()]
        for event in events:
            for peer in self._peers.values():
                peer.transfers.pop(event.key, None)
                peer.waiting.pop(event.key, None)
        self._thread.report(events)

    def _recover(self, error: Exception) -> None:
        self._end.fail_all(TransferError(f"the sender's I/O thread failed: {error}"))
        for address in list(self._peers):
            self._lose(address, "the I/O thread failed")
        self._report()
        while not self._stop_copying(CLOSING_S) and not self._thread.closing:
            pass
        self._end.give_up_batches()
        self._report()

    def _stop_copying(self, at_most_s: float) -> bool:
        """Whether no copy is under way any more; else the memory that is copied must stay."""
        self._final.clear()
        ended = self._copier.wait(at_most_s)
        if ended:
            self._copying.clear()
        return ended

    def _finish(self) -> None:
        self._end.fail_all(TransferAborted("the sender was closed"))
        for address in list(self._peers):
            self._lose(address, "closed")
        self._stop_copying(CLOSING_S)
        self._end.give_up_batches()
        self._report()
        for connector in self._connectors.values():
            connector.close()
