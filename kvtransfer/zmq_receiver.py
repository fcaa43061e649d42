"""The receiving end of the ZMQ transport: one I/O thread per decode rank owns all that is here but the public calls."""

from __future__ import annotations

import logging
from functools import partial
from math import ceil

import numpy as np
import zmq

from common.clock import Clock, monotonic
from common.errors import (
    ConfigError,
    ProtocolError,
    TransferError,
)
from common.kv.layout import KVLayout
from common.kv.storage import KVStorage
from common.protocol import AttemptKey
from kvtransfer import wire
from kvtransfer.base import (
    IncomingTransfer,
    OnReceiverEvent,
    ReceiverEvent,
)
from kvtransfer.copying import SliceCopier
from kvtransfer.ends import ReceivingEnd
from kvtransfer.iothread import IOThread

log = logging.getLogger(__name__)

_MESSAGES_PER_TURN = 8
"""So many messages are received before commands are looked at again: bounds how late an abort can be."""


class ZmqReceiver:
    """`KVReceiver` over ZMQ, listening on tcp `host`:`port`; port 0 takes any free one.

    With `incarnation`, messages meant for another incarnation of this node are refused.

    Raises: ConfigError when it cannot listen there.
    """

    def __init__(
        self,
        storage: KVStorage,
        layout: KVLayout,
        rank: int,
        host: str,
        port: int,
        on_event: OnReceiverEvent,
        clock: Clock = monotonic,
        *,
        incarnation: str | None = None,
    ) -> None:
        self._copier = SliceCopier(storage)
        self._end = ReceivingEnd(layout, rank, storage.num_blocks, incarnation)
        self._clock = clock
        self._malformed = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_PAYLOAD_BYTES)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on {host}:{port}: {error}") from error
        self._address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._thread: IOThread[ReceiverEvent] = IOThread(
            f"kv-receiver-{rank}", on_event, turn=self._turn, recover=self._recover, finish=self._finish
        )
        self._poller.register(self._thread.mailbox.fileno(), zmq.POLLIN)
        self._thread.start()

    @property
    def address(self) -> str:
        """As `KVReceiver.address`."""
        return self._address

    @property
    def discarded_messages(self) -> int:
        """Messages so far that named no live transfer or could not be read."""
        return self._end.discarded_messages + self._malformed

    def open(self, transfer: IncomingTransfer) -> None:
        """As `KVReceiver.open`.

        Raises: TransferError if this key is open already or the receiver is closed.
        """
        self._thread.begin(transfer.key, lambda: self._end.open(transfer, self._clock()))

    def abort(self, key: AttemptKey) -> None:
        """As `KVReceiver.abort`."""
        self._thread.mailbox.put(partial(self._end.abort, key))

    def close(self) -> None:
        """As `KVReceiver.close`; returns when the thread has ended."""
        self._thread.stop()

    # ------------------------------------------------------------ the I/O thread

    def _turn(self) -> None:
        self._poller.poll(self._poll_timeout_ms())
        self._thread.run_commands()
        for _ in range(_MESSAGES_PER_TURN):
            frames = self._receive()
            if frames is None:
                break
            # `open` was called before the grant that this message answers; it may still be in the mailbox.
            self._thread.run_commands()
            self._on_message(frames)
        self._end.expire(self._clock())
        self._report()

    def _receive(self) -> list[zmq.Frame] | None:
        """The next message's frames, no more of them than tell that there are too many; None if none waits."""
        frames: list[zmq.Frame] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if len(frames) < 4:
                frames.append(frame)
            if not frame.more:
                return frames

    def _on_message(self, frames: list[zmq.Frame]) -> None:
        try:
            if len(frames) != 3:
                raise ProtocolError(f"a data message has 2 frames, this one has {len(frames) - 1}")
            header = wire.decode_header(frames[1].buffer)
        except ProtocolError as error:
            self._malformed += 1
            log.warning("dropped a data message: %s", error)
            return
        ack = wire.SliceAck(header.key, header.sequence)
        try:
            self._write(header, np.frombuffer(frames[2].buffer, dtype=np.uint8))
        except TransferError as error:
            log.info("refused a data message: %s", error)
            ack = wire.SliceAck(header.key, header.sequence, error.code, error.message[:1024])
        try:
            self._socket.send_multipart([frames[0].bytes, wire.encode(ack)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("could not acknowledge a message of %s: %s", header.key, error)

    def _write(self, header: wire.SliceHeader, payload: np.ndarray) -> None:
        claim = self._end.accept(header, payload.nbytes)
        self._copier.scatter_all(claim.slices, self._end.state_of(claim).blocks, payload)
        self._end.placed(claim)

    def _poll_timeout_ms(self) -> int:
        """Until the next deadline, at most a second."""
        deadline = self._end.next_deadline()
        return 1000 if deadline is None else ceil(1000 * min(max(deadline - self._clock(), 0.0), 1.0))

    def _report(self) -> None:
        self._thread.report(self._end.take_events())

    def _recover(self, error: Exception) -> None:
        self._end.give_up_claims()
        self._end.fail_all(TransferError(f"the receiver's I/O thread failed: {error}"))
        self._report()

    def _finish(self) -> None:
        self._end.abort_all()
        self._report()
        self._context.destroy(linger=0)
