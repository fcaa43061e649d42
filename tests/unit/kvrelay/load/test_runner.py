"""Requests over real sockets: kept connections, broken servers, timeouts."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from support.load_events import USAGE, event, text_event

from kvrelay.load.outcome import RequestOutcome
from kvrelay.load.plan import LoadPlan
from kvrelay.load.runner import LoadRunner
from kvrelay.load.stream import Target
from kvrelay.load.summary import summarise
from kvrelay.load.workload import Workload

_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nx-kvrelay-prefill-mode: local\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def whole_answer() -> bytes:
    body = b"".join(b"data: " + data + b"\n\n" for data in (text_event("a"), event(choices=[], usage=USAGE), b"[DONE]"))
    return _ANSWER + chunk(body[:30]) + chunk(body[30:]) + b"0\r\n\r\n"


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    return await reader.readexactly(length)


def play(serve: Serve, scene: Callable[[str], Awaitable[None]]) -> int:
    """Run `scene` against a raw server. Returns the number of its connections."""

    async def main() -> int:
        connections = 0

        async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections
            connections += 1
            try:
                await serve(reader, writer, connections)
            except asyncio.IncompleteReadError:
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        async with server:
            await scene(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        return connections

    return asyncio.run(asyncio.wait_for(main(), 30))


def run_plan(url: str, **options: Any) -> Coroutine[Any, Any, list[RequestOutcome]]:
    async def run() -> list[RequestOutcome]:
        plan = LoadPlan(url=url, model="m", prefix_tokens=4, suffix_tokens=4, **options)
        outcomes: list[RequestOutcome] = []
        await LoadRunner(Workload(plan), 0, outcomes.append).run(time.perf_counter())
        return outcomes

    return run()


def test_connections_are_kept_and_replaced_if_the_server_closed_them() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        for _ in range(3 if connection == 1 else 100):
            assert b'"max_tokens": 32' in await read_request(reader)
            writer.write(whole_answer())

    async def scene(url: str) -> None:
        outcomes = await run_plan(url, concurrency=1, requests=10)
        assert [(o.error, o.prefill, o.cached_tokens) for o in outcomes] == [("", "local", 16)] * 10

    assert play(serve, scene) == 2


def test_server_that_dies_with_a_request_on_a_kept_connection_is_an_error() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        for number in range(3):
            await read_request(reader)
            if (connection, number) == (1, 1):
                await asyncio.sleep(0.3)
                return
            writer.write(whole_answer())

    async def scene(url: str) -> None:
        outcomes = await run_plan(url, concurrency=1, requests=3)
        assert [o.error for o in outcomes] == ["", "connection", ""]

    assert play(serve, scene) == 2


def test_broken_refused_and_endless_responses_are_counted_by_kind() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        await read_request(reader)
        if connection == 1:
            writer.write(_ANSWER + chunk(b"data: " + text_event("a") + b"\n\n"))
        elif connection == 2:
            writer.write(b"HTTP/1.1 503 no\r\nContent-Length: 4\r\nRetry-After: 1\r\nConnection: close\r\n\r\nbusy")
        elif connection == 3:
            writer.write(b"garbage\r\n\r\n")
        elif connection == 4:
            await reader.read()
        await writer.drain()

    async def scene(url: str) -> None:
        outcomes = await run_plan(url, concurrency=1, requests=4, timeout_s=2.0)
        assert [o.error for o in outcomes] == ["connection", "HTTP 503", "bad HTTP", "timeout"]

    play(serve, scene)


@pytest.mark.parametrize("turns", [1, 2])
def test_workers_pause_while_connections_are_refused(turns: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    outcomes = asyncio.run(run_plan(url, concurrency=3, duration_s=0.7, turns=turns))
    assert {o.error for o in outcomes} == {"connection"}
    assert 3 <= len(outcomes) <= 6


def test_workers_pause_after_refusals() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 503 no\r\nContent-Length: 4\r\n\r\nbusy")

    async def scene(url: str) -> None:
        outcomes = await run_plan(url, concurrency=3, duration_s=0.7)
        assert {o.error for o in outcomes} == {"HTTP 503"}
        assert 3 <= len(outcomes) <= 6

    play(serve, scene)


def test_requests_that_are_late_are_sent_while_later_ones_are_built() -> None:
    """Otherwise nothing would be sent, and Ctrl-C not be seen, until a generator that cannot keep up has built them all."""
    answered: list[RequestOutcome] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        while True:
            await read_request(reader)
            writer.write(whole_answer())

    async def scene(url: str) -> None:
        plan = LoadPlan(url=url, model="m", prefix_tokens=4, suffix_tokens=4, rate=1e5, requests=300)
        workload = Workload(plan)
        jobs, seen = workload.jobs, []

        def watched(process: int = 0) -> Any:
            for job in jobs(process):
                seen.append(len(answered))
                yield job

        workload.jobs = watched  # type: ignore[method-assign]
        await LoadRunner(workload, 0, answered.append).run(time.perf_counter())
        assert len(answered) == 300
        assert seen[-1] > 0

    play(serve, scene)


def chat_answer(**delta: object) -> bytes:
    events = (event(choices=[{"index": 0, "delta": delta}]), event(choices=[], usage=USAGE), b"[DONE]")
    return _ANSWER + chunk(b"".join(b"data: " + data + b"\n\n" for data in events)) + b"0\r\n\r\n"


def test_sessions_carry_what_the_server_answered_and_end_with_a_failed_turn() -> None:
    asked: list[dict[str, Any]] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        while True:
            body = json.loads(await read_request(reader))
            asked.append(body)
            if len(asked) == 5:
                writer.write(b"HTTP/1.1 503 no\r\nContent-Length: 4\r\n\r\nbusy")
                return
            call = {"index": 0, "id": "c", "function": {"name": "look_up", "arguments": '{"query": "x"}'}}
            calls = body["tool_choice"] == "required"
            writer.write(chat_answer(tool_calls=[call]) if calls else chat_answer(content="done"))

    async def scene(url: str) -> None:
        outcomes = await run_plan(url, concurrency=1, requests=2, turns=3, tools=True, temperature=0.5)
        assert [(o.number, o.error) for o in outcomes] == [(0, ""), (1, ""), (2, ""), (3, ""), (4, "HTTP 503")]
        assert all(o.ttft_s is not None for o in outcomes[:4])
        assert [len(body["messages"]) for body in asked] == [2, 4, 6, 2, 4]
        assert asked[1]["messages"][2]["tool_calls"][0]["id"] == "c"
        assert asked[1]["messages"][3] == {
            "role": "tool",
            "tool_call_id": "c",
            "content": asked[1]["messages"][3]["content"],
        }
        assert len({body["seed"] for body in asked}) == 5
        assert not any("ignore_eos" in body for body in asked)

    play(serve, scene)


def test_sessions_of_an_open_loop_have_all_their_turns() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        while True:
            await read_request(reader)
            writer.write(chat_answer(content="yes"))

    async def scene(url: str) -> None:
        outcomes = await run_plan(url, rate=500.0, requests=4, turns=2, think_s=0.02)
        assert sorted(o.number for o in outcomes) == list(range(8))
        assert not any(o.error for o in outcomes)

    play(serve, scene)


def test_a_connection_that_is_never_made_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(target: Target) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Target, "_connect", never)

    async def main() -> None:
        outcomes = await run_plan("http://127.0.0.1:1", concurrency=2, requests=2, timeout_s=0.05)
        assert [o.error for o in outcomes] == ["timeout"] * 2
        assert 0.0 < summarise(outcomes, None, None)["wall_s"] < 5.0

    asyncio.run(asyncio.wait_for(main(), 10))


def test_connecting_is_latency_and_no_lateness_of_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = Target._connect  # pyright: ignore[reportPrivateUsage]

    async def slowly(target: Target) -> Any:
        await asyncio.sleep(0.2)
        return await connect(target)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int) -> None:
        await read_request(reader)
        writer.write(whole_answer())

    async def scene(url: str) -> None:
        monkeypatch.setattr(Target, "_connect", slowly)
        [outcome] = await run_plan(url, rate=1000.0, requests=1)
        assert outcome.ttft_s is not None
        assert outcome.ttft_s >= 0.2 > outcome.late_s
        assert outcome.e2e_s >= 0.2

    play(serve, scene)


def test_absent_server_is_an_error_and_no_crash() -> None:
    async def main() -> None:
        outcomes = await run_plan("http://127.0.0.1:1", rate=200.0, requests=3)
        assert [o.error for o in outcomes] == ["connection"] * 3

    asyncio.run(asyncio.wait_for(main(), 10))
