"""How much one router carries: requests/s and tokens/s for each second of its own processor time, and what it adds at
half of that load. A real router process, Redis, and a stub engine that computes nothing in a process of its own.

    python tests/load/router_rates.py [--quick] [--json FILE]

Rates are per second of the router's processor time, so that the client is not measured; beside them stands what came
by the clock. The router has a core of its own where there are two. Latencies are of the clock, of everything on the way,
the client and the stub included; at half of the promised rate, or of what this machine reaches at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

if __name__ == "__main__":
    _ROOT = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(_ROOT), str(_ROOT / "tests")]

import httptools
import httpx
import psutil
from load.client import run
from load.results import Result, Target, median, percentile
from load.worker import ROOT, Worker, child_env
from stub_node import make_model_folder

from common.redis_server import RedisServer, free_port

VOCAB = 4096
PROMPT_WORDS = 24
REQUESTS_GOAL = 2000.0
TOKENS_GOAL = 20_000.0
LATENCY_GOAL_MS = 5.0
_START_TIMEOUT_S = 60.0


class Refused(Exception):
    """An answer other than 200."""


@dataclass
class Connection(asyncio.Protocol):
    """One kept-alive connection that carries one request at a time."""

    _transport: asyncio.Transport | None = None
    _parser: Any = None
    _done: asyncio.Future[None] | None = None
    _status: int = 0
    events: int = 0
    first_s: float = 0.0
    """Arrival of the first bytes of the body."""
    arrivals_s: list[float] = field(default_factory=list)
    """Of every read that brought events."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

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
    """So many connections to the router."""
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Connection, "127.0.0.1", port))[1] for _ in range(count)]


@dataclass(frozen=True)
class Stack:
    """A running router and how to talk to it."""

    port: int
    process: psutil.Process

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
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload


@contextlib.contextmanager
def running(*, command: list[str] | None = None, options: tuple[str, ...] = ()) -> Iterator[Stack]:
    """Redis, stub nodes and a router, each a process. `command`: what runs instead of the plain router."""
    rng = random.Random(3)
    with RedisServer() as redis, tempfile.TemporaryDirectory(prefix="kvrelay-rates-") as temporary:
        folder = make_model_folder(Path(temporary) / "model", vocab_size=VOCAB)
        # The tokens are letters with spaces between, so that every one of them is text at once.
        tokens = [rng.randrange(80, 140) for _ in range(997)]
        service: dict[str, Any] = {
            "redis_url": redis.url,
            "model_path": str(folder),
            "vocab_size": VOCAB,
            "max_len": 16_384,
            "tokens": tokens,
        }
        stub = Worker("load.stub_service:StubService", **service)
        port = free_port()
        arguments = [*(command or [sys.executable, "-m", "common.cli"]), "router", "--port", str(port)]
        arguments += ["--log-level", "warning", "--model", str(folder), "--served-model-name", "bench", *options]
        own = {"KVRELAY_REDIS_URL": redis.url, "KVRELAY_SUPERVISOR_PID": str(os.getpid())}
        process = subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, **child_env(), **own})
        try:
            _wait_usable(port, process)
            with _apart(process.pid, stub.pid):
                yield Stack(port, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            stub.close()


@contextlib.contextmanager
def _apart(router_pid: int, stub_pid: int) -> Iterator[None]:
    """The router on one core, the stub and this process on the others; where the system can do that."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    if len(cores) < 2:
        yield
        return
    first = {min(cores)}
    for process, own in ((router_pid, first), (stub_pid, cores - first), (os.getpid(), cores - first)):
        for thread in psutil.Process(process).threads():
            os.sched_setaffinity(thread.id, own)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


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
    """As many requests as fit, one at a time per connection; per second of the router's processor time."""
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


def measure(*, quick: bool = False) -> Result:
    """All figures."""
    result = Result("router_rates")
    seconds, repeats = (1.0, 1) if quick else (4.0, 3)
    reached: dict[str, float] = {}
    with running() as stack:
        kinds: dict[str, dict[str, Any]] = {
            "requests, one token each, whole": {"connections": 32, "tokens": 1, "stream": False},
            "requests, one token each, streamed": {"connections": 32, "tokens": 1, "stream": True},
            "tokens, 16 streams of 256": {"connections": 16, "tokens": 256, "stream": True},
            "tokens, 64 streams of 256": {"connections": 64, "tokens": 256, "stream": True},
            "requests of 10 tokens, 64 streams": {"connections": 64, "tokens": 10, "stream": True},
        }
        run(closed_loop(stack, seconds=1.0, **kinds["requests of 10 tokens, 64 streams"]))
        for name, kind in kinds.items():
            runs = [run(closed_loop(stack, seconds=seconds, **kind)) for _ in range(repeats)]
            key, unit, goal = "requests_per_cpu_s", "requests/s", REQUESTS_GOAL
            if name.startswith("tokens"):
                key, unit, goal = "tokens_per_cpu_s", "tokens/s", TOKENS_GOAL
            by_clock, busy = median([r["requests_per_s"] for r in runs]), median([r["busy"] for r in runs])
            reached[name] = by_clock
            note = f"{by_clock:,.0f} requests/s by the clock, with {busy:.0%} of a core"
            if kind["tokens"] == 10:
                note += f"; {median([r['tokens_per_cpu_s'] for r in runs]):,.0f} tokens/s with them"
            value = median([r[key] for r in runs])
            result.add(f"{name}, per core", value, unit, target=Target(goal), note=note)
            result.details[name] = runs
        most = reached["requests, one token each, streamed"]
        for rate in (100.0, min(REQUESTS_GOAL, most) / 2):
            times = run(open_loop(stack, rate=rate, seconds=seconds, tokens=1))
            name = f"first token at {rate:,.0f} requests/s, p99"
            target = Target(LATENCY_GOAL_MS, at_most=True) if rate > 100 else None
            note = f"p50 {1e3 * median(times):.1f} ms; client and stub count"
            note += f"; half of {'the goal' if most >= REQUESTS_GOAL else 'what it reaches'}" if rate > 100 else ""
            result.add(name, 1e3 * percentile(times, 0.99), "ms", target=target, note=note)
            result.details[name] = {"p50_ms": 1e3 * median(times), "count": len(times)}
    return result


if __name__ == "__main__":
    figures = measure(quick="--quick" in sys.argv)
    for figure in figures.figures:
        print(f"{figure.name}: {figure.value:,.1f} {figure.unit} ({figure.note})")
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(figures.as_json(), indent=1))
