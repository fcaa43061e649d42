"""Every listener of a service, and every kind of certificate that must not get through it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from support.certificates import made

from common.base.endpoints import connect
from common.config.service_configs import RouterConfig
from common.control.admin_server import AdminRoute, AdminServer
from common.control.links import Server
from common.node.ranks.links import RankLinks
from common.security.names import host_of
from common.security.sealed_sockets import SealedPush, introduce
from common.security.sealing import ServerKey
from common.security.tls import Credentials
from kvtransfer.transports.zmq import ZmqListener
from router.http.server import bind, http_server
from router.router import Router

WRONG = ["stranger", "expired", "revoked", "without a certificate", "in clear"]


def client_context(name: str) -> ssl.SSLContext | None:
    """What a client shows; servers are not checked here."""
    if name == "in clear":
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if name != "without a certificate":
        context.load_cert_chain(str(made() / name / "cert.pem"), str(made() / name / "key.pem"))
    return context


async def answer(port: int, context: ssl.SSLContext | None, request: bytes, name: str = "x") -> bytes:
    """What comes back for `request`."""
    async with asyncio.timeout(10):
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname=None if context is None else name
            )
        except OSError:  # ssl.SSLError is one
            return b""
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.IncompleteReadError):
            writer.write(request)
            return await reader.readexactly(4)
        return b""


@contextlib.asynccontextmanager
async def control_link() -> AsyncIterator[int]:
    server = Server("127.0.0.1", 0, lambda *_: None, Credentials(str(made() / "node")))
    yield int(server.address.rpartition(":")[2])
    await server.close()


@contextlib.asynccontextmanager
async def admin_port() -> AsyncIterator[int]:
    """Of a service that other hosts reach."""
    admin = AdminServer("0.0.0.0", 0, "token", Credentials(str(made() / "node")))
    assert admin.url.startswith("https://")
    admin.start([AdminRoute("GET", "/a", lambda _: {"a": 1})])
    yield admin.port
    await admin.close()


Listener = Callable[[], contextlib.AbstractAsyncContextManager[int]]
LISTENERS: list[Listener] = [control_link, admin_port]


async def passes(listener: Listener, name: str) -> bool:
    async with listener() as port:
        return bool(await answer(port, client_context(name), b"GET /a HTTP/1.1\r\nAuthorization: Bearer token\r\n\r\n"))


@pytest.mark.parametrize("listener", LISTENERS)
def test_a_router_gets_through(listener: Listener) -> None:
    assert asyncio.run(passes(listener, "router"))


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("listener", LISTENERS)
def test_nobody_else_gets_an_answer(listener: Listener, name: str) -> None:
    assert not asyncio.run(passes(listener, name))


# ---------------------------------------------------------------- KV and ranks: who may connect knows a key


@contextlib.asynccontextmanager
async def kv_listener() -> AsyncIterator[tuple[str, bytes, Callable[[], object]]]:
    """What arrives here would still have to open: test_sealed.py."""
    listener = ZmqListener("127.0.0.1", 0, seals=True)
    assert listener.offer.key is not None

    def arrived() -> object:
        listener.on_poll(set(), 0.0)
        return listener._router.receive(3)

    yield listener.offer.endpoint, listener.offer.key, arrived
    listener.close()


@contextlib.asynccontextmanager
async def rank_reports() -> AsyncIterator[tuple[str, bytes, Callable[[], object]]]:
    """What arrives here would still have to open: test_sockets.py."""
    secret = Credentials(str(made() / "node")).secret(b"links between ranks")
    links = RankLinks(2, "127.0.0.1", 0, secret)
    inbox = links._reports
    assert inbox._sealed is not None

    def arrived() -> object:
        inbox._sealed.admit()
        return inbox._socket.poll(0)

    yield links.address, ServerKey(secret).public, arrived
    links.close()


GuardedListener = Callable[[], contextlib.AbstractAsyncContextManager[tuple[str, bytes, Callable[[], object]]]]
GUARDED: dict[GuardedListener, tuple[int, Callable[[zmq.Socket[bytes], bytes], object]]] = {
    kv_listener: (zmq.DEALER, introduce),
    rank_reports: (zmq.PUSH, SealedPush),
}
"""The client's kind of socket, and how it uses a key."""


