"""How fast ZMQ alone moves messages between two processes over tcp loopback: a limit for the relay."""

from __future__ import annotations

import time

import zmq
from bench.worker import Worker

_IN_FLIGHT = 8
"""Messages queued at most at either end; the relay's window."""


class RawReceiver:
    """The receiving process. The payload is touched only by ZMQ."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _IN_FLIGHT)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.bind("tcp://127.0.0.1:*")

    def address(self) -> str:
        """Where to send."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def receive(self, count: int) -> float:
        """Bytes/s of `count` messages after a first one."""
        self._socket.recv(copy=False)
        started = time.perf_counter()
        size = sum(len(self._socket.recv(copy=False).buffer) for _ in range(count))
        return size / (time.perf_counter() - started)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


class RawSender:
    """The sending process; zero-copy, always the same buffer."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, _IN_FLIGHT)
        self._socket.setsockopt(zmq.SNDTIMEO, 60_000)
        self._socket.connect(address)

    def send(self, message_bytes: int, count: int) -> None:
        """Send `count` messages and one before them."""
        payload = bytearray(message_bytes)
        for _ in range(count + 1):
            self._socket.send(payload, copy=False)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=5000)


def raw_zmq_rate(message_bytes: int, count: int) -> float:
    """Bytes/s between two fresh processes."""
    receiver = Worker("bench.raw_zmq:RawReceiver")
    try:
        sender = Worker("bench.raw_zmq:RawSender", address=receiver.call("address"))
        try:
            receiver.start("receive", count=count)
            sender.call("send", message_bytes=message_bytes, count=count)
            return receiver.result()
        finally:
            sender.close()
    finally:
        receiver.close()
