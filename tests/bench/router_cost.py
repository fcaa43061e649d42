"""Latency that the router adds, and its throughput: a real router process before stub nodes that compute nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
from bench import client
from bench.bare_http import BareServer, events_per_s, round_trip_s
from bench.client import complete, post
from bench.direct import DirectRouter, find_nodes
from bench.results import Result, Target, median, percentile
from bench.session import Session
from bench.shape import random_prompt, random_text
from bench.worker import ROOT, Worker, child_env
from support.redis_server import RedisServer

from common.base.endpoints import free_port

_PROMPT = 512
_MAX_LEN = 16_384
_START_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class _Stack:
    url: str
    redis_url: str
    router_pid: int


def run(session: Session) -> Result:
    """Added time to first token, then relayed tokens/s."""
    result = Result("router")
    session.stop_system()
    with _running_router(session) as stack, BareServer() as bare:
        client.run(_added_ttft(session, result, stack, bare.url))
        client.run(_relayed(session, result, stack, bare.url))
    return result


async def _added_ttft(session: Session, result: Result, stack: _Stack, bare_url: str) -> None:
    nodes = await find_nodes(stack.redis_url)
    direct: list[float] = []
    routed: dict[str, list[float]] = {"text": [], "token ids": []}
    async with DirectRouter(nodes["prefill"].peer, nodes["decode"].peer) as router:
        for i in range(session.repeats(200, 20) + 5):
            ids = random_prompt(session.shape, _PROMPT, session.rng)
            first_s, _ = await router.first_token_s(ids, 2, relayed=True)
            by_ids = await _ttft(session, stack.url, ids)
            by_text = await _ttft(session, stack.url, random_text(_PROMPT, session.rng))
            if i >= 5:  # the first few warm up
                direct.append(first_s)
                routed["token ids"].append(by_ids)
                routed["text"].append(by_text)
    trips = await round_trip_s(bare_url, session.repeats(200, 20))
    result.add(
        "time to first token, stub nodes directly",
        1e3 * median(direct),
        "ms",
        note="over control links, as the router does",
    )
    for kind, times in routed.items():
        added = [a - b for a, b in zip(times, direct, strict=True)]
        result.add(
            f"added by the router, {_PROMPT} tokens of {kind}",
            1e3 * median(added),
            "ms",
            limit=1e3 * median(trips),
            limit_name="bare FastAPI round trip",
            target=Target(5, at_most=True),
            note=f"median of {len(added)} pairs; p99 {1e3 * percentile(added, 0.99):.1f} ms; new connection each",
        )
    result.details |= {"direct_s": direct, "routed_s": routed}


async def _ttft(session: Session, url: str, prompt: list[int] | str) -> float:
    return (await (await complete(url, session.model_name, prompt, 2)).wait()).ttft_s


async def _relayed(session: Session, result: Result, stack: _Stack, bare_url: str) -> None:
    """The stub sends all tokens at once, so that router and client determine the rate."""
    tokens = session.repeats(512, 64)
    router = psutil.Process(stack.router_pid)
    for streams in (16, 64):
        rates, per_cpu, bare = [], [], []
        for _ in range(session.repeats(3) + 1):
            bare.append(await events_per_s(bare_url, streams, tokens))
            cpu_s = sum(router.cpu_times()[:2])
            count, wall_s = await _burst(session, stack.url, streams, tokens)
            cpu_s = sum(router.cpu_times()[:2]) - cpu_s
            rates.append(count / wall_s)
            per_cpu.append(count / max(cpu_s, 0.01))
        rate = median(rates[1:])
        result.add(
            f"relayed, {streams} streams of {tokens}",
            rate,
            "tok/s",
            limit=median(bare[1:]),
            limit_name="bare FastAPI SSE events/s",
            target=Target(10_000),
            note=f"{median(per_cpu[1:]):,.0f} tok per second of the router's own processor time",
        )
        result.details[f"relayed {streams}"] = {"rates": rates, "per_cpu": per_cpu, "bare": bare}


async def _burst(session: Session, url: str, streams: int, tokens: int) -> tuple[int, float]:
    """(tokens, seconds) for `streams` requests sent at once."""
    body = {
        "model": session.model_name,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    opened = [
        await post(f"{url}/v1/completions", {**body, "prompt": random_prompt(session.shape, 64, session.rng)})
        for _ in range(streams)
    ]
    await asyncio.gather(*(stream.wait() for stream in opened))
    count = sum(stream.usage()["completion_tokens"] for stream in opened)
    assert count == streams * tokens, f"{count} tokens arrived, not {streams} x {tokens}"
    return count, max(s.ended_s for s in opened) - min(s.sent_s for s in opened)


@contextlib.contextmanager
def _running_router(session: Session) -> Iterator[_Stack]:
    """Redis, stub nodes and a router, each a process."""
    rng = random.Random(3)
    with RedisServer() as redis_server, contextlib.ExitStack() as stack:
        stub = Worker(
            "bench.stub_service:StubService",
            redis_url=redis_server.url,
            model_path=str(session.folder),
            vocab_size=session.shape.vocab,
            max_len=_MAX_LEN,
            tokens=[rng.randrange(256, session.shape.vocab) for _ in range(997)],
        )
        stack.callback(stub.close)
        port = free_port()
        command = [sys.executable, "-m", "kvrelay", "router", "--port", str(port), "--log-level", "warning"]
        command += ["--model", str(session.folder), "--served-model-name", session.model_name]
        own = {"KVRELAY_REDIS_URL": redis_server.url, "KVRELAY_SUPERVISOR_PID": str(os.getpid())}
        process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **child_env(), **own})
        stack.callback(_stop, process)
        url = f"http://127.0.0.1:{port}"
        _wait_usable(url, process)
        yield _Stack(url, redis_server.url, process.pid)


def _wait_usable(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the router ended with code {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            health = httpx.get(f"{url}/health", timeout=2.0).json()
            if health.get("prefill") == health.get("decode") == 1:
                return
        time.sleep(0.05)
    raise RuntimeError(f"the router saw no nodes within {_START_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
