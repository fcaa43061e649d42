"""Clients' connections to the router, byte by byte."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from support.router_bench import Bench, play

UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"
"""What Java's HttpClient and `curl --http2` send along."""


def request(prompt: str, headers: bytes = b"", *, max_tokens: int = 2) -> bytes:
    body = json.dumps({"model": "stub-model", "prompt": prompt, "max_tokens": max_tokens}).encode()
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"%bcontent-length: %d\r\n\r\n%b" % (headers, len(body), body)
    )


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(5):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head.split()[1]), await reader.readexactly(length)


@pytest.mark.parametrize("cut_at", [0, -5, -60, 25])
def test_an_offer_of_http2_is_ignored_and_the_request_served(model_folder: Path, cut_at: int) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        offering = request("hi", UPGRADE)
        for data in (offering, request("hi"), offering):
            for part in (data[:cut_at], data[cut_at:]):
                writer.write(part)
                await asyncio.sleep(0.01)
            status, body = await answer(reader)
            assert status == 200, body
        writer.write(offering * 2)
        assert [(await answer(reader))[0] for _ in range(2)] == [200, 200]
        writer.close()
        assert len(bench.decode.requests()) == 5

    play(model_folder, scene)


@pytest.mark.parametrize("connection", [b"upgrade, close", b"close\r\nconnection: upgrade"])
def test_who_offers_http2_and_closes_is_answered(model_folder: Path, connection: bytes) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        writer.write(request("hi", b"connection: %b\r\nupgrade: h2c\r\n" % connection))
        assert (await answer(reader))[0] == 200
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()

    play(model_folder, scene)


def test_connect_is_refused_whatever_else_it_offers(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        for headers in (b"", UPGRADE):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
            writer.write(b"CONNECT x:1 HTTP/1.1\r\nhost: 127.0.0.1\r\n" + headers + b"\r\n")
            assert (await answer(reader))[0] == 400
            writer.close()

    play(model_folder, scene)


UNFINISHED = {
    "nothing": [b""],
    "half a head": [b"POST /v1/comp"],
    "half a head after an answer": [request("hi"), b"POST /v1/comp"],
    "a body after its refusal": [b"GET /nothing HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 3\r\n\r\n", b"abc"],
}


@pytest.mark.parametrize("parts", UNFINISHED.values(), ids=list(UNFINISHED))
def test_a_connection_without_a_request_is_closed(model_folder: Path, parts: list[bytes]) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        for part in parts:
            writer.write(part)
            if part.endswith((b"}", b"\r\n")):
                await answer(reader)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()

    play(model_folder, scene, config={"idle_connection_timeout_s": 0.3})


def test_a_connection_is_kept_while_its_request_is_answered(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.decode.gate.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        writer.write(request("hi"))
        await asyncio.sleep(0.5)
        bench.decode.gate.set()
        assert (await answer(reader))[0] == 200
        writer.close()

    play(model_folder, scene, config={"idle_connection_timeout_s": 0.2})


def test_requests_sent_ahead_are_answered_in_order(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        writer.write(b"".join(request("hi", max_tokens=count) for count in range(1, 21)))
        for count in range(1, 21):
            body = json.loads((await answer(reader))[1])
            assert body["usage"]["completion_tokens"] == count
        writer.close()

    play(model_folder, scene)


BROKEN_BODY = b"POST /nothing HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (BROKEN_BODY, [400]),
        (request("hi") + b"nonsense\r\n\r\n", [200]),
        (request("hi") * 2 + b"nonsense\r\n\r\n", [200, 200]),
        (request("hi") + BROKEN_BODY, []),
    ],
    ids=["body", "after a request", "after two requests", "body of a second request"],
)
def test_what_is_no_http_is_refused_once_after_the_requests_before_it(
    model_folder: Path, caplog: pytest.LogCaptureFixture, sent: bytes, statuses: list[int]
) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        writer.write(sent)
        assert [(await answer(reader))[0] for _ in statuses] == statuses
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()

    play(model_folder, scene)
    assert not [record for record in caplog.records if record.exc_info]


ENDLESS = {
    "line": [b"GET /"],
    "header": [b"GET / HTTP/1.1\r\nx: "],
    "header after an answer": [request("hi"), b"GET / HTTP/1.1\r\nx: "],
    "trailer": [
        b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx: "
    ],
}


@pytest.mark.parametrize("parts", ENDLESS.values(), ids=list(ENDLESS))
def test_a_head_without_end_is_not_kept(model_folder: Path, parts: list[bytes]) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        for part in parts:
            writer.write(part)
            if part.endswith(b"}"):
                await answer(reader)
        with suppress(ConnectionError):
            await _flood(writer)
            head = await asyncio.wait_for(reader.read(), 5)
            assert head.startswith(b"HTTP/1.1 431 ")
        writer.close()

    play(model_folder, scene)


async def _flood(writer: asyncio.StreamWriter) -> None:
    for _ in range(100):
        writer.write(b"a" * 65_536)
        await writer.drain()
        await asyncio.sleep(0.001)


def test_a_large_head_is_refused_with_words(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        writer.write(b"GET / HTTP/1.1\r\n")
        for _ in range(66):
            writer.write(b"x: %b\r\n" % (b"a" * 1000))
            await asyncio.sleep(0.001)
        assert (await answer(reader))[0] == 431
        writer.close()

    play(model_folder, scene)


TOO_LARGE = (
    b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: 900000000000\r\n\r\n"
)


def test_a_refused_client_that_still_sends_reads_its_refusal(model_folder: Path) -> None:
    """Closed with bytes of it unread, the connection would be reset, and its answer lost."""

    async def scene(bench: Bench) -> None:
        for start, status in ((b"GET / HTTP/1.1\r\nx: ", 431), (b"nonsense\r\n", 400), (TOO_LARGE, 413)):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
            writer.write(start + b"a" * 100_000)
            for _ in range(5):
                await asyncio.sleep(0.01)
                writer.write(b"a" * 65_536)
                await writer.drain()
            assert (await answer(reader))[0] == status
            assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    play(model_folder, scene)


def test_a_body_too_large_by_its_length_is_refused_before_it_is_sent(model_folder: Path) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: %b\r\n%bcontent-length: 900000000000\r\n\r\n"

    async def scene(bench: Bench) -> None:
        for kind, more, status in (
            (b"application/json", b"", 413),
            (b"application/json", b"expect: 100-continue\r\n", 413),
            (b"text/plain", b"", 415),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
            writer.write(head % (kind, more))
            assert (await answer(reader))[0] == status
            if more:  # the client may send its next request instead of the body
                assert await asyncio.wait_for(reader.read(), 5) == b""
            writer.close()

    play(model_folder, scene)


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        (b"/v1/completions", b"", 401),
        (b"/v1/messages", b"", 401),
        (b"/v1/models", b"authorization: bearer k\r\n", 405),
        (b"/v1/completions/", b"authorization: bearer k\r\n", 307),
    ],
)
def test_an_answer_that_needs_no_body_does_not_wait_for_the_one_that_was_announced(
    model_folder: Path, path: bytes, key: bytes, status: int
) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\n%bexpect: 100-continue\r\ncontent-length: 80\r\n\r\n" % (path, key)

    async def scene(bench: Bench) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", bench.stack.port)
        writer.write(head)
        assert (await answer(reader))[0] == status
        assert await asyncio.wait_for(reader.read(), 5) == b"", "the client sends its next request elsewhere"
        writer.close()

    play(model_folder, scene, config={"api_key": "k"}, api_key="k")
