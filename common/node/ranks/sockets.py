"""The sockets between the ranks of a node: each process listens at one and connects to those of others.

With certificates (`--tls-dir`) all messages are sealed (`common.security.sealed_sockets`). Each listening socket has a key that
is new in each process. A rank tells the leader its own key, sealed for the *node's key*, which follows from the node's private
key; the leader answers with the key of its own socket. A message sealed for the node's key could be a replay
of an earlier start; it only makes the leader answer, and only the rank of that start could read the answer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import recv_monitor_message

from common.base.bounded_messages import BoundedMessages
from common.base.endpoints import bind, connect
from common.base.errors import ConfigError, PeerLost, ProtocolError
from common.security.sealed_endpoints import split_key, with_key
from common.security.tls import open_credentials

if TYPE_CHECKING:
    from common.security.sealed_sockets import SealedServer

log = logging.getLogger(__name__)

Context = zmq.Context[zmq.Socket[bytes]]
_PROGRESS_EVERY_S = 5.0
_LINGER_MS = 1000
_MAX_ANSWERS = 256
"""Connections that a leader keeps open to tell its key."""


def node_secret(tls_dir: str | None) -> bytes | None:
    """What the node's key follows from; None without `--tls-dir`. Raises: ConfigError."""
    credentials = open_credentials(tls_dir)
    return None if credentials is None else credentials.secret(b"links between ranks")


class RankOutbox:
    """A PUSH to another process of the node. For one thread at a time."""

    def __init__(self, context: Context, address: str, *, lasting: bool = False) -> None:
        """address: with the key of its inbox, if messages are sealed. lasting: that is the node's key."""
        place, key = split_key(address)
        self.socket = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._sealed = None
        if key is not None:
            from common.security.sealed_sockets import SealedPush

            self._sealed = SealedPush(self.socket, key, lasting=lasting)
        connect(self.socket, place)

    def send(self, data: bytes) -> None:
        """Queue one message."""
        self.socket.send(data if self._sealed is None else self._sealed.seal(data))

    def close(self) -> None:
        """Close it, and soon drop what is still queued."""
        self.socket.close()


class RankInbox:
    """A PULL that other processes of the node connect to. For one thread at a time."""

    def __init__(
        self,
        context: Context,
        host: str,
        port: int,
        max_bytes: int,
        secret: bytes | None = None,
        *,
        leads: bool = False,
    ) -> None:
        """max_bytes: longest message. secret: from `node_secret`. leads: tells its key to those who know the node's.

        Raises: ZMQError if it cannot listen there.
        """
        self._context = context
        self._socket = context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        self._sealed: SealedServer | None = None
        self._answers: dict[str, RankOutbox] = {}
        """By address. Open even after a second, in which a busy rank may not have accepted the connection."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if secret is not None:
            from common.security.sealed_sockets import SealedServer, ServerKey

            self._sealed = SealedServer(ServerKey(secret) if leads else None)
            self._sealed.guard(context, self._socket)
            self._poller.register(self._sealed.requests, zmq.POLLIN)
        self._incoming = BoundedMessages(self._socket, max_bytes)
        bind(self._socket, host, port)
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def key(self) -> bytes | None:
        """What a `RankOutbox` to it needs; None if messages are not sealed."""
        return None if self._sealed is None else self._sealed.public_key

    def receive(self, timeout_s: float) -> bytes | memoryview | None:
        """The next message; None if none comes in time. Messages that cannot be opened are dropped."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(zmq.Again):
                if (data := self._opened(self._incoming.receive())) is not None:
                    return data
                continue
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            self._poller.poll(int(1000 * left_s) + 1)
            if self._sealed is not None:
                for address in self._sealed.admit():
                    log.warning(
                        "refused a connection from %s: it does not know the key of this node",
                        address,
                        extra={"peer": address},
                    )

    def close(self) -> None:
        """Stop watching its connections; the context closes the sockets."""
        self._incoming.close()

    def _opened(self, frame: zmq.Frame) -> bytes | memoryview | None:
        if self._sealed is None:
            return frame.bytes
        try:
            content, lasting = self._sealed.open(frame.buffer)
            if not lasting:
                return content
            self._answer(str(content, "utf-8"))
        except (ProtocolError, ValueError, zmq.ZMQError) as error:
            log.warning("dropped a message between ranks: %s", error)
        return None

    def _answer(self, address: str) -> None:
        """Tell the key of this inbox to the one at `address`, once: a rank takes what follows for an order."""
        if address in self._answers:
            return
        outbox = self._answers[address] = RankOutbox(self._context, address)
        outbox.send(self.key or b"")
        if len(self._answers) > _MAX_ANSWERS:  # most of them answer recordings of earlier starts
            list(self._answers.values())[-_MAX_ANSWERS - 1].close()


def ask_leader(context: Context, leader: str, inbox: RankInbox, address: str, secret: bytes, timeout_s: float) -> str:
    """The leader's address with the key of its inbox. `address`: where others reach `inbox`.

    Raises: ConfigError if the leader has another node's key, PeerLost if it does not answer in time.
    """
    from common.security.sealed_sockets import ServerKey

    outbox = RankOutbox(context, with_key(leader, ServerKey(secret).public), lasting=True)
    monitor = outbox.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    try:
        outbox.send(with_key(address, inbox.key).encode())
        told_s = time.monotonic()
        deadline_s = told_s + timeout_s
        while (now_s := time.monotonic()) < deadline_s:
            if (key := inbox.receive(0.2)) is not None:
                return with_key(leader, bytes(key))
            if monitor.poll(0):
                recv_monitor_message(monitor)
                raise ConfigError(
                    f"the leader at {leader} refused this rank: --tls-dir must hold the same key on all hosts of a node"
                )
            if now_s > told_s + _PROGRESS_EVERY_S:
                told_s = now_s
                log.info("waiting for the leader at %s to tell its key", leader)
        raise PeerLost(f"the leader at {leader} has not told its key within {timeout_s:g} s")
    finally:
        outbox.socket.disable_monitor()
        monitor.close(linger=0)
        outbox.close()
