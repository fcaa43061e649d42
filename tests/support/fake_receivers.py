"""Raw sockets in place of a receiver: they show the sender's messages and acknowledge only when a test tells them to."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import zmq
from support.transfer_harness import DEADLINE_S

from common.control.messages import PeerRef
from kvtransfer import wire
from kvtransfer.transports.choose import TransportOffer
from kvtransfer.transports.same_host import host_id
from kvtransfer.transports.shm import ring


class FakeRouter:
    """A ROUTER socket at an address of `transport`."""

    def __init__(self, transport: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("tcp://127.0.0.1:*")
        endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peer = PeerRef("decode", "dst-1", "", [f"{transport}+{endpoint}"])

    def drop(self) -> None:
        """Break the connection."""
        self.socket.close(linger=0)

    def close(self) -> None:
        self.context.destroy(linger=0)


class FakeZmqReceiver(FakeRouter):
    def __init__(self) -> None:
        super().__init__("zmq")

    def accept(self) -> None:
        """Do nothing: ZMQ accepts connections by itself."""

    def next(self, timeout_s: float = DEADLINE_S) -> tuple[bytes, wire.SliceHeader, bytes] | None:
        """Identity of the sender, header, payload; None if no message arrives in time."""
        if not self.socket.poll(1000 * timeout_s):
            return None
        identity, header, payload = self.socket.recv_multipart()
        return identity, wire.decode_header(header), payload

    def ack(self, identity: bytes, header: wire.SliceHeader) -> None:
        self.socket.send_multipart([identity, wire.encode(wire.SliceAck(header.key, header.sequence))])


class FakeShmReceiver:
    def __init__(self) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        name = f"kvrelay-test-{os.urandom(8).hex()}"
        self.listener.bind("\0" + name)
        self.listener.listen(1)
        self.listener.settimeout(DEADLINE_S)
        offer = TransportOffer("shm", f"unix://{host_id()}/{name}")
        self.peer = PeerRef("decode", "dst-1", "", [str(offer)])

    def accept(self) -> None:
        self.connected, _ = self.listener.accept()
        self.connected.settimeout(DEADLINE_S)
        data, fds, _, _ = socket.recv_fds(self.connected, 64, 1)
        self.ring = ring.accept(data, fds[0])
        os.close(fds[0])

    def next(self) -> tuple[int, wire.SliceHeader, bytes]:
        """Page, header, payload."""
        page, header_bytes, payload_bytes = struct.unpack("<IIQ", self.connected.recv(64))
        header = wire.decode_header(self.ring.header(page, header_bytes).tobytes())
        return page, header, self.ring.payload(page, payload_bytes).tobytes()

    def ack(self, header: wire.SliceHeader) -> None:
        self.connected.send(wire.encode(wire.SliceAck(header.key, header.sequence)))

    def drop(self) -> None:
        """Break the connection."""
        self.connected.close()

    def close(self) -> None:
        self.listener.close()
        if hasattr(self, "connected"):
            self.connected.close()
