"""What a key's short requests wait for while another key takes all that it can get, on the demo model with all defaults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
from bench.results import Result, Target, median
from bench.session import Session
from support.system import System

_MOST_S, _TOKENS = 3.0, 1900
_SETTLE_S, _TIMEOUT_S = 3.0, 300.0


@dataclass(frozen=True)
class Attack:
    """What the greedy key sends: `count` requests at a time, each for `n` samples."""

    name: str
    count: int = 0
    n: int = 1


ATTACKS = (
    Attack("alone"),
    Attack("beside 128 plain requests", count=128),
    Attack("beside one of n: 128", count=1, n=128),
    Attack("beside eight of n: 128", count=8, n=128),
)


def run(session: Session) -> Result:
    """The time of whole answers of 5 tokens, one after the other, and how many requests were refused."""
    result = Result("fair_shares")
    quiet_s = 0.0
    for attack in ATTACKS:
        with session.own_system("--model", "demo", "--api-key", "greedy,modest") as up:
            waits_s, refused = asyncio.run(_measure(up, attack, session.repeats(20, 3)))
        quiet_s = quiet_s or median(waits_s)
        result.add(
            f"5 tokens of a key {attack.name}",
            median(waits_s),
            "s",
            limit=quiet_s if attack.count else None,
            limit_name="alone",
            target=Target(_MOST_S, at_most=True),
            note=f"the longest {max(waits_s):.2f} s",
        )
        result.add(f"refused {attack.name}", refused, f"of {len(waits_s)}", target=Target(0, at_most=True))
        result.details[f"waits {attack.name}, s"] = waits_s
    return result


async def _measure(up: System, attack: Attack, count: int) -> tuple[list[float], int]:
    """Seconds that each of `count` requests took, and how many were refused."""
    waits_s, refused = list[float](), 0
    async with httpx.AsyncClient(
        base_url=up.url, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None)
    ) as http:
        name = (await http.get("/v1/models", headers=_key("modest"))).json()["data"][0]["id"]
        await _ask(http, "modest", model=name, prompt="Hello", max_tokens=5)
        async with _attacking(http, name, attack):
            for number in range(count):
                began_s = time.monotonic()
                answer = await _ask(http, "modest", model=name, prompt=f"Request {number}:", max_tokens=5)
                waits_s.append(time.monotonic() - began_s)
                refused += answer.status_code != 200
    return waits_s, refused


@contextlib.asynccontextmanager
async def _attacking(http: httpx.AsyncClient, name: str, attack: Attack) -> AsyncIterator[None]:
    """The greedy key sends its requests again and again, whatever is answered."""

    async def repeat(number: int) -> None:
        while True:
            body = {"prompt": f"Story {number}:", "n": attack.n, "max_tokens": _TOKENS, "min_tokens": _TOKENS}
            answer = await _ask(http, "greedy", model=name, **body)
            if answer.status_code != 200:
                await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(repeat(number)) for number in range(attack.count)]
    try:
        await asyncio.sleep(_SETTLE_S if tasks else 0.0)
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(http: httpx.AsyncClient, key: str, **body: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={"ignore_eos": True, **body}, headers=_key(key))


def _key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
