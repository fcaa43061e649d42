"""Handshakes that are never finished are bounded in time and number."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable

import pytest
from support.certificates import made

from common.control import tls_listener
from common.control.tls_listener import TlsListener
from common.security.names import host_of
from common.security.tls import Credentials


class Greets(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(b"hello")  # type: ignore[attr-defined]


def play(scene: Callable[[TlsListener, int], Awaitable[None]]) -> None:
    async def main() -> None:
        sock = socket.create_server(("127.0.0.1", 0))
        listener = TlsListener(sock, Greets, Credentials(str(made() / "node")).for_server)
        try:
            await scene(listener, sock.getsockname()[1])
        finally:
            listener.close()
            await listener.wait_closed()

    asyncio.run(asyncio.wait_for(main(), 20))


async def greeting(port: int) -> bytes:
    context = Credentials(str(made() / "router")).for_client()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=host_of("node"))
    with contextlib.closing(writer):
        return await reader.readexactly(5)


async def half_open(port: int, beginning: bytes = b"") -> asyncio.StreamReader:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(beginning)
    reader.writer = writer  # type: ignore[attr-defined]  # keeps it open
    return reader


def test_one_handshake_too_many_ends_the_oldest_and_others_still_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "MAX_HANDSHAKES", 3)

    async def scene(listener: TlsListener, port: int) -> None:
        waiting = [await half_open(port) for _ in range(8)]
        assert await greeting(port) == b"hello"
        assert len(listener.handshakes) <= 3
        for reader in waiting[:5]:
            assert await reader.read() == b"", "closed"

    play(scene)


def test_a_handshake_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 0.1)

    async def scene(listener: TlsListener, port: int) -> None:
        for beginning in (b"", b"\x16\x03\x01\x02\x00\x01"):
            assert await (await half_open(port, beginning)).read() == b""
        assert not listener.handshakes

    play(scene)


def test_a_handshake_has_one_time_limit_whenever_its_first_byte_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 1.0)

    async def scene(listener: TlsListener, port: int) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        reader = await half_open(port)
        await asyncio.sleep(0.8)
        reader.writer.write(b"\x16")  # type: ignore[attr-defined]
        assert await reader.read() == b""
        assert loop.time() - begun_s < 1.6

    play(scene)


@pytest.mark.parametrize("linger", [None, struct.pack("ii", 1, 0)], ids=["closed", "reset"])
def test_who_only_asks_whether_the_port_is_open_is_not_refused(
    linger: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    """`kvrelay admin check` does, and load balancers."""

    async def scene(listener: TlsListener, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as probe:
            if linger is not None:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        assert await greeting(port) == b"hello"
        while listener.handshakes:
            await asyncio.sleep(0.01)

    play(scene)
    assert caplog.messages == []


def test_a_server_name_that_is_no_text_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Python prints one, past all bounds of the log, where it decodes the name for a callback."""
    context = Credentials(str(made() / "router")).for_client()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=host_of("node")).do_handshake()
    hello = outgoing.read().replace(host_of("node").encode(), b"\xff" * len(host_of("node")))

    async def scene(listener: TlsListener, port: int) -> None:
        reader = await half_open(port, hello)
        await reader.read(1)
        assert await greeting(port) == b"hello"

    play(scene)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 300, b"\x00" * 20_000])
def test_what_is_no_handshake_is_closed(garbage: bytes) -> None:
    async def scene(listener: TlsListener, port: int) -> None:
        with contextlib.suppress(ConnectionError):
            await (await half_open(port, garbage)).read()
        assert await greeting(port) == b"hello"

    play(scene)
