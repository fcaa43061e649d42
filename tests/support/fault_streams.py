"""The clients of the fault matrix: sixteen streams of every kind, what each received, and how answers are compared.

A `Stream` behaves like OpenAI's client: when the connection breaks or the server answers 5xx, it retries at the next
router; its last answer counts. Runs on the test's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

STREAMS = 16
NEW_TOKENS = 110
LOGPROB_TOLERANCE = 1e-4
_STOP_AT = 60
"""A stream with a stop string or token ends after about this many tokens."""
_REPEAT_S = 0.25

Body = dict[str, Any]


@dataclass
class Answer:
    """The last answer of one client."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[dict[str, float]] = field(default_factory=list)
    """Per token: every token shown with its log-probability; the drawn one as "drawn" too."""
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    done: bool = False


@dataclass
class Stream:
    """One client and its request."""

    body: Body
    router: str
    answer: Answer = field(default_factory=Answer)
    repeats: int = 0
    errors: list[str] = field(default_factory=list)
    decode_node: str = ""
    prefill_node: str = ""
    times_s: list[float] = field(default_factory=list)
    """Arrival times of tokens, by the monotonic clock."""

    @property
    def chat(self) -> bool:
        return "messages" in self.body

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time without a token, from `since_s` until the last token."""
        points = [since_s, *(time_s for time_s in self.times_s if time_s > since_s)]
        return max((b - a for a, b in itertools.pairwise(points)), default=0.0)


class Crowd:
    """All concurrent streams of one run. `changed` is set whenever one of them received something."""

    def __init__(self, streams: list[Stream], urls: dict[str, str], *, timeout_s: float) -> None:
        self.streams = streams
        self.changed = asyncio.Event()
        self._urls = urls
        self._timeout_s = timeout_s

    async def run(self) -> None:
        """Wait until every client has its answer. Raises: TimeoutError."""
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(self._timeout_s), limits=limits, trust_env=False) as client,
            asyncio.timeout(self._timeout_s),
        ):
            await asyncio.gather(*(self._follow(client, stream) for stream in self.streams))

    async def _follow(self, client: httpx.AsyncClient, stream: Stream) -> None:
        routers = sorted(self._urls, key=lambda name: name != stream.router)
        while not await self._ask(client, stream, self._urls[routers[stream.repeats % len(routers)]]):
            stream.repeats += 1
            await asyncio.sleep(_REPEAT_S)
        self.changed.set()

    async def _ask(self, client: httpx.AsyncClient, stream: Stream, url: str) -> bool:
        stream.answer = Answer()
        path = "/v1/chat/completions" if stream.chat else "/v1/completions"
        try:
            async with client.stream("POST", url + path, json=stream.body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    assert response.status_code >= 500, f"{response.status_code}: {text}"
                    stream.errors.append(f"{response.status_code}: {text}")
                    return False
                stream.decode_node = response.headers["x-kvrelay-decode-node"]
                stream.prefill_node = response.headers.get("x-kvrelay-prefill-node", "")
                async for line in response.aiter_lines():
                    if line.startswith("data: "):
                        error = self._take(stream, line[6:])
                        if error is not None:
                            stream.errors.append(error)
                            return False
        except httpx.TransportError as error:
            stream.errors.append(repr(error))
            return False
        return stream.answer.done

    def _take(self, stream: Stream, data: str) -> str | None:
        """One event; the error that it carries, if any."""
        answer = stream.answer
        if data == "[DONE]":
            answer.done = True
            return None
        event = json.loads(data)
        if "error" in event:
            return str(event["error"])
        assert not answer.done, "nothing comes after [DONE]"
        answer.usage = event.get("usage") or answer.usage
        for choice in event["choices"]:
            tokens = choice.get("token_ids") or []
            if tokens:
                stream.times_s.append(time.monotonic())
            answer.tokens += tokens
            answer.text += (choice["delta"].get("content") or "") if stream.chat else choice["text"]
            if choice.get("logprobs"):
                answer.logprobs += _logprobs(choice["logprobs"])
            if choice["finish_reason"] is not None:
                assert answer.finish_reason is None, "a stream ends once"
                answer.finish_reason, answer.stop_reason = choice["finish_reason"], choice["stop_reason"]
        self.changed.set()
        return None


def _logprobs(found: dict[str, Any]) -> list[dict[str, float]]:
    if "content" in found:
        return [
            {"drawn": entry["logprob"], **{top["token"]: top["logprob"] for top in entry["top_logprobs"]}}
            for entry in found["content"]
        ]
    pairs = zip(found["token_logprobs"], found["top_logprobs"], strict=True)
    return [{"drawn": drawn, **top} for drawn, top in pairs]


# ---------------------------------------------------------------- the workload


def bodies(vocab_size: int, model: str) -> list[Body]:
    """Sixteen requests: half greedy, half sampled; some with log-probabilities, penalties or grammars, and one of a single
    token.

    `add_stops` adds stop strings and tokens to some of them.
    """
    draw = random.Random(7)
    made: list[Body] = []
    for n in range(STREAMS):
        ids = [draw.randrange(3, vocab_size) for _ in range(90 + 55 * n)]
        chat, logprobs = n % 4 == 3, n % 4 in (0, 3)
        body: Body = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        body |= {"max_tokens": NEW_TOKENS - (n % 3), "ignore_eos": True, "return_token_ids": True}
        if n % 2:
            body |= {"temperature": 0.9, "seed": 4000 + n}
            body |= [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.02}][n % 8 // 2]
        else:
            body["temperature"] = 0
        if chat:
            body["messages"] = [{"role": "user", "content": "".join(chr(97 + i % 26) for i in ids)}]
        else:
            body["prompt"] = ids
        if logprobs:
            body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        if n % 8 in (4, 5):
            body |= {"presence_penalty": 0.6, "frequency_penalty": 0.4}
        if n in (8, 11):
            body |= {"repetition_penalty": 1.3}
        if n == 2:
            body["max_tokens"] = 1
        if n in GRAMMARS:
            body["structured_outputs"] = {"regex": GRAMMARS[n]}
        made.append(body)
    return made


GRAMMARS = {
    1: r"( w1\d\d( w177 w188)? w2\d\d)+",
    14: r"( w[12]\d\d){200}",
    15: r"( w(14\d|200)( w155 w166 w177){1,3})+",
}
"""Regular expressions of some answers; some words are forced, and none of them ends within an answer."""


STOP_STRING = (6, 7, 12)
STOP_TOKEN = (9, 10)


def add_stops(made: list[Body], answers: Sequence[Answer], pieces: Sequence[str]) -> list[Body]:
    """The same requests, some with a stop string or token that ends them in the middle of their previous answer.

    `pieces`: the text of each token id.
    """
    stopped = [dict(body) for body in made]
    for n in STOP_STRING:
        first, second = answers[n].tokens[_STOP_AT : _STOP_AT + 2]
        stopped[n]["stop"] = [pieces[first] + pieces[second][:1]]
        stopped[n]["min_tokens"] = _STOP_AT // 2
    for n in STOP_TOKEN:
        stopped[n]["stop_token_ids"] = [answers[n].tokens[_STOP_AT + n]]
        stopped[n]["min_tokens"] = _STOP_AT // 3
    return stopped


def salted(made: list[Body], salt: str) -> list[Body]:
    """The same requests with prompts that no cache holds yet."""
    return [{**body, "cache_salt": salt} for body in made]


def make_streams(made: list[Body], routers: Sequence[str]) -> list[Stream]:
    """One client per request, assigned to the routers in turn."""
    return [Stream(body, routers[n % len(routers)]) for n, body in enumerate(made)]


# ---------------------------------------------------------------- comparing


def difference(expected: Answer, got: Answer, *, asked_again: bool = False) -> str:
    """The differences between two answers; empty if there are none.

    `asked_again`: a repeated request may find blocks of the first one in a cache.
    """
    if asked_again and got.usage is not None:
        got = replace(
            got, usage={**got.usage, "prompt_tokens_details": (expected.usage or {})["prompt_tokens_details"]}
        )
    if got.tokens != expected.tokens:
        pairs = zip(expected.tokens, got.tokens, strict=False)
        where = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected.tokens), len(got.tokens)))
        return (
            f"token {where} of {len(expected.tokens)}: {expected.tokens[where : where + 3]} became "
            f"{got.tokens[where : where + 3]} ({len(got.tokens)} tokens)"
        )
    for name in ("text", "usage", "finish_reason", "stop_reason", "done"):
        if getattr(got, name) != getattr(expected, name):
            return f"{name}: {getattr(expected, name)!r} became {getattr(got, name)!r}"
    if len(got.logprobs) != len(expected.logprobs):
        return f"{len(expected.logprobs)} log-probabilities became {len(got.logprobs)}"
    for i, (a, b) in enumerate(zip(expected.logprobs, got.logprobs, strict=True)):
        if a.keys() != b.keys() or any(abs(a[key] - b[key]) > LOGPROB_TOLERANCE for key in a):
            return f"log-probabilities at {i}: {a} became {b}"
    return ""
