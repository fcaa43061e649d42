"""The parts of a connection that no service shows: who listens for a disconnect, and the head of an ordinary answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from common.control.http_connection import DisconnectListener, HttpConnection

Headers = list[tuple[bytes, bytes]]
_POST = b"POST / HTTP/1.1\r\nhost: x\r\n\r\n"


class _Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.num_writes = 0
        self.is_read = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)
        self.num_writes += 1

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


def _connection(app: Any) -> HttpConnection:
    config = Config(app, log_config=None, lifespan="off", date_header=False, server_header=False)
    config.load()
    return HttpConnection(config=config, server_state=ServerState(), app_state={})


def _answer(headers: Headers, *body: bytes, request: bytes = _POST) -> bytes:
    """What a connection writes when an application answers with these headers and these parts of a body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, part in enumerate(body, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(body)})

    async def main() -> bytes:
        connection, transport = _connection(app), _Transport()
        connection.connection_made(transport)
        connection.data_received(request)
        await asyncio.sleep(0.01)
        connection.connection_lost(None)
        return transport.written

    return asyncio.run(main())


def test_an_ordinary_answer_has_its_headers_and_its_length() -> None:
    written = _answer([(b"x-a", b"1"), (b"content-length", b"2")], b"ok")
    assert written == b"HTTP/1.1 200 OK\r\nx-a: 1\r\ncontent-length: 2\r\n\r\nok"


def test_an_answer_without_a_length_is_chunked() -> None:
    written = _answer([(b"x-a", b"1")], b"ok")
    assert written == b"HTTP/1.1 200 OK\r\nx-a: 1\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


@pytest.mark.parametrize("waits", [False, True])
def test_the_head_is_sent_with_the_body_if_that_comes_at_once(waits: bool) -> None:
    transport, begun = _Transport(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if waits:
            await begun.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        connection = _connection(app)
        connection.connection_made(transport)
        connection.data_received(_POST)
        await asyncio.sleep(0.01)
        head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n"
        assert transport.written == (head if waits else head + b"ok")
        begun.set()
        await asyncio.sleep(0.01)
        assert transport.written == head + b"ok"
        assert transport.num_writes == 1 + waits
        connection.connection_lost(None)

    asyncio.run(main())


def test_a_request_with_others_behind_it_is_told_that_its_client_left() -> None:
    """uvicorn tells the last one only: the answer of the first was written to a closed connection, and logged a traceback."""
    transport, lost, received = _Transport(), asyncio.Event(), []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()  # the request
        await lost.wait()
        received.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def main() -> None:
        connection = _connection(app)
        connection.connection_made(transport)
        connection.data_received(3 * _POST)
        await asyncio.sleep(0.01)
        connection.connection_lost(ConnectionResetError())
        lost.set()
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert received == ["http.disconnect"]
    assert transport.written == b""


def test_a_connection_whose_large_body_has_arrived_is_read_on_as_its_client_may_leave() -> None:
    part = b"x" * 100_000
    transport, arrived, looked = _Transport(), asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        arrived.set()
        await looked.wait()

    async def main() -> None:
        connection = _connection(app)
        connection.connection_made(transport)
        connection.data_received(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + part)
        assert not transport.is_read
        for _ in range(2):
            while not transport.is_read:
                await asyncio.sleep(0)
            connection.data_received(part)
        await arrived.wait()
        assert transport.is_read
        looked.set()
        connection.connection_lost(None)
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_an_answer_after_which_the_connection_closes_says_so() -> None:
    assert b"connection: close" in _answer([], b"", request=b"POST / HTTP/1.0\r\n\r\n")


@pytest.mark.parametrize("body", [(b"ok",), (b"o", b"k"), (b"", b"o", b"k", b"")])
@pytest.mark.parametrize(("lengths", "lines"), [([], b""), ([(b"content-length", b"2")], b"content-length: 2\r\n")])
def test_an_old_client_gets_no_chunks(body: tuple[bytes, ...], lengths: Headers, lines: bytes) -> None:
    written = _answer(lengths, *body, request=b"POST / HTTP/1.0\r\n\r\n")
    assert written == b"HTTP/1.1 200 OK\r\n" + lines + b"connection: close\r\n\r\nok"


@pytest.mark.parametrize("value", [b"1\r\nset-cookie: a=b", b"1\nb", b"1\rb", b"1\0", b"mark\r\n", b"mark\r"])
def test_a_header_that_would_begin_another_line_is_not_sent(value: bytes) -> None:
    assert value not in _answer([(b"x-a", value)], b"ok")


def test_who_asks_after_the_client_left_is_told_at_once() -> None:
    client, told = DisconnectListener(), list[str]()
    client.leave()
    client.watch(lambda: told.append("gone"))
    assert told == ["gone"]


def test_who_stopped_listening_is_not_told() -> None:
    client, told = DisconnectListener(), list[str]()
    client.watch(lambda: told.append("gone"))
    client.watch(None)
    client.leave()
    assert not told
