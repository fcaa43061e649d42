"""A stream that has nothing to send yet says so: proxies cut connections on which nothing arrives for a minute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from support.router_bench import LONG, Bench, play

COMMENT = b": ping\n\n"
PING_S = 0.05


class Call(NamedTuple):
    """A call that streams, and what is in its pings."""

    path: str
    body: dict[str, Any]
    ping: bytes


CHAT = [{"role": "user", "content": "hi"}]
CALLS = {
    "chat": Call("/v1/chat/completions", {"messages": CHAT, "max_tokens": 3}, COMMENT),
    "completions": Call("/v1/completions", {"prompt": LONG, "max_tokens": 3}, COMMENT),
    "responses": Call("/v1/responses", {"input": "hi", "max_output_tokens": 3, "store": False}, COMMENT),
    "messages": Call("/v1/messages", {"messages": CHAT, "max_tokens": 3}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    "ollama": Call("/api/chat", {"messages": CHAT, "options": {"num_predict": 3}}, b'"content":""},"done":false}\n'),
}
EACH = pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))


@asynccontextmanager
async def streamed(bench: Bench, call: Call) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[bytes]]]:
    """The response, once its headers are there, and the parts of its body."""
    body = {"model": "stub-model", "stream": True, **call.body}
    async with (
        httpx.AsyncClient(timeout=20) as client,
        client.stream("POST", bench.stack.url + call.path, json=body) as got,
    ):
        yield got, got.aiter_raw()


@EACH
def test_a_stream_without_a_token_gets_its_headers_and_pings(model_folder: Path, call: Call) -> None:
    async def scene(bench: Bench) -> None:
        for node in (bench.prefill, bench.decode):
            node.gate.clear()
        async with streamed(bench, call) as (response, parts):
            assert response.status_code == 200
            for _ in range(3):
                assert (await anext(parts)).endswith(call.ping)
            for node in (bench.prefill, bench.decode):
                node.gate.set()
            rest = b"".join([part async for part in parts])
        last = max(rest.rfind(b'"kvrelay":{'), 0)
        assert json.loads(rest[last + 10 : rest.index(b"}", last) + 1])["decode_node"] == "d0"

    play(model_folder, scene, config={"stream_ping_s": PING_S})


@EACH
def test_a_pause_between_tokens_gets_pings_and_changes_nothing_else(model_folder: Path, call: Call) -> None:
    async def scene(bench: Bench) -> None:
        async with streamed(bench, call) as (_, parts):
            undisturbed = await _texts(parts, call)
        await bench.stack.settled()
        bench.decode.automatic = False
        async with streamed(bench, call) as (_, parts):
            read, pings = b"", 0
            while pings < 2:
                bench.decode.step() if read == b"" else None
                part = await anext(parts)
                pings += part.endswith(call.ping) and read != b""
                read += part
            stepping = asyncio.ensure_future(_steps(bench))
            rest = await _texts(parts, call, read)
            stepping.cancel()
        assert rest == undisturbed

    play(model_folder, scene, config={"stream_ping_s": PING_S})


async def _steps(bench: Bench) -> None:
    while True:
        bench.decode.step()
        await asyncio.sleep(0.001)


async def _texts(parts: AsyncIterator[bytes], call: Call, before: bytes = b"") -> str:
    """The text of the whole stream."""
    body = before + b"".join([part async for part in parts])
    text = ""
    for line in body.splitlines():
        if not line.startswith((b"data: {", b"{")):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if call.path == "/api/chat":
            text += event["message"]["content"]
        elif "choices" in event:
            text += "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in event["choices"])
        elif "delta" in event:
            text += event["delta"].get("text", "") if isinstance(event["delta"], dict) else event["delta"]
    assert text
    return text


def test_an_error_before_the_first_ping_has_its_status_and_a_later_one_is_in_the_stream(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        call = CALLS["chat"]
        bench.stack.list_nodes(bench.decode)
        await bench.stack.usable(0, 1)
        bench.decode.fail_with = ("invalid_request", "no")
        async with streamed(bench, call) as (response, _):
            assert response.status_code == 400
        bench.decode.fail_with = None
        bench.decode.automatic = False
        async with streamed(bench, call) as (response, parts):
            assert await anext(parts) == COMMENT
            bench.decode.fail(next(iter(bench.decode.running)), "invalid_request", "no")
            rest = b"".join([part async for part in parts])
            assert response.status_code == 200
        *_, failure, done, _end = rest.removeprefix(COMMENT).split(b"\n\n")
        assert json.loads(failure.removeprefix(b"data: "))["error"]["message"] == "no"
        assert done == b"data: [DONE]"

    play(model_folder, scene, config={"stream_ping_s": 1.0})


def test_without_pings_nothing_is_sent_before_the_first_token(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        for node in (bench.prefill, bench.decode):
            node.gate.clear()

        async def read() -> bytes:
            async with streamed(bench, CALLS["chat"]) as (_, parts):
                return b"".join([part async for part in parts])

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0.2)
        for node in (bench.prefill, bench.decode):
            node.gate.set()
        assert COMMENT not in await reading

    play(model_folder, scene, config={"stream_ping_s": 0})


def test_the_official_client_ignores_pings(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        for node in (bench.prefill, bench.decode):
            node.gate.clear()
        create: Any = bench.client.chat.completions.create
        stream = await create(model="stub-model", messages=CHAT, max_tokens=3, stream=True)  # has got the headers
        await asyncio.sleep(3 * PING_S)
        for node in (bench.prefill, bench.decode):
            node.gate.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    play(model_folder, scene, config={"stream_ping_s": PING_S})
