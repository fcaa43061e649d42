"""Targets below the messages: TLS handshakes that go wrong, and ZMQ's own protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import ssl
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from support.zmtp import GREETING, GREETING_PLAIN, frame, hello, ready

from common.security.names import host_of
from fuzz import mutate
from kvtransfer.transports.choose import parse_offers

if TYPE_CHECKING:
    from fuzz.targets import Place

_TIMEOUT_S = 0.5


class TlsTarget:
    """Control ports of nodes that expect TLS: garbage before, in and after a handshake, none at all, no certificate."""

    name = "tls"

    def __init__(self, place: Place) -> None:
        self._nodes, self._credentials = place.nodes, place.credentials

    async def send_case(self, rng: random.Random) -> None:
        parts = urlsplit(rng.choice(self._nodes).peer.control_address)
        await asyncio.to_thread(self._run_case, rng, parts.hostname or "", parts.port or 0)

    def _run_case(self, rng: random.Random, host: str, port: int) -> None:
        with contextlib.suppress(OSError), socket.create_connection((host, port), 2) as client:
            client.settimeout(_TIMEOUT_S)
            match rng.randrange(6):
                case 0:
                    client.sendall(rng.choice([rng.randbytes(300), b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\xff\xff"]))
                    client.recv(1)
                case 1:
                    client.sendall(mutate.raw(rng, _hello()))
                    client.recv(1)
                case 2:
                    hello = _hello()
                    client.sendall(hello[: rng.randrange(len(hello))])
                    time.sleep(rng.choice([0, 0.2, _TIMEOUT_S]))
                case 3:
                    self._speak(client, _anonymous(), rng.randbytes(64))
                case 4:
                    assert self._credentials is not None
                    self._speak(client, self._credentials.for_client(), rng.randbytes(64))
                case _:
                    assert self._credentials is not None
                    secured = self._credentials.for_client().wrap_socket(client, server_hostname=host_of("node"))
                    with secured:
                        os.write(secured.fileno(), rng.choice([rng.randbytes(80), b"\x17\x03\x03\x40\x00" + bytes(99)]))
                        secured.recv(1)

    def _speak(self, client: socket.socket, context: ssl.SSLContext, data: bytes) -> None:
        with context.wrap_socket(client, server_hostname=host_of("node")) as secured:
            secured.sendall(data)
            secured.recv(1)


class ZmtpTarget:
    """Data ports: handshakes that go wrong, parts of messages that are never finished, frames cut off."""

    name = "zmtp"

    def __init__(self, place: Place) -> None:
        self._nodes = [node for node in place.nodes if node.peer.data_addresses]

    async def send_case(self, rng: random.Random) -> None:
        node = rng.choice(self._nodes)
        offers = {offer.transport: offer for offer in parse_offers(rng.choice(node.peer.data_addresses))}
        parts = urlsplit(offers["zmq"].endpoint)
        body = rng.randbytes(rng.choice([0, 1, 300, 2**16]))
        messages = b"".join(frame(body, more=rng.random() < 0.9) for _ in range(rng.choice([1, 3, 40])))
        if rng.random() < 0.3:
            messages = mutate.raw(rng, messages)
        greeting, command = GREETING, ready(rng.choice([b"DEALER", b"DEALER", b"PUB", b"x" * 200]))
        if rng.random() < 0.4:  # as ports with certificates expect
            greeting, command = GREETING_PLAIN, hello(b"kvrelay", rng.randbytes(rng.choice([0, 32, 64, 255])))
        if rng.random() < 0.3:
            greeting = mutate.raw(rng, greeting)
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
                try:
                    writer.write(greeting)
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_TIMEOUT_S):
                            await reader.readexactly(len(GREETING))
                    writer.write((command if rng.random() < 0.8 else mutate.raw(rng, command)) + messages)
                    await writer.drain()
                    await asyncio.sleep(rng.choice([0, 0.05]))
                finally:
                    writer.transport.abort()


def _anonymous() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _hello() -> bytes:
    """The first message of a handshake."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    beginning = _anonymous().wrap_bio(incoming, outgoing, server_hostname=host_of("node"))
    with contextlib.suppress(ssl.SSLWantReadError):
        beginning.do_handshake()
    return outgoing.read()
