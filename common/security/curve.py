"""Encryption of the ZMQ sockets between the ranks of a node by CURVE.

The key follows from the node's private key and never travels: to know it is to be allowed in.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.utils import z85


class CurveKeys(NamedTuple):
    """Two keys in ZMQ's own encoding, Z85."""

    public: bytes
    secret: bytes


def derived_keys(secret: bytes) -> CurveKeys:
    """The keys that belong to 32 secret bytes."""
    encoded: bytes = z85.encode(secret)
    return CurveKeys(zmq.curve_public(encoded), encoded)


def encrypt_server(socket: zmq.Socket[bytes], keys: CurveKeys | None) -> None:
    """Before `bind`: accept only those who know the public key. None: everyone, without encryption."""
    if keys is not None:
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = keys


def encrypt_client(socket: zmq.Socket[bytes], server: bytes | None) -> None:
    """Before `connect`: the server has this public key. None: no encryption."""
    if server is not None:
        socket.curve_serverkey = server
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
