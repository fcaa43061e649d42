"""Capacity of one router: requests/s and tokens/s per second of its own processor time, and the latency that it adds at
half of that load. A real router process, Redis, and a stub engine without computation in the client's process.

    scripts/bench-router --only rates [--quick] [--json FILE]

Rates are per second of the router's processor time, so that the client is not measured; wall-clock rates are shown too.
The router has its own core if there are two. Latencies are wall-clock times of the whole path, client and stub included.
The latency of a bare streaming endpoint under the same client is shown with them; the difference is added by the router.

The goals are those of a machine on which a bare FastAPI endpoint answers 9,700 requests/s on one core. The same endpoint
is measured here before and after the router: `speed` is the current speed of this machine relative to that one. The
router's rate is also shown as a share of that endpoint's. Latencies are measured at half of the promised rate times
`speed` and compared with the promised ones divided by `speed`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import httpx
import psutil
from bench.bare_http import BareServer
from bench.client import run
from bench.results import Result, Target, median, percentile
from bench.stub_service import stub_nodes
from bench.worker import ROOT, child_env
from support.redis_server import RedisServer
from support.stub_node import make_model_folder

from common.base.endpoints import free_port

VOCAB = 4096
PROMPT_WORDS = 24
REQUESTS_GOAL = 2000.0
TOKENS_GOAL = 20_000.0
LATENCY_GOAL_MS = 5.0
BARE_THERE = 9700.0
"""Requests/s per core of a bare FastAPI endpoint on the machine for which the goals are set."""
_START_TIMEOUT_S = 60.0


class Refused(Exception):
    """An answer other than 200."""


@dataclass
class Connection(asyncio.Protocol):
    """One keep-alive connection with one request at a time."""

    _transport: asyncio.Transport | None = None
    _parser: Any = None
    _done: asyncio.Future[None] | None = None
    _status: int = 0
    events: int = 0
    first_s: float = 0.0
    """Arrival of the first bytes of the body."""
    arrivals_s: list[float] = field(default_factory=list)
    """Arrival of every read that contained events."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    @property
    def closed(self) -> bool:
        """The server closed the connection, as it does after some idle seconds."""
        return self._transport is None or self._transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the router hung up: {exc}"))

    def on_body(self, body: bytes) -> None:
        self.arrivals_s.append(time.perf_counter())
        self.events += body.count(b"data: ")

    def on_message_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    async def post(self, request: bytes) -> float:
        """Send a request, wait for its whole answer; seconds to its first bytes."""
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.events, self.arrivals_s = 0, []
        sent_s = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(60):
            await self._done
        if self._status != 200:
            raise Refused(f"the router answered {self._status}")
        return self.arrivals_s[0] - sent_s

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def connect(port: int, count: int) -> list[Connection]:
    """Open this many connections to the router."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(count)]


@dataclass(frozen=True)
class Stack:
    """A running router and how to talk to it."""

    port: int
    process: psutil.Process
    path: str = "/v1/completions"

    def cpu_s(self) -> float:
        """Processor time that the router has used so far."""
        times = self.process.cpu_times()
        return times.user + times.system

    def request(self, prompt: str, max_tokens: int, *, stream: bool) -> bytes:
        """A completion as bytes of HTTP."""
        body = {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
            "seed": 1,
        }
        payload = json.dumps(body).encode()
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


@contextlib.asynccontextmanager
async def running(*, command: list[str] | None = None, options: tuple[str, ...] = ()) -> AsyncIterator[Stack]:
    """Redis and a router, each a process, and stub nodes on this loop. `command`: runs instead of the plain router.

    The stub shares the client's loop: two processes on one core would wait milliseconds for each other.
    """
    rng = random.Random(3)
    with RedisServer() as redis, tempfile.TemporaryDirectory(prefix="kvrelay-rates-") as temporary:
        folder = make_model_folder(Path(temporary) / "model", vocab_size=VOCAB)
        # The tokens are letters separated by spaces, so that each of them is text at once.
        tokens = [rng.randrange(80, 140) for _ in range(997)]
        service: dict[str, Any] = {
            "redis_url": redis.url,
            "model_path": str(folder),
            "vocab_size": VOCAB,
            "max_len": 16_384,
            "tokens": tokens,
        }
        port = free_port()
        arguments = [*(command or [sys.executable, "-m", "kvrelay"]), "router", "--port", str(port)]
        arguments += ["--log-level", "warning", "--model", str(folder), "--served-model-name", "bench", *options]
        own = {"KVRELAY_REDIS_URL": redis.url, "KVRELAY_SUPERVISOR_PID": str(os.getpid())}
        process = subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, **child_env(), **own})
        try:
            async with stub_nodes(**service):
                await asyncio.to_thread(_wait_usable, port, process)
                with _apart(process.pid), _no_pauses():
                    yield Stack(port, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _no_pauses() -> Iterator[None]:
    """Disable the client's garbage collector, which would stop the client and the stub for a quarter of a second."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def _apart(server_pid: int) -> Iterator[None]:
    """Pin the server to one core and this process to the others, if the system supports it."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if len(cores) < 2:
        yield
        return
    _pin(server_pid, {min(cores)})
    _pin(os.getpid(), cores - {min(cores)})
    try:
        yield
    finally:
        _pin(os.getpid(), cores)


def _pin(pid: int, cores: set[int]) -> None:
    for thread in psutil.Process(pid).threads():
        os.sched_setaffinity(thread.id, cores)


def _wait_usable(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with code {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            health = httpx.get(f"http://127.0.0.1:{port}/health", timeout=2.0).json()
            if health.get("prefill") == health.get("decode") == 1:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the router saw no nodes within {_START_TIMEOUT_S:.0f} s")


def prompts(count: int) -> list[str]:
    """Short texts, all different."""
    rng = random.Random(11)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "again"]
    return [" ".join(rng.choices(words, k=PROMPT_WORDS)) for _ in range(count)]


async def closed_loop(stack: Stack, *, connections: int, seconds: float, tokens: int, stream: bool) -> dict[str, float]:
    """As many requests as possible, one at a time per connection; rate per second of the router's processor time."""
    opened = await connect(stack.port, connections)
    texts = itertools.cycle([stack.request(text, tokens, stream=stream) for text in prompts(500)])
    for connection in opened:
        await connection.post(next(texts))
    began_s, cpu_s = time.perf_counter(), stack.cpu_s()
    done = 0

    async def client(connection: Connection) -> None:
        nonlocal done
        while time.perf_counter() - began_s < seconds:
            await connection.post(next(texts))
            done += 1

    await asyncio.gather(*map(client, opened))
    wall_s, cpu_s = time.perf_counter() - began_s, stack.cpu_s() - cpu_s
    for connection in opened:
        connection.close()
    return {
        "requests_per_cpu_s": done / cpu_s,
        "tokens_per_cpu_s": done * tokens / cpu_s,
        "requests_per_s": done / wall_s,
        "busy": cpu_s / wall_s,
    }


