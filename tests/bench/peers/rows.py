"""The rows of the comparison: each measures one served system, with the same client and the same prompts for all."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench import client
from bench.client import Stream, complete, gaps_of
from bench.peers.arrivals import answered_until, arrival_times, check_length, decode_rate
from bench.peers.systems import MAX_TOKENS, MODEL_NAME
from bench.results import median, percentile
from bench.shape import Shape, random_prompt

from kvrelay.load.outcome import RequestOutcome, read_outcome
from kvrelay.load.stream import RequestFailed

TTFT_PROMPTS = (512, 2048)
BATCH, BATCH_PROMPT, BATCH_TOKENS = 16, 256, 128
STREAMS, STREAM_PROMPT = 8, 256
LONG_PROMPT, LONG_EVERY_S, LONG_COUNT = 4032, 2.0, 10
_SINGLE_PROMPT, _SINGLE_TOKENS = 64, 129
_QUIET_S, _LATE_S = 8.0, 30.0

Figures = dict[str, float]
"""By the keys of `report.LINES`; times in seconds."""


@dataclass(frozen=True)
class Probe:
    """A served system, and what to send to it."""

    url: str
    shape: Shape
    rng: random.Random
    quick: bool = False

    def count(self, full: int, quick: int) -> int:
        """A number of tokens, requests or seconds."""
        return quick if self.quick else full

    async def ask(self, prompt_tokens: int, output_tokens: int) -> Stream:
        """Send a prompt that nobody has seen."""
        prompt = random_prompt(self.shape, prompt_tokens, self.rng)
        return await complete(self.url, MODEL_NAME, prompt, output_tokens)

    async def answer(self, prompt_tokens: int, output_tokens: int) -> RequestOutcome:
        """The same, and wait for the whole answer. Raises: RequestFailed, TimeoutError."""
        stream = await (await self.ask(prompt_tokens, output_tokens)).wait()
        return check_length(read_outcome(0, stream, 0.0), output_tokens)

    async def burst(self, output_tokens: int) -> list[RequestOutcome]:
        """`BATCH` requests at once."""
        return list(await asyncio.gather(*(self.answer(BATCH_PROMPT, output_tokens) for _ in range(BATCH))))


def warm_up(probe: Probe) -> None:
    """What a first request costs belongs to no figure. Raises: RequestFailed, TimeoutError."""
    client.run(_warm_up(probe))


async def _warm_up(probe: Probe) -> None:
    await probe.answer(probe.count(max(TTFT_PROMPTS), 64), 4)
    await probe.burst(probe.count(8, 2))


def one_stream(probe: Probe) -> Figures:
    """Decode rate of a single stream."""
    return {"one_stream": decode_rate(client.run(probe.answer(_SINGLE_PROMPT, probe.count(_SINGLE_TOKENS, 17))))}


def ttft(probe: Probe) -> Figures:
    """Time to first token with nothing else running."""

    async def median_ttft(tokens: int) -> float:
        outcomes = [await probe.answer(tokens, 2) for _ in range(probe.count(3, 1))]
        return median([outcome.ttft_s or math.nan for outcome in outcomes])

    return {f"ttft_{tokens}": client.run(median_ttft(tokens)) for tokens in TTFT_PROMPTS}


def batch(probe: Probe) -> Figures:
    """A burst with one token each, then one with all: the first is the prefill, the difference the decode."""
    tokens = probe.count(BATCH_TOKENS, 16)
    prefill_s = _span_s(client.run(probe.burst(1)))
    outcomes = client.run(probe.burst(tokens))
    whole_s = _span_s(outcomes)
    itls = [gap for _, gap in gaps_of([arrival_times(o) for o in outcomes], 0.0, math.inf)]
    decode_s = whole_s - prefill_s
    return {
        "batch": BATCH * tokens / whole_s,
        "batch_prefill": BATCH * BATCH_PROMPT / prefill_s,
        "batch_decode": BATCH * (tokens - 1) / decode_s if decode_s > 0 else math.nan,
        "batch_itl_p50": median(itls),
        "batch_itl_p99": percentile(itls, 0.99),
    }


def _span_s(outcomes: list[RequestOutcome]) -> float:
    return max(o.ended_s for o in outcomes) - min(o.sent_s for o in outcomes)


def interference(probe: Probe) -> Figures:
    """Running streams, quiet and then with long prompts arriving."""
    return client.run(_interference(probe))


async def _interference(probe: Probe) -> Figures:
    count = probe.count(LONG_COUNT, 2)
    quiet = [(await probe.answer(LONG_PROMPT, 2)).ttft_s or math.nan for _ in range(probe.count(2, 1))]
    streams = await asyncio.gather(*(probe.ask(STREAM_PROMPT, MAX_TOKENS - STREAM_PROMPT) for _ in range(STREAMS)))
    try:
        await asyncio.gather(*(stream.wait_first() for stream in streams))
        await asyncio.sleep(1.0)  # the last of them has joined the batch
        begun_s = time.perf_counter()
        await asyncio.sleep(probe.count(int(_QUIET_S), 2))
        loaded_s = time.perf_counter()
        until_s = loaded_s + count * LONG_EVERY_S
        prompts = await asyncio.gather(*(_arrive(probe, i * LONG_EVERY_S, until_s + _LATE_S) for i in range(count)))
        await asyncio.sleep(max(0.0, until_s - time.perf_counter()))
        if any(stream.ended.is_set() for stream in streams):
            raise RequestFailed("a running stream ended before the measurement did", "length")
    finally:
        for stream in streams:
            stream.close()
    arrivals = [arrival_times(read_outcome(0, stream, 0.0)) for stream in streams]
    ttfts = [math.inf if o is None or o.ttft_s is None else o.ttft_s for o in prompts]
    quiet_itl = percentile([gap for _, gap in gaps_of(arrivals, begun_s, loaded_s)], 0.99)
    disturbed_itl = percentile([gap for _, gap in gaps_of(arrivals, loaded_s, until_s)], 0.99)
    quiet_ttft, loaded_ttft = median(quiet), sorted(ttfts)[len(ttfts) // 2]
    return {
        "itl_p99_quiet": quiet_itl,
        "itl_p99_disturbed": disturbed_itl,
        "itl_p99_growth": disturbed_itl / quiet_itl,
        "answered": answered_until(prompts, until_s) / count,
        "long_ttft_quiet": quiet_ttft,
        "long_ttft": loaded_ttft,
        "long_ttft_growth": loaded_ttft / quiet_ttft,
    }


async def _arrive(probe: Probe, after_s: float, deadline_s: float) -> RequestOutcome | None:
    """None if the request failed or was not answered by the deadline."""
    await asyncio.sleep(after_s)
    try:
        async with asyncio.timeout(max(0.0, deadline_s - time.perf_counter())):
            return await probe.answer(LONG_PROMPT, 2)
    except (RequestFailed, TimeoutError):
        return None


ROWS: dict[str, Callable[[Probe], Figures]] = {
    "one_stream": one_stream,
    "ttft": ttft,
    "batch": batch,
    "interference": interference,
}
_NO_INTERFERENCE = ("one_stream", "ttft", "batch")
ROWS_OF_SHAPE = {"0.5b": _NO_INTERFERENCE, "4b-moe": _NO_INTERFERENCE, "33m": tuple(ROWS), "tiny": tuple(ROWS)}
"""Prompts of 4,032 tokens every two seconds are more than the larger shapes can serve on a few cores."""
