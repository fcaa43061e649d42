"""What must stay true while a cluster is attacked: processes live, loops answer, memory is bounded, streams are right."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import httpx
import psutil

from common.control.links import Link
from common.control.messages import Message, Ping
from common.security.tls import Credentials

LAG_S = 0.1
"""A loop that computes longer than this at a time stops everyone else."""
_MEMORY_FACTOR, _MEMORY_SPARE = 1.5, 64 * 2**20
_ANSWER_S = 10.0
_RETRIES = 40
"""Times that a stream is tried again after a 503, every quarter of a second, where Redis itself is changed."""
_BODY = {"max_tokens": 24, "temperature": 0.8, "seed": 7, "ignore_eos": True, "return_token_ids": True}
_PROMPTS = ["The capital of France is", "def add(a, b):", "One, two, three,", "Once upon a time there was " * 12]


@dataclass
class Service:
    """A process and how to ask it."""

    name: str
    process: psutil.Process
    address: str
    """`http://...` of a router, `tcp://...` of a node."""
    rss_at_start: int = 0

    def cpu_s(self) -> float:
        """Processor seconds of its main thread, which runs the loop."""
        times = self.process.threads()[0]
        return times.user_time + times.system_time


@dataclass
class Watch:
    """Probes services and keeps four streams going. `problems` collects what broke."""

    url: str
    services: list[Service]
    problems: list[str] = field(default_factory=list)
    worst_lag_s: float = 0.0
    streams: int = 0
    retries: int = 0
    credentials: Credentials | None = None
    redis_changes: bool = False
    """Whether someone removes nodes from the membership: then clients may have to try again."""
    expected: dict[str, object] = field(default_factory=dict)

    async def begin(self) -> None:
        """Note what is true while nobody attacks."""
        async with httpx.AsyncClient(timeout=60) as http:
            for prompt in _PROMPTS:
                self.expected[prompt] = await self._answer(http, prompt)
        for service in self.services:
            service.rss_at_start = service.process.memory_info().rss

    async def check(self) -> None:
        """Probe every service once."""
        for service in self.services:
            if not service.process.is_running() or service.process.status() == psutil.STATUS_ZOMBIE:
                self.problems.append(f"{service.name} ended")
                continue
            rss = service.process.memory_info().rss
            if rss > _MEMORY_FACTOR * service.rss_at_start + _MEMORY_SPARE:
                self.problems.append(f"{service.name} grew from {service.rss_at_start / 1e6:.0f} to {rss / 1e6:.0f} MB")
                service.rss_at_start = rss  # once is enough
            await self._probe(service)

    async def _probe(self, service: Service) -> None:
        """A loop that answers late and has computed meanwhile was held; one that others starve has not computed."""
        before_s, started_s = service.cpu_s(), time.monotonic()
        answered = await (
            _health(service.address) if service.address.startswith("http") else _pong(service.address, self.credentials)
        )
        lag_s = min(time.monotonic() - started_s, service.cpu_s() - before_s)
        self.worst_lag_s = max(self.worst_lag_s, lag_s)
        if not answered:
            self.problems.append(f"{service.name} did not answer within {_ANSWER_S:g} s")
        elif lag_s > LAG_S:
            self.problems.append(f"{service.name}: its loop was held for {1000 * lag_s:.0f} ms")

    async def keep_streaming(self) -> None:
        """Four streams at a time, until cancelled; each must equal its twin from before."""
        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(*(self._repeat(http, prompt) for prompt in _PROMPTS))

    async def _repeat(self, http: httpx.AsyncClient, prompt: str) -> None:
        while True:
            try:
                found = await self._answer(http, prompt)
            except (httpx.HTTPError, KeyError, ValueError) as error:
                found = repr(error)[:300]
            if found != self.expected[prompt]:
                self.problems.append(f"a stream changed: {str(found)[:300]}")
                await asyncio.sleep(1)
            self.streams += 1
            await asyncio.sleep(0.05)

    async def _answer(self, http: httpx.AsyncClient, prompt: str) -> object:
        for _ in range(_RETRIES if self.redis_changes else 1):
            answer = await http.post(f"{self.url}/v1/completions", json={**_BODY, "prompt": prompt})
            if answer.status_code != 503:
                break
            self.retries += 1
            await asyncio.sleep(0.25)
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code}: {answer.text[:200]}")
        [choice] = answer.json()["choices"]
        return choice["text"], choice["finish_reason"], tuple(choice["token_ids"])


async def _health(url: str) -> bool:
    async with httpx.AsyncClient(timeout=_ANSWER_S) as http:
        try:
            return (await http.get(f"{url}/ping")).status_code == 200
        except httpx.HTTPError:
            return False


async def _pong(address: str, credentials: Credentials | None) -> bool:
    answered: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def settle(result: bool) -> None:
        if not answered.done():
            answered.set_result(result)

    def heard(_: Message) -> None:
        settle(True)

    link = Link(address, heard, lambda _: settle(False), credentials=credentials)
    link.send(Ping("fuzz-watch", 0.0))
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await answered
    except TimeoutError:
        return False
    finally:
        link.close()