async def open_loop(stack: Stack, *, rate: float, seconds: float, tokens: int) -> list[float]:
    """Poisson arrivals of streamed requests; seconds from each one's due time to its first bytes, infinite if refused."""
    rng = random.Random(5)
    idle = await connect(stack.port, 64)
    opened = list(idle)
    texts = itertools.cycle([stack.request(text, tokens, stream=True) for text in prompts(500)])
    found: list[float] = []
    tasks: list[asyncio.Task[None]] = []

    async def one(due_s: float) -> None:
        while idle and idle[-1].closed:
            idle.pop()
        if not idle:
            idle.extend(await connect(stack.port, 8))
            opened.extend(idle[-8:])
        connection = idle.pop()
        late_s = time.perf_counter() - due_s
        try:
            found.append(late_s + await connection.post(next(texts)))
        except Refused:
            found.append(math.inf)
        idle.append(connection)

    began_s = due_s = time.perf_counter()
    while due_s - began_s < seconds:
        due_s += rng.expovariate(rate)
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(due_s)))
    await asyncio.gather(*tasks)
    for connection in opened:
        connection.close()
    return found


KINDS: dict[str, dict[str, Any]] = {
    "requests, one token each, whole": {"connections": 32, "tokens": 1, "stream": False},
    "requests, one token each, streamed": {"connections": 32, "tokens": 1, "stream": True},
    "tokens, 16 streams of 256": {"connections": 16, "tokens": 256, "stream": True},
    "tokens, 64 streams of 256": {"connections": 64, "tokens": 256, "stream": True},
    "requests of 10 tokens, 64 streams": {"connections": 64, "tokens": 10, "stream": True},
}


def measure(*, quick: bool = False) -> Result:
    """All figures."""
    return run(_measure(Result("router_rates"), *((1.0, 1) if quick else (4.0, 3))))


