"""Client functions of the benchmarks over `kvrelay.load.stream`: exact completions, and their decode rates."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from kvrelay.load import stream as load_stream
from kvrelay.load.stream import RequestFailed, Target, run

__all__ = ["RequestFailed", "Stream", "complete", "decode_rate", "gaps", "gaps_of", "post", "run"]


class Stream(load_stream.Stream):
    """A stream that can be waited for, on a connection of its own."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self.first = asyncio.Event()

    def feed(self, body: bytes, arrived_s: float) -> None:
        super().feed(body, arrived_s)
        if self.events:
            self.first.set()

    def finish(self, error: RequestFailed | None) -> None:
        super().finish(error)
        self.first.set()
        if self.connection is not None:
            self.connection.close()

    async def wait(self, timeout_s: float = 600.0) -> Stream:
        """Wait until the response is complete. Raises: RequestFailed, TimeoutError."""
        return await self._wait(self.ended, timeout_s)

    async def wait_first(self, timeout_s: float = 600.0) -> Stream:
        """Wait for the first event. Raises: RequestFailed, TimeoutError."""
        return await self._wait(self.first, timeout_s)

    async def _wait(self, event: asyncio.Event, timeout_s: float) -> Stream:
        async with asyncio.timeout(timeout_s):
            await event.wait()
        if self.error is not None:
            raise self.error
        return self

    def token_times(self) -> list[tuple[float, int]]:
        """(arrival, number of tokens) of all events with tokens; needs `return_token_ids`.

        Events from the same read are one arrival: no client could have seen the first of them earlier.
        Raises: RequestFailed for an error event.
        """
        times: list[tuple[float, int]] = []
        for arrived, data in self.events:
            event = json.loads(data)
            if "error" in event:
                raise RequestFailed(str(event["error"]), "stream")
            count = sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))
            if count and times and times[-1][0] == arrived:
                times[-1] = (arrived, times[-1][1] + count)
            elif count:
                times.append((arrived, count))
        return times

    def usage(self) -> dict[str, Any]:
        """The usage of the last event that has one; {} if none has."""
        return next((usage for _, data in reversed(self.events) if (usage := json.loads(data).get("usage"))), {})

    @property
    def ttft_s(self) -> float:
        """Time from sending the request to the first event with tokens."""
        return self.token_times()[0][0] - self.sent_s


async def post(url: str, body: Mapping[str, Any]) -> Stream:
    """Send `body` as JSON on a new connection; the response arrives in the background."""
    parts = urlsplit(url)
    target = Target(f"{parts.scheme}://{parts.netloc}")
    stream = Stream(target.stream(parts.path, body).request)
    await target.send(stream)
    return stream


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
