"""A text of 100,000 characters that is parsed and tokenized twice a second: what it does to streams of the same router."""

from __future__ import annotations

import asyncio
import time

import httpx
from bench import client
from bench.client import Stream, complete, gaps
from bench.results import Result, Target, median, percentile
from bench.session import Session

_STREAMS, _PROMPT, _TOKENS, _VOCAB = 8, 64, 1900, 2048
_CHARACTERS, _EVERY_S = 100_000, 0.5


def run(session: Session) -> Result:
    """p99 between the tokens of 8 streams of the demo model, with the texts and without, in turns."""
    result = Result("long_text")
    with session.own_system("--model", "demo") as up:
        pairs = [client.run(_pair(session, up.url)) for _ in range(session.repeats(7, 1))]
    quiet, beside = ([pair[n] for pair in pairs] for n in (0, 1))
    result.add(f"p99 between tokens of {_STREAMS} streams, demo model", median(quiet), "ms")
    result.add(f"the same beside {_CHARACTERS:,} characters every {_EVERY_S} s", median(beside), "ms")
    result.add(
        "more beside the texts, median of pairs",
        median([pair[1] - pair[0] for pair in pairs]),
        "ms",
        target=Target(5, at_most=True),
        note=f"{len(pairs)} pairs; the longest gap beside them {max(pair[2] for pair in pairs):.1f} ms",
    )
    result.details["p99 quiet, p99 beside texts, longest beside texts, ms"] = pairs
    return result


async def _pair(session: Session, url: str) -> tuple[float, float, float]:
    """p99 without the texts, p99 with them, and the longest gap with them, in ms. Two quiet halves around the others:
    contexts grow meanwhile."""
    seconds = session.repeats(10, 1)
    name = str(httpx.get(f"{url}/v1/models", timeout=10).json()["data"][0]["id"])
    streams: list[Stream] = []
    slots = [asyncio.create_task(_keep_streaming(session, url, name, streams)) for _ in range(_STREAMS)]
    try:
        await asyncio.sleep(1.0)
        begun_s = time.perf_counter()
        await asyncio.sleep(seconds / 2)
        from_s = time.perf_counter()
        await _send_texts(url, name, from_s + seconds)
        until_s = time.perf_counter()
        await asyncio.sleep(seconds / 2)
        ended_s = time.perf_counter()
    finally:
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        for stream in streams:
            stream.close()
    quiet = [gap for _, gap in gaps(streams, begun_s, from_s) + gaps(streams, until_s, ended_s)]
    beside = [gap for _, gap in gaps(streams, from_s, until_s)]
    return 1e3 * percentile(quiet, 0.99), 1e3 * percentile(beside, 0.99), 1e3 * max(beside)


async def _keep_streaming(session: Session, url: str, name: str, streams: list[Stream]) -> None:
    """One stream after the other, until cancelled: the demo model's context is short."""
    while True:
        prompt = [session.rng.randrange(256, _VOCAB) for _ in range(_PROMPT)]
        streams.append(await complete(url, name, prompt, _TOKENS))
        await streams[-1].wait()


async def _send_texts(url: str, name: str, until_s: float) -> None:
    words = "the quick brown fox jumps over the lazy dog and then again "
    async with httpx.AsyncClient(timeout=30) as sender:
        number = 0
        while (began_s := time.perf_counter()) < until_s:
            number += 1
            text = f"{number} " + words * (_CHARACTERS // len(words))
            answer = await sender.post(f"{url}/tokenize", json={"model": name, "prompt": text})
            answer.raise_for_status()
            await asyncio.sleep(max(0.0, began_s + _EVERY_S - time.perf_counter()))