def other_service() -> bytes:
    return ServerKey(Credentials(str(made() / "router")).secret(b"links between ranks")).public


STRANGERS: dict[str, Callable[[], bytes | None]] = {
    "in clear": lambda: None,
    "a key that was guessed": lambda: ServerKey().public,
    "another service's key": other_service,
}


async def arrives(listener: GuardedListener, wrong: bytes | None) -> bool:
    """Whether a message with this key reaches the listener before one with the right key, which is sent afterwards."""
    context = zmq.asyncio.Context()
    kind, use = GUARDED[listener]
    async with listener() as (address, key, arrived):
        for each in (wrong, key):
            client = context.socket(kind)
            client.setsockopt(zmq.LINGER, 0)
            if each is not None:
                use(client, each)
            monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            connect(client, address)
            sending = asyncio.ensure_future(client.send_multipart([b"a", b"b"]))
            got = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    while not (got or await monitor.poll(10)):  # the listener may have to answer the handshake
                        got = bool(arrived())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10 if each == key else 0.1):
                    while not (got := got or bool(arrived())):
                        await asyncio.sleep(0.01)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            client.disable_monitor()
            client.close()
            if each != key and got:
                break
    context.destroy(linger=0)
    assert got, "the right key must get through"
    return each != key


@pytest.mark.parametrize("who", STRANGERS)
@pytest.mark.parametrize("listener", GUARDED)
def test_kv_and_reports_need_the_listeners_key(listener: GuardedListener, who: str) -> None:
    assert not asyncio.run(arrives(listener, STRANGERS[who]()))


# ---------------------------------------------------------------- clients of the HTTP API check the router


def checking(authority: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(made() / authority / "ca.pem"))
    context.load_verify_locations(str(made() / authority / "crl.pem"))
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    return context


async def public_port(shown: str, ask: Callable[[int], Awaitable[bytes]]) -> bytes:
    config = RouterConfig(ssl_certfile=str(made() / shown / "cert.pem"), ssl_keyfile=str(made() / shown / "key.pem"))
    router = Router(config)
    sock = bind("127.0.0.1", 0)
    server = http_server(router, config, None)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        return await ask(sock.getsockname()[1])
    finally:
        server.stop()
        await serving
        router.close()


PING = b"GET /ping HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize(("shown", "heard"), [("node", b"HTTP"), ("stranger", b""), ("expired", b""), ("revoked", b"")])
def test_clients_speak_only_to_a_router_with_a_valid_certificate(shown: str, heard: bytes) -> None:
    assert asyncio.run(public_port(shown, lambda port: answer(port, checking("node"), PING, host_of("node")))) == heard


def test_https_answers_nothing_in_clear() -> None:
    assert asyncio.run(public_port("node", lambda port: answer(port, None, PING))) == b""


def test_the_certificate_of_the_http_api_is_renewed_without_a_restart(tmp_path: Path) -> None:
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((made() / "expired" / name).read_bytes())
    config = RouterConfig(ssl_certfile=str(tmp_path / "cert.pem"), ssl_keyfile=str(tmp_path / "key.pem"))

    async def scene() -> list[bytes]:
        router = Router(config)
        sock = bind("127.0.0.1", 0)
        server = http_server(router, config, None)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        port = sock.getsockname()[1]
        heard = [await answer(port, checking("node"), PING, host_of("node"))]
        for name in ("key.pem", "cert.pem"):
            (tmp_path / name).write_bytes((made() / "node" / name).read_bytes())
            heard.append(await answer(port, checking("node"), PING, host_of("node")))
        server.stop()
        await serving
        router.close()
        return heard

    assert asyncio.run(scene()) == [b"", b"", b"HTTP"]
