"""Bodies of 4 MB that are tokenized, six at once: the router's memory, what it keeps, and streams beside them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
from bench import client
from bench.client import Stream, complete, gaps
from bench.results import Result, Target, percentile
from bench.session import Session
from bench.worker import Worker
from support.system import System

from common.base.free_memory import resident_bytes

_AT_ONCE, _BYTES, _MB = 6, 3_900_000, 1e6
_STREAMS, _PROMPT, _TOKENS, _VOCAB = 8, 64, 1900, 2048
_RETURN_S = 30.0
_TEXTS = {"special tokens": "<|eos|>", "punctuation": "! ", "one word": "a"}


def _bodies(text: str) -> dict[str, dict[str, Any]]:
    """By path, a body whose text is as long as bodies may be."""
    text *= _BYTES // len(text)
    messages = [{"role": "user", "content": text}]
    cut = {"truncate_prompt_tokens": 100, "max_tokens": 1}
    return {
        "/tokenize": {"prompt": text, "return_token_strs": True},
        "/v1/completions": {"prompt": text, **cut},
        "/v1/chat/completions": {"messages": messages, **cut},
        "/v1/messages/count_tokens": {"messages": messages},
        "/v1/responses/input_tokens": {"input": text},
        "/api/generate": {"prompt": text, "raw": True},
    }


def run(session: Session) -> Result:
    """Peak and return of the resident memory for each address and text; p99 between the tokens of streams."""
    result = Result("hostile_bodies")
    with session.own_system("--model", "demo") as up:
        pid = up.process("router")["pid"]
        _attack(up.url, "/tokenize", {"prompt": "warm " * 50_000})
        before = peak = _resident(pid)
        for kind, text in _TEXTS.items():
            for path, body in _bodies(text).items():
                with _watching(pid) as peaks:
                    statuses = _attack(up.url, path, body)
                peak = max(peak, *peaks)
                name = f"{path} with {kind}: router's memory per byte of the bodies"
                note = f"{_resident(pid) / _MB:.0f} MB behind it; answers {sorted(set(statuses))}"
                rise = (max(peaks) - before) / (_AT_ONCE * _BYTES)
                result.add(name, rise, "x", target=Target(30, at_most=True), note=note)
        result.add("the router's memory before", before / _MB, "MB")
        result.add("its peak", peak / _MB, "MB")
        time.sleep(session.repeats(_RETURN_S, 8))
        left = (_resident(pid) - before) / _MB
        result.add(f"more than before, {_RETURN_S:.0f} s later", left, "MB", target=Target(100, at_most=True))
        with contextlib.closing(Worker("bench.hostile_bodies:Attacker")) as attacker:
            quiet, beside = client.run(_beside(session, up, attacker))
    result.add(f"p99 between tokens of {_STREAMS} streams", quiet, "ms")
    result.add("more beside the bodies", beside - quiet, "ms", target=Target(10, at_most=True))
    return result


def _resident(pid: int) -> int:
    return resident_bytes(pid) or 0


@contextlib.contextmanager
def _watching(pid: int) -> Iterator[list[int]]:
    """The process's resident memory, every few milliseconds."""
    found, done = [_resident(pid)], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            found.append(_resident(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


class Attacker:
    """Sends the bodies, in a process of its own: streams are measured in the benchmark's."""

    def attack(self, url: str, kind: str, path: str, seconds: float) -> None:
        """Send equal bodies, six at a time, for about `seconds`."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            _attack(url, path, _bodies(_TEXTS[kind])[path])


def _attack(url: str, path: str, body: dict[str, Any]) -> list[int]:
    """The statuses of equal requests sent at once."""

    async def send() -> list[int]:
        data, kind = json.dumps({"model": "demo", **body}).encode(), {"content-type": "application/json"}
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            sent = (http.post(path, content=data, headers=kind) for _ in range(_AT_ONCE))
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    return asyncio.run(send())


async def _beside(session: Session, up: System, attacker: Worker) -> tuple[float, float]:
    """p99 between tokens in ms, without the bodies (before and behind them) and beside them."""
    seconds, name = session.repeats(10, 2), "demo"
    streams: list[Stream] = []

    async def keep_streaming() -> None:
        while True:
            prompt = [session.rng.randrange(256, _VOCAB) for _ in range(_PROMPT)]
            streams.append(await complete(up.url, name, prompt, _TOKENS))
            await streams[-1].wait()

    slots = [asyncio.create_task(keep_streaming()) for _ in range(_STREAMS)]
    attack = partial(attacker.call, "attack", url=up.url, kind="punctuation", path="/tokenize", seconds=seconds)
    try:
        await asyncio.sleep(1.0)
        times_s = [time.perf_counter()]
        await asyncio.sleep(seconds / 2)
        times_s.append(time.perf_counter())
        await asyncio.to_thread(attack)
        times_s.append(time.perf_counter())
        await asyncio.sleep(seconds / 2)
        times_s.append(time.perf_counter())
    finally:
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        for stream in streams:
            stream.close()
    begun_s, from_s, until_s, ended_s = times_s
    quiet = [gap for _, gap in gaps(streams, begun_s, from_s) + gaps(streams, until_s, ended_s)]
    beside = [gap for _, gap in gaps(streams, from_s, until_s)]
    return 1e3 * percentile(quiet, 0.99), 1e3 * percentile(beside, 0.99)
