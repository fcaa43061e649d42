"""Clients of a cluster whose services are killed all the time: each answer must equal its twin from before, and one retry
must be enough."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

_PROMPTS = ["The capital of France is", "def add(a, b):", "Once upon a time there was " * 12, "One, two, three, " * 60]
_TIMEOUT_S = 60.0
_RETRY_S = 1.0
"""Pause before the retry, twice what OpenAI's client takes."""
Answer = tuple[str, str, tuple[int, ...]]
"""Text, finish reason and token ids."""


class Failed(Exception):
    """A request got no answer: an error, or a connection that broke."""


@dataclass
class Clients:
    """Streams that run at once, spread over routers. `problems` collects what no client may see."""

    urls: list[str]
    count: int
    seed: int
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter[str])
    slowest_s: float = 0.0
    _expected: dict[str, Answer] = field(default_factory=dict)
    _bodies: list[dict[str, Any]] = field(default_factory=list)

    async def begin(self) -> None:
        """Learn the right answers, while nothing is killed."""
        for prompt in _PROMPTS:
            for sampling in ({"temperature": 0}, {"temperature": 0.9, "seed": 7}):
                for tokens in (8, 120):
                    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **sampling}
                    self._bodies.append(body)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
            for body in self._bodies:
                self._expected[json.dumps(body)] = await self._ask(http, self.urls[0], body)

    async def run(self) -> None:
        """Until cancelled."""
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as http:
            await asyncio.gather(*(self._client(http, random.Random(f"{self.seed} {n}")) for n in range(self.count)))

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while True:
            body, (first, *others) = rng.choice(self._bodies), rng.sample(self.urls, len(self.urls))
            # Half of the answers find their prompt in no cache.
            salt = {"cache_salt": f"{rng.random()}"} if rng.random() < 0.5 else {}
            began_s = time.monotonic()
            try:
                found = await self._ask(http, first, body | salt)
            except Failed as error:
                self.counts[f"retried: {error}"] += 1
                await asyncio.sleep(_RETRY_S)
                try:
                    found = await self._ask(http, (others or [first])[0], body | salt)
                except Failed as again:
                    self.problems.append(f"{time.strftime('%X')}: failed twice: {error}, then {again}")
                    continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.counts["answers"] += 1
            if found != self._expected[json.dumps(body)]:
                self.problems.append(f"{time.strftime('%X')}: altered: {body} gave {found}"[:600])

    async def _ask(self, http: httpx.AsyncClient, url: str, body: dict[str, Any]) -> Answer:
        text, reason, tokens = "", "", list[int]()
        asked = {**body, "stream": True, "return_token_ids": True}
        try:
            async with http.stream("POST", f"{url}/v1/completions", json=asked) as answer:
                if answer.status_code != 200:
                    raise Failed(f"status {answer.status_code}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Failed(f"error in the stream: {event['error'].get('code')}")
                    for choice in event["choices"]:
                        text += choice["text"]
                        tokens += choice.get("token_ids") or []
                        reason = choice["finish_reason"] or reason
        except httpx.HTTPError as error:
            raise Failed(f"connection: {type(error).__name__}") from None
        if not reason:
            raise Failed("connection: the stream ended early")
        return text, reason, tuple(tokens)