async def _measure(result: Result, seconds: float, repeats: int) -> Result:
    before = await _bare_rate(seconds)
    async with running() as stack:
        await closed_loop(stack, seconds=1.0, **KINDS["requests of 10 tokens, 64 streams"])
        reached = {name: await _rate(result, stack, name, seconds, repeats) for name in KINDS}
        speed = before / BARE_THERE
        loads = {"": 100.0, ", half of the goal times this machine's speed": REQUESTS_GOAL / 2 * min(1.0, speed)}
        latencies = {load: await _latencies(stack, rate, seconds, repeats) for load, rate in loads.items()}
    bare = (before + await _bare_rate(seconds)) / 2
    speed = bare / BARE_THERE
    result.add(
        "a bare FastAPI endpoint, per core", bare, "requests/s", limit=BARE_THERE, limit_name="the goals' machine"
    )
    for name, rate in reached.items():
        if "one token" in name:
            share = Target(REQUESTS_GOAL / BARE_THERE, of_share=True)
            result.add(name, rate, "requests/s", limit=bare, limit_name="the bare endpoint", target=share)
    with _bare_server() as stack:
        await open_loop(stack, rate=100.0, seconds=1.0, tokens=1)
        for load, rate in loads.items():
            without = await _latencies(stack, rate, seconds, repeats)
            _add_latency(result, rate, load, latencies[load], without, min(1.0, speed))
    return result


@contextlib.contextmanager
def _bare_server(path: str = Stack.path) -> Iterator[Stack]:
    with BareServer() as bare, _apart(bare.pid), _no_pauses():
        yield Stack(urlsplit(bare.url).port or 0, psutil.Process(bare.pid), path)


async def _bare_rate(seconds: float) -> float:
    """Requests/s of processor time of an endpoint that answers a small JSON object."""
    with _bare_server("/bare") as stack:
        await closed_loop(stack, connections=32, seconds=seconds / 4, tokens=1, stream=False)
        return (await closed_loop(stack, connections=32, seconds=seconds, tokens=1, stream=False))["requests_per_cpu_s"]


async def _rate(result: Result, stack: Stack, name: str, seconds: float, repeats: int) -> float:
    """One kind of load; requests/s of processor time."""
    kind = KINDS[name]
    runs = [await closed_loop(stack, seconds=seconds, **kind) for _ in range(repeats)]
    key, unit, goal = "requests_per_cpu_s", "requests/s", REQUESTS_GOAL
    if name.startswith("tokens"):
        key, unit, goal = "tokens_per_cpu_s", "tokens/s", TOKENS_GOAL
    by_clock, busy = median([r["requests_per_s"] for r in runs]), median([r["busy"] for r in runs])
    note = f"{by_clock:,.0f} requests/s by the clock, with {busy:.0%} of a core"
    if kind["tokens"] == 10:
        note += f"; {median([r['tokens_per_cpu_s'] for r in runs]):,.0f} tokens/s with them"
    result.add(f"{name}, per core", median([r[key] for r in runs]), unit, target=Target(goal), note=note)
    result.details[name] = runs
    return median([r["requests_per_cpu_s"] for r in runs])


async def _latencies(stack: Stack, rate: float, seconds: float, repeats: int) -> list[list[float]]:
    """Several runs, because another process that takes the core for a moment spoils one of them."""
    return [await open_loop(stack, rate=rate, seconds=seconds, tokens=1) for _ in range(repeats)]


def _add_latency(
    result: Result, rate: float, load: str, times: list[list[float]], without: list[list[float]], speed: float
) -> None:
    """The router's addition to the time to first token, at the median and at the 99th percentile."""
    name = f"added to the first token at {rate:,.0f} requests/s{load}"
    found = {q: [[1e3 * percentile(run, q / 100) for run in runs] for runs in (times, without)] for q in (50, 99)}
    shown = {f"p{q:g}": (median(with_ms), median(without_ms)) for q, (with_ms, without_ms) in found.items()}
    for quantile, (with_ms, without_ms) in shown.items():
        target = Target(LATENCY_GOAL_MS / speed, at_most=True) if load and quantile == "p99" else None
        note = f"{with_ms:.1f} ms with the router, client and stub; {without_ms:.1f} ms of a bare streaming endpoint"
        result.add(f"{name}, {quantile}", with_ms - without_ms, "ms", target=target, note=note)
    result.details[name] = {"ms": shown, "runs_ms": found, "count": sum(map(len, times))}
