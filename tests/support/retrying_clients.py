"""Clients that repeat the same streamed requests, and ask another router if one refuses or does not answer."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx

CLIENTS = 6
NEW_TOKENS = 40


def body(index: int) -> dict[str, Any]:
    """Prompts that are computed locally and relayed ones, greedy and sampled."""
    prompt = [5 + (7 * index + 3 * position) % 250 for position in range(20 + 30 * (index % 5))]
    sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "seed": index}
    more = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return {"prompt": prompt, **sampling, **more}


class Clients:
    """Runs `count` of them until `stop`; `wrong` says what went wrong, other tokens than `expected` included."""

    def __init__(self, urls: list[str], expected: dict[int, list[int]], count: int = CLIENTS) -> None:
        self._urls, self._expected = urls, expected
        self._end = threading.Event()
        self.wrong: list[str] = []
        self.answered = 0
        self.asked_again = 0
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()

    def _run(self, index: int) -> None:
        while not self._end.is_set():
            try:
                tokens = self._ask(index)
            except Exception as error:
                self.wrong.append(f"{index}: {error!r}")
                return
            if self._expected.setdefault(index, tokens) != tokens:
                self.wrong.append(f"{index}: other tokens")
            self.answered += 1

    def _ask(self, index: int) -> list[int]:
        for attempt in range(12):
            try:
                return stream(self._urls[(index + attempt) % len(self._urls)], body(index))
            except Refused:
                self.asked_again += 1
                time.sleep(0.1)
        raise AssertionError("refused by every router")


class Refused(Exception):
    """Status 503 or no answer: nothing was received, so another router may be asked."""


def stream(url: str, request: dict[str, Any]) -> list[int]:
    """The answer's tokens. Raises: Refused; AssertionError if the answer breaks off."""
    tokens: list[int] = []
    with httpx.Client(timeout=60, trust_env=False) as client:
        sent = client.build_request("POST", f"{url}/v1/completions", json=request)
        try:
            answer = client.send(sent, stream=True)
        except httpx.TransportError as error:
            raise Refused(repr(error)) from None
        if answer.status_code == 503:
            raise Refused("503")
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    assert len(tokens) == NEW_TOKENS
    return tokens
