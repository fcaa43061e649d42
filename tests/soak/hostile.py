"""A second key that takes what it can get while others stream: many samples, many requests, large bodies. Its answers do not matter."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import httpx

_TIMEOUT_S = 30.0
_LARGE_CHARS = 3_000_000


class Hostile:
    """`count` clients of one key. `counts`: answers by what was asked and their status."""

    def __init__(self, urls: Sequence[str], key: str, count: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._urls, self._key, self._count, self._seed = urls, key, count, seed

    async def run(self) -> None:
        """Until cancelled."""
        headers = {"Authorization": f"Bearer {self._key}"}
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, headers=headers) as http:
            await asyncio.gather(*(self._attack(http, random.Random(f"{self._seed} {n}")) for n in range(self._count)))

    async def _attack(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        while True:
            what, path, body = _choose(rng)
            with contextlib.suppress(httpx.HTTPError):
                answer = await http.post(rng.choice(self._urls) + path, json=body)
                self.counts[f"{what}: {answer.status_code}"] += 1
            await asyncio.sleep(0.05)


def _choose(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    text = rng.choice(["! ", "<|eos|>", "word ", "a"])
    text *= _LARGE_CHARS // len(text)
    long = {"max_tokens": 1900, "ignore_eos": True}
    return rng.choice(
        [
            ("samples", "/v1/completions", {"prompt": f"Story {rng.random()}:", "n": 128, **long}),
            ("one answer", "/v1/completions", {"prompt": f"Story {rng.random()}:", "priority": -1000, **long}),
            ("large body", "/tokenize", {"prompt": text, "return_token_strs": True}),
            ("cut body", "/v1/completions", {"prompt": text, "truncate_prompt_tokens": 50, "max_tokens": 1}),
            ("stored answer", "/v1/responses", {"input": "Hi", "max_output_tokens": 2}),
        ]
    )
