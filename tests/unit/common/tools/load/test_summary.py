"""From streams to figures: what one answer says, what a run amounts to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rich.console import Console

from common.tools.load import show
from common.tools.load.outcome import Outcome, read_outcome
from common.tools.load.plan import LoadPlan, Workload
from common.tools.load.runner import Runner
from common.tools.load.stream import RequestFailed, Stream, Target
from common.tools.load.summary import distribution, percentile, summarise

USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}


def event(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def text_event(text: str) -> bytes:
    return event(choices=[{"index": 0, "text": text}])


def stream_of(*events: tuple[float, bytes], status: int = 200, done: bool = True) -> Stream:
    stream = Stream(b"")
    stream.status, stream.sent_s, stream.done = status, 10.0, done
    stream.events = list(events)
    stream.ended_s = 11.0
    stream.ended.set()
    return stream


def test_latencies_are_of_events_with_tokens_only() -> None:
    stream = stream_of(
        (10.1, event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])),
        (10.2, event(choices=[{"index": 0, "delta": {"content": "a"}}])),
        (10.5, event(choices=[{"index": 0, "delta": {"content": "b"}}])),
        (10.5, event(choices=[{"index": 0, "delta": {"content": "c"}}])),
        (10.9, event(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])),
        (10.9, event(choices=[], usage=USAGE)),
    )
    stream.headers = {"x-kvrelay-prefill-mode": "relayed", "x-kvrelay-decode-node": "d0", "x-kvrelay-attempt": "2"}
    outcome = read_outcome(5, stream, start_s=9.0)
    assert outcome.error == ""
    assert outcome.ttft_s == pytest.approx(0.2)
    assert outcome.itl_s == pytest.approx([0.3, 0.0])
    assert (outcome.prompt_tokens, outcome.cached_tokens, outcome.output_tokens) == (40, 16, 3)
    assert outcome.tpot_s == pytest.approx(0.4)
    assert (outcome.sent_s, outcome.e2e_s) == pytest.approx((1.0, 1.0))
    assert (outcome.prefill, outcome.decode_node, outcome.attempts) == ("relayed", "d0", 2)


def test_the_end_of_a_stream_says_how_it_was_served_in_the_end() -> None:
    served = {"prefill_mode": "local", "decode_node": "d1", "attempt": 2, "relayed_bytes": 7}
    stream = stream_of((10.2, text_event("a")), (10.9, event(choices=[], usage=USAGE, kvrelay=served)))
    stream.headers = {
        "x-kvrelay-prefill-mode": "relayed",
        "x-kvrelay-prefill-node": "p0",
        "x-kvrelay-decode-node": "d0",
    }
    outcome = read_outcome(0, stream, 0.0)
    assert (outcome.prefill, outcome.prefill_node, outcome.decode_node) == ("local", "", "d1")
    assert (outcome.attempts, outcome.relayed_bytes) == (2, 7)


def test_a_stream_that_breaks_off_or_carries_an_error_is_an_error() -> None:
    broken = stream_of((10.2, text_event("a")), done=False)
    assert read_outcome(0, broken, 0.0).error == "incomplete"
    failed = stream_of((10.2, text_event("a")), (10.3, event(error={"code": "overloaded", "message": "no"})))
    assert read_outcome(0, failed, 0.0).error == "stream: overloaded"
    assert read_outcome(0, stream_of((10.2, b"{")), 0.0).error == "bad event"
    refused = stream_of(status=429)
    refused.error = RequestFailed("HTTP 429: busy", "HTTP 429")
    assert read_outcome(0, refused, 0.0).error == "HTTP 429"


@pytest.mark.parametrize(("data", "end"), [(b"data: ", b"\n\n"), (b"data:", b"\r\n\r\n")])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_every_server_s_way_of_writing_events_is_understood(data: bytes, end: bytes, size: int) -> None:
    body = b"".join(data + event + end for event in (text_event("a"), text_event("b"), b"[DONE]"))
    body = b": ping - 12:00:00" + end + body
    stream = stream_of(done=False)
    for at in range(0, len(body), size):
        stream.feed(body[at : at + size], 10.0 + at)
    outcome = read_outcome(0, stream, 0.0)
    assert (outcome.error, len(outcome.itl_s)) == ("", 1)


def test_percentiles_lie_between_values() -> None:
    assert percentile([1.0], 99) == 1.0
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 50) == 3.0
    assert percentile([0.0, 10.0], 90) == pytest.approx(9.0)
    assert distribution([]) is None


def outcome(number: int, *, ttft: float = 0.1, tpot: float = 0.01, error: str = "", cached: int = 0) -> Outcome:
    made = Outcome(number, sent_s=float(number), error=error, detail=f"{error} detail" if error else "")
    made.ttft_s, made.output_tokens = ttft, 11
    made.ended_s = made.sent_s + ttft + 10 * tpot
    made.itl_s = [tpot] * 10
    made.prompt_tokens, made.cached_tokens, made.prefill = 100, cached, "local"
    return made


def test_summary_counts_rates_hits_errors_and_goodput() -> None:
    outcomes = [
        outcome(0),
        outcome(1, ttft=3.0),
        outcome(2, tpot=0.2),
        outcome(3, cached=60),
        outcome(4, error="timeout"),
    ]
    summary = summarise(outcomes, slo_ttft_s=1.0, slo_tpot_s=0.1)
    assert (summary["requests"], summary["succeeded"], summary["errors"]) == (5, 4, {"timeout": 1})
    assert summary["error_rate"] == pytest.approx(0.2)
    assert summary["first_errors"] == ["timeout detail"]
    assert summary["hit_rate"] == pytest.approx(60 / 400)
    assert summary["within_slo"] == pytest.approx(2 / 5)
    assert summary["wall_s"] == pytest.approx(4.2)
    assert summary["goodput_per_s"] == pytest.approx(2 / 4.2, abs=1e-3)
    assert summary["output_tokens"] == 44
    assert summary["ttft_s"]["max"] == 3.0
    assert summary["prefill"] == {"local": 4}
    console = Console(width=120, record=True, quiet=True)
    console.print(show.report(summary, left_out=2))


def test_a_run_in_which_nothing_succeeded_has_a_summary_too() -> None:
    summary = summarise([outcome(0, error="connection")], None, None)
    assert (summary["ttft_s"], summary["hit_rate"], summary["requests_per_s"]) == (None, None, 0.0)
    Console(quiet=True).print(show.report(summary, left_out=0))
    assert summarise([], None, None)["error_rate"] == 0.0


# ---------------------------------------------------------------- the client over real sockets

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
    """Run `scene` against a raw server; how many connections it got."""

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


def run_plan(url: str, **options: Any) -> Awaitable[list[Outcome]]:
    async def run() -> list[Outcome]:
        plan = LoadPlan(url=url, model="m", prefix_tokens=4, suffix_tokens=4, **options)
        outcomes: list[Outcome] = []
        await Runner(plan, Workload(plan), 0, outcomes.append).run(time.perf_counter())
        return outcomes

    return run()


def test_connections_are_kept_and_one_that_the_server_closed_is_replaced() -> None:
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


def test_server_that_breaks_off_refuses_or_never_ends_is_counted_by_kind() -> None:
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
        outcomes = await run_plan(url, concurrency=1, requests=4, timeout_s=0.3)
        assert [o.error for o in outcomes] == ["connection", "HTTP 503", "bad HTTP", "timeout"]

    play(serve, scene)


def test_a_connection_that_never_comes_about_is_a_timeout_within_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(target: Target) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(Target, "_connect", never)

    async def main() -> None:
        outcomes = await run_plan("http://127.0.0.1:1", concurrency=2, requests=2, timeout_s=0.05)
        assert [o.error for o in outcomes] == ["timeout"] * 2
        assert 0.0 < summarise(outcomes, None, None)["wall_s"] < 5.0

    asyncio.run(asyncio.wait_for(main(), 10))


def test_nobody_there_is_an_error_and_no_crash() -> None:
    async def main() -> None:
        outcomes = await run_plan("http://127.0.0.1:1", rate=200.0, requests=3)
        assert [o.error for o in outcomes] == ["connection"] * 3

    asyncio.run(asyncio.wait_for(main(), 10))


def test_url_must_be_one() -> None:
    with pytest.raises(ValueError, match="URL"):
        Target("127.0.0.1:8000")
