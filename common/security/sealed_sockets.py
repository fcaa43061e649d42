"""Sealed messages over ZMQ: who may connect, and what a server keeps of each connection.

A client has a name with its public key, from which the server derives the keys of their channel. It proves by a password that
it knows the server's key (ZMQ's PLAIN mechanism), so that others are refused before they send a message. An eavesdropper who
learns the password can connect, but its messages fail authentication.

A frame for the key of this process opens once, while the server remembers its connection: the `MAX_CHANNELS` used last. Only
those who know that key can add one. A node has fewer links between its ranks, so that none is forgotten; a KV receiver forgets
old ones, and a message that is replayed then names an attempt that ended with its connection. A frame for the lasting key
opens every time.
"""

from __future__ import annotations

import hmac
from typing import Any

import zmq

from common.base.errors import ProtocolError
from common.security.sealed_endpoints import KEY_BYTES, OVERHEAD_BYTES
from common.security.sealing import Channel, ServerKey, client_channel, password

MAX_CHANNELS = 1024
"""Connections for the key of this process whose keys and latest nonces a server remembers."""
_NAME, _LASTING_NAME = b"k", b"n"
"""First byte of names: for the server's key of this process, or for its lasting key. ZMQ's names begin with no zero byte."""
_NAME_BYTES = 1 + KEY_BYTES
_DOMAIN, _USER = b"kv", b"kvrelay"


def introduce(client: zmq.Socket[bytes], server_key: bytes) -> Channel:
    """Name a DEALER, before `connect`: the client's end of a new channel to a `SealedServer`.

    Raises: ProtocolError if it has no such key.
    """
    public, channel = client_channel(server_key)
    client.routing_id = _NAME + public
    client.plain_username, client.plain_password = _USER, password(server_key)
    return channel


class SealedPush:
    """Seals the messages of a PUSH, whose server cannot know its name otherwise: a frame is name and sealed content."""

    def __init__(self, client: zmq.Socket[bytes], server_key: bytes, *, lasting: bool = False) -> None:
        """Before `connect`. lasting: `server_key` is the server's lasting key. Raises: ProtocolError if it is no key."""
        public, self._channel = client_channel(server_key)
        self._name = (_LASTING_NAME if lasting else _NAME) + public
        client.plain_username, client.plain_password = _USER, password(server_key)

    def seal(self, data: bytes) -> bytearray:
        """`data` as a frame."""
        frame = bytearray(_NAME_BYTES + len(data) + OVERHEAD_BYTES)
        frame[:_NAME_BYTES] = self._name
        self._channel.seal_into(data, memoryview(frame)[_NAME_BYTES:])
        return frame


class SealedServer:
    """The keys of one listening socket, and the channels of its clients."""

    def __init__(self, lasting: ServerKey | None = None) -> None:
        """lasting: a key that outlives this process. What is sealed for it may be a replay."""
        self._keys = {_NAME: ServerKey()}
        if lasting is not None:
            self._keys[_LASTING_NAME] = lasting
        self._passwords = [password(key.public) for key in self._keys.values()]
        self._channels: dict[bytes, Channel] = {}
        """By the client's name, for the key of this process; the one used last is the last."""

    @property
    def public_key(self) -> bytes:
        """The key of this process, which clients must know."""
        return self._keys[_NAME].public

    def guard(self, context: zmq.Context[zmq.Socket[bytes]], server: zmq.Socket[bytes]) -> None:
        """Call before `bind`: connections then wait for `admit` to check their password. `context`: the socket's own."""
        self.requests = context.socket(zmq.REP)
        """Readable when a connection waits for `admit` (ZMQ's ZAP, RFC 27)."""
        self.requests.bind("inproc://zeromq.zap.01")
        server.plain_server = True
        server.zap_domain = _DOMAIN

    def admit(self) -> list[str]:
        """Accept or refuse all waiting connections. Returns the addresses of those that were refused."""
        refused: list[str] = []
        while True:
            try:
                version, number, _, address, _, mechanism, *shown = self.requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return refused
            known = mechanism == b"PLAIN" and any(hmac.compare_digest(shown[-1], each) for each in self._passwords)
            if not known:
                refused.append(address.decode(errors="replace"))
            self.requests.send_multipart([version, number, b"200" if known else b"400", b"", b"", b""])

    def open_header(self, sender: bytes, header: Any) -> tuple[memoryview, Channel]:
        """The header of a message of the client named `sender`, and the channel of its payload, whose context is `header`,
        and of its ack.

        Raises: ProtocolError unless it was sealed there, for this server, and (with the key of this process) after all headers
        that were opened before.
        """
        key = self._keys.get(sender[:1])
        if key is None:
            raise ProtocolError("its sender has no valid name")
        channel = self._channels.get(sender) or key.channel(sender[1:])
        content = channel.open(header)
        if sender[:1] == _NAME:  # recordings of earlier processes must not make it forget a channel of this one
            self._channels.pop(sender, None)
            self._channels[sender] = channel
            if len(self._channels) > MAX_CHANNELS:
                del self._channels[next(iter(self._channels))]
        return content, channel

    def open(self, frame: Any) -> tuple[memoryview, bool]:
        """The content of a frame of a `SealedPush`, and whether it was sealed for the lasting key.

        Raises: ProtocolError, see `open_header`.
        """
        name = bytes(frame[:_NAME_BYTES])
        content, _ = self.open_header(name, frame[_NAME_BYTES:])
        return content, name[:1] == _LASTING_NAME
