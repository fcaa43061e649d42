"""KV between ends in one process, through memory: for tests of nodes and for the conformance suite.

Same state machines, threads and events as the ZMQ transport, without sockets, windows and acks of success.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from functools import partial
from math import ceil

import numpy as np

from common.clock import Clock, monotonic
from common.errors import PeerLost, TransferAborted, TransferError
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from common.protocol import AttemptKey, Grant
from kvtransfer.base import (
    IncomingTransfer,
    OnReceiverEvent,
    OnSenderEvent,
    OutgoingTransfer,
    ReceiverEvent,
    SenderEvent,
)
from kvtransfer.copying import SliceCopier
from kvtransfer.ends import ReceivingEnd, SendingEnd
from kvtransfer.iothread import IOThread
from kvtransfer.state import Batch
from kvtransfer.wire import SliceHeader

_BATCH_BYTES = 2**20

Refuse = Callable[[TransferError], None]


class LoopbackNetwork:
    """Who listens where. One per test or process; every end of it is given the same one."""

    def __init__(self) -> None:
        self.receivers: dict[str, LoopbackReceiver] = {}
        self._bound = 0

    def bind(self, receiver: LoopbackReceiver) -> str:
        """A new address for `receiver`."""
        self._bound += 1
        address = f"loopback://{self._bound}"
        self.receivers[address] = receiver
        return address


class LoopbackSender:
    """`KVSender` through memory."""

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        on_event: OnSenderEvent,
        network: LoopbackNetwork,
        clock: Clock = monotonic,
    ) -> None:
        self._copier = SliceCopier(storage)
        self._end = SendingEnd(layout, rank, storage.num_blocks)
        self._layout, self._rank, self._network, self._clock = layout, rank, network, clock
        unit_bytes = layout.slice_bytes_per_block * layout.num_kv_heads
        self._batch_bytes = max(_BATCH_BYTES, unit_bytes)
        self._peers: dict[AttemptKey, Grant] = {}
        self._thread: IOThread[SenderEvent] = IOThread(
            f"kv-loopback-sender-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        self._thread.start()

    def open(self, transfer: OutgoingTransfer) -> None:
        """As `KVSender.open`. Raises: TransferError if the key is open already or the sender is closed."""
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
        """As `KVSender.close`."""
        self._thread.stop()

    def _turn(self) -> None:
        _wait(self._thread.mailbox.fileno(), self._end.next_deadline(), self._clock)
        self._thread.run_commands()
        self._end.expire(self._clock())
        self._report()

    def _on_grant(self, grant: Grant) -> None:
        ranks = self._end.grant(grant)
        if ranks:
            self._peers[grant.key] = grant
            self._send_ready(grant.key, ranks)

    def _on_blocks_final(self, key: AttemptKey, layer: int, num_blocks: int) -> None:
        self._send_ready(key, self._end.blocks_final(key, layer, num_blocks))

    def _send_ready(self, key: AttemptKey, ranks: list[int]) -> None:
        for rank in ranks:
            receiver = self._network.receivers.get(self._peers[key].dst.data_addresses[rank])
            if receiver is None:
                self._end.fail(key, PeerLost(f"{key}: nobody listens at {self._peers[key].dst.data_addresses[rank]}"))
                return
            while batch := self._end.take(key, rank, max_bytes=self._batch_bytes):
                self._send(receiver, batch)

    def _send(self, receiver: LoopbackReceiver, batch: Batch) -> None:
        state = self._end.state_of(batch)
        payload = np.empty(batch.size_bytes, dtype=np.uint8)
        self._copier.gather_all(batch.slices, state.blocks, payload)
        header = state.header(batch, self._peers[batch.key].dst.incarnation, sequence=0)
        receiver.deliver(
            header, payload, lambda error: self._thread.mailbox.put(partial(self._end.fail, batch.key, error))
        )
        self._end.handed(batch)

    def _report(self) -> None:
        events = self._end.take_events()
        for event in events:
            self._peers.pop(event.key, None)
        self._thread.report(events)

    def _recover(self, error: Exception) -> None:
        self._end.give_up_batches()
        self._end.fail_all(TransferError(f"the sender's I/O thread failed: {error}"))
        self._report()

    def _finish(self) -> None:
        self._end.fail_all(TransferAborted("the sender was closed"))
        self._report()


class LoopbackReceiver:
    """`KVReceiver` through memory."""

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        on_event: OnReceiverEvent,
        network: LoopbackNetwork,
        clock: Clock = monotonic,
        incarnation: str | None = None,
    ) -> None:
        self._copier = SliceCopier(storage)
        self._end = ReceivingEnd(layout, rank, storage.num_blocks, incarnation)
        self._network, self._clock = network, clock
        self._address = network.bind(self)
        self._thread: IOThread[ReceiverEvent] = IOThread(
            f"kv-loopback-receiver-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        self._thread.start()

    @property
    def address(self) -> str:
        """As `KVReceiver.address`."""
        return self._address

    @property
    def discarded_messages(self) -> int:
        """Messages so far that named no live transfer."""
        return self._end.discarded_messages

    def open(self, transfer: IncomingTransfer) -> None:
        """As `KVReceiver.open`. Raises: TransferError if the key is open already or the receiver is closed."""
        self._thread.begin(transfer.key, lambda: self._end.open(transfer, self._clock()))

    def abort(self, key: AttemptKey) -> None:
        """As `KVReceiver.abort`."""
        self._thread.mailbox.put(partial(self._end.abort, key))

    def close(self) -> None:
        """As `KVReceiver.close`."""
        self._network.receivers.pop(self._address, None)
        self._thread.stop()

    def deliver(self, header: SliceHeader, payload: np.ndarray, refuse: Refuse) -> None:
        """Take a message from a sender's thread; `refuse` is called if nobody wants it."""
        self._thread.mailbox.put(partial(self._on_message, header, payload, refuse))

    def _turn(self) -> None:
        _wait(self._thread.mailbox.fileno(), self._end.next_deadline(), self._clock)
        self._thread.run_commands()
        self._end.expire(self._clock())
        self._report()

    def _on_message(self, header: SliceHeader, payload: np.ndarray, refuse: Refuse) -> None:
        try:
            claim = self._end.accept(header, payload.nbytes)
        except TransferError as error:
            refuse(error)
            return
        self._copier.scatter_all(claim.slices, self._end.state_of(claim).blocks, payload)
        self._end.placed(claim)

    def _report(self) -> None:
        self._thread.report(self._end.take_events())

    def _recover(self, error: Exception) -> None:
        self._end.give_up_claims()
        self._end.fail_all(TransferError(f"the receiver's I/O thread failed: {error}"))
        self._report()

    def _finish(self) -> None:
        self._end.abort_all()
        self._report()


def _wait(fileno: int, deadline: float | None, clock: Clock) -> None:
    """Until `fileno` is readable or `deadline` is near; at most a second."""
    wait_s = 1.0 if deadline is None else min(max(deadline - clock(), 0.0), 1.0)
    select.select([fileno], [], [], ceil(1000 * wait_s) / 1000)
