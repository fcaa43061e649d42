"""Records what TCP carries over the loopback, as somebody in the services' network would. Linux and root only."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Iterator

_IPV4 = 0x0800
_SO_RCVBUFFORCE = 33
_OUTGOING = 4
"""Kind of the second copy of each packet on the loopback."""

Flows = dict[tuple[int, int], bytes]
"""Bytes of each direction of each connection, by source and destination port."""


def why_not() -> str | None:
    """Why packets cannot be captured here; None if they can."""
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()
    except (AttributeError, OSError) as error:
        return f"packets cannot be captured here: {error}"
    return None


class Capture:
    """Packets of the loopback between `start` and `stop`."""

    def __init__(self) -> None:
        self._flows: defaultdict[tuple[int, int], bytearray] = defaultdict(bytearray)
        self._ends = threading.Event()
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_IPV4))
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 2**28)
        self._socket.bind(("lo", _IPV4))
        self._thread = threading.Thread(target=self._read)

    def start(self) -> None:
        """Begin to record."""
        self._thread.start()

    def stop(self) -> None:
        """Record the packets that have arrived, and end."""
        self._ends.set()
        self._thread.join()
        self._socket.close()

    def flows(self, ports: set[int]) -> Flows:
        """The data sent from or to these ports, by connection."""
        return {ends: bytes(data) for ends, data in self._flows.items() if not ports.isdisjoint(ends)}

    def _read(self) -> None:
        while select.select([self._socket], [], [], 0.1)[0] or not self._ends.is_set():
            if not select.select([self._socket], [], [], 0)[0]:
                continue
            packet, (_, _, kind, *_) = self._socket.recvfrom(2**17)
            if kind == _OUTGOING:
                continue
            packet = packet[14:]  # behind the Ethernet header
            if len(packet) < 40 or packet[9] != socket.IPPROTO_TCP:
                continue
            tcp = packet[4 * (packet[0] & 15) : struct.unpack_from(">H", packet, 2)[0] or len(packet)]
            source, destination = struct.unpack_from(">HH", tcp)
            self._flows[source, destination] += tcp[4 * (tcp[12] >> 4) :]


@contextlib.contextmanager
def captured() -> Iterator[Capture]:
    """A capture of everything inside the block."""
    capture = Capture()
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()
