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

from soak.requests import Choice, Request, requests

_TIMEOUT_S = 60.0
_RETRY_S = 1.0
"""Pause before the retry, twice what OpenAI's client takes."""
Answer = dict[int, Choice]
"""By index."""


class Failed(Exception):
    """A request got no answer: an error, or a connection that broke."""


@dataclass
class Clients:
    """Streams that run at once, spread over routers. `problems` collects what no client may see."""

    urls: list[str]
    key: str
    count: int
    seed: int
    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter[str])
    slowest_s: float = 0.0
    _expected: list[tuple[Request, Answer]] = field(default_factory=list)

    async def begin(self) -> None:
        """Learn the right answers, while nothing is killed."""
        async with self._http() as http:
            self._expected = [(request, await self._ask(http, self.urls[0], request)) for request in requests()]

    async def run(self) -> None:
        """Until cancelled."""
        async with self._http() as http:
            await asyncio.gather(*(self._client(http, random.Random(f"{self.seed} {n}")) for n in range(self.count)))

    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=_TIMEOUT_S, headers={"Authorization": f"Bearer {self.key}"})

    async def _client(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while True:
            (request, expected), (first, *others) = rng.choice(self._expected), rng.sample(self.urls, len(self.urls))
            # Half of the answers find their prompt in no cache.
            salt = {"cache_salt": f"{rng.random()}"} if rng.random() < 0.5 else {}
            asked = Request(request.path, request.body | salt)
            began_s = time.monotonic()
            try:
                found = await self._ask(http, first, asked)
            except Failed as error:
                self.counts[f"retried: {error}"] += 1
                await asyncio.sleep(_RETRY_S)
                try:
                    found = await self._ask(http, (others or [first])[0], asked)
                except Failed as again:
                    self.problems.append(f"{time.strftime('%X')}: failed twice: {error}, then {again}")
                    continue
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            self.counts["answers"] += 1
            if found != expected:
                self.problems.append(f"{time.strftime('%X')}: altered: {asked} gave {found}"[:1000])

    async def _ask(self, http: httpx.AsyncClient, url: str, request: Request) -> Answer:
        choices: Answer = {}
        body: dict[str, Any] = {**request.body, "stream": True, "return_token_ids": True}
        try:
            async with http.stream("POST", url + request.path, json=body) as answer:
                if answer.status_code != 200:
                    raise Failed(f"status {answer.status_code}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise Failed(f"error in the stream: {event['error'].get('code')}")
                    for choice in event["choices"]:
                        choices.setdefault(choice["index"], Choice()).add(choice)
        except httpx.HTTPError as error:
            raise Failed(f"connection: {type(error).__name__}") from None
        if len(choices) < request.body.get("n", 1) or not all(each.finish_reason for each in choices.values()):
            raise Failed("connection: the stream ended early")
        return choices
