"""Sealed messages over ZMQ: who may connect, and what a receiver keeps of each connection. Used by I/O threads.

A sender names its socket by its public key, so that the receiver can derive the keys of a connection from any message. It
proves by a password that it knows the receiver's key (ZMQ's PLAIN mechanism), so that others are refused before they send a
message. An eavesdropper who learns the password can connect, but its messages fail authentication.

A message's payload is sealed with the sealed header as its context. Each frame opens once. Messages of a connection that the
receiver has forgotten (`MAX_CHANNELS`) could be replayed; they then name attempts that are over.
"""

from __future__ import annotations

import hmac

import zmq

from common.security.sealing import Channel, ServerKey, client_channel, password

MAX_CHANNELS = 1024
"""Connections whose keys and latest nonces a receiver remembers."""
_NAME = b"k"
"""Prefix of socket names, which must not begin with a zero byte."""
_DOMAIN, _USER = b"kv", b"kvrelay"


def introduce(client: zmq.Socket[bytes], server_key: bytes) -> Channel:
    """Before `connect`: the client's end of a new channel to a `SealedServer`. Raises: ProtocolError if it has no such key."""
    public, channel = client_channel(server_key)
    client.routing_id = _NAME + public
    client.plain_username, client.plain_password = _USER, password(server_key)
    return channel


class SealedServer:
    """The key of one ROUTER, and the channels of its senders."""

    def __init__(self) -> None:
        self._key = ServerKey()
        self._password = password(self._key.public)
        self._channels: dict[bytes, Channel] = {}
        """By the name of the sender's socket; the one used last is the last."""

    @property
    def public_key(self) -> bytes:
        """What senders must know."""
        return self._key.public

    def guard(self, context: zmq.Context[zmq.Socket[bytes]], server: zmq.Socket[bytes]) -> None:
        """Call before `bind`: connections then wait for `admit` to check their password. `context`: the socket's own."""
        self.requests = context.socket(zmq.REP)
        """Readable when a connection waits for `admit` (ZMQ's ZAP, RFC 27)."""
        self.requests.bind("inproc://zeromq.zap.01")
        server.plain_server = True
        server.zap_domain = _DOMAIN

    def admit(self) -> None:
        """Accept or refuse all waiting connections."""
        while True:
            try:
                version, number, _, _, _, mechanism, *shown = self.requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = mechanism == b"PLAIN" and hmac.compare_digest(shown[-1], self._password)
            self.requests.send_multipart([version, number, b"200" if known else b"400", b"", b"", b""])

    def open_header(self, sender: bytes, header: bytes) -> tuple[bytes, Channel]:
        """The header of a message of the socket named `sender`, and the channel of its payload, whose context is `header`,
        and of its ack.

        Raises: ProtocolError unless it was sealed there, for this server, after all headers that were opened before.
        """
        channel = self._channels.get(sender) or self._key.channel(sender[len(_NAME) :])
        content = channel.open(header)
        self._channels.pop(sender, None)
        self._channels[sender] = channel
        if len(self._channels) > MAX_CHANNELS:
            del self._channels[next(iter(self._channels))]
        return content, channel
