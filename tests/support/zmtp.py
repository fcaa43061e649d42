"""Writes ZMTP bytes that no ZMQ library sends: messages that never end, and malformed frames."""

from __future__ import annotations

import socket
import struct

_BEFORE_MECHANISM = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
GREETING = _BEFORE_MECHANISM + b"NULL".ljust(20, b"\0") + bytes(32)
GREETING_PLAIN = _BEFORE_MECHANISM + b"PLAIN".ljust(20, b"\0") + bytes(32)
_SOCKET_TYPE = b"\x0bSocket-Type"


def ready(kind: bytes = b"DEALER") -> bytes:
    """The command that ends the handshake without encryption."""
    body = b"\x05READY" + _SOCKET_TYPE + struct.pack(">I", len(kind)) + kind
    return b"\x04" + bytes([len(body)]) + body


def hello(user: bytes, password: bytes) -> bytes:
    """The command that begins a handshake with a password."""
    body = b"\x05HELLO" + bytes([len(user)]) + user + bytes([len(password)]) + password
    return b"\x06" + struct.pack(">Q", len(body)) + body if len(body) > 255 else b"\x04" + bytes([len(body)]) + body


def frame(body: bytes, *, more: bool) -> bytes:
    """A part of a message."""
    return struct.pack(">BQ", 2 + more, len(body)) + body


def connected(endpoint: str, kind: bytes = b"DEALER") -> socket.socket:
    """A connection to a ZMQ socket at `tcp://HOST:PORT`, past its handshake."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    client = socket.create_connection((host, int(port)), 10)
    client.sendall(GREETING)
    left = len(GREETING)
    while left:  # ZMQ closes connections that do not wait for its greeting
        left -= len(client.recv(left))
    client.sendall(ready(kind))
    client.recv(2)
    return client
