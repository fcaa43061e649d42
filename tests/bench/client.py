"""Client functions of the benchmarks over `kvrelay.load.stream`: exact completions, and their decode rates."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from kvrelay.load.stream import RequestFailed, Stream, post, run

__all__ = ["RequestFailed", "Stream", "complete", "decode_rate", "gaps", "gaps_of", "post", "run"]


async def complete(url: str, model: str, prompt: list[int] | str, max_tokens: int) -> Stream:
    """A streamed greedy completion of exactly `max_tokens` tokens, their ids with them."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return await post(f"{url}/v1/completions", body)


def gaps(streams: list[Stream], since_s: float = 0.0, until_s: float = float("inf")) -> list[tuple[float, float]]:
    """(arrival, seconds since the one before) for everything with tokens that arrived in [since, until)."""
    return gaps_of([[arrived for arrived, _ in stream.token_times()] for stream in streams], since_s, until_s)


def gaps_of(arrivals: Iterable[list[float]], since_s: float, until_s: float) -> list[tuple[float, float]]:
    """The same for the arrival times of each stream."""
    return [(b, b - a) for times in arrivals for a, b in itertools.pairwise(times) if since_s <= b < until_s]


def decode_rate(stream: Stream) -> float:
    """Tokens/s after the first event."""
    times = stream.token_times()
    return sum(count for _, count in times[1:]) / (times[-1][0] - times[0][0])
