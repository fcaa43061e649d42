"""Encryption of ZMQ sockets by CURVE.

A server's key is told only over mutually authenticated links, and never travels in clear: to know it is to be allowed in.
It is new in every process, except among the ranks of one node, who derive it from the node's private key.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import zmq
from zmq.utils import z85

_IN_ADDRESS = re.compile(r"\?key=[0-9a-f]+")


class CurveKeys(NamedTuple):
    """Two keys in ZMQ's own encoding, Z85."""

    public: bytes
    secret: bytes


def new_keys() -> CurveKeys:
    """Random keys."""
    return CurveKeys(*zmq.curve_keypair())


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
        socket.curve_publickey, socket.curve_secretkey = new_keys()


def with_key(address: str, public: bytes | None) -> str:
    """An address that tells the public key of the server behind it."""
    return address if public is None else f"{address}?key={z85.decode(public).hex()}"


def split_key(address: str) -> tuple[str, bytes | None]:
    """An address without the key, and the key that it tells. Raises: ValueError if that is not a key."""
    plain, separator, key = address.partition("?key=")
    if not separator:
        return address, None
    raw = bytes.fromhex(key)
    if len(raw) != 32:
        raise ValueError(f"a key has 32 bytes, not {len(raw)}")
    return plain, z85.encode(raw)


def without_keys(text: str) -> str:
    """`text` without the keys in its addresses: for logs, and for readers who must not connect."""
    return _IN_ADDRESS.sub("", text)
