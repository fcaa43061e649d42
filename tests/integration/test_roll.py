"""`kvrelay admin roll`: every service restarts while clients stream; no request fails and no token changes."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.system import System, running_system

from common.cluster.redis_server import free_port

pytestmark = pytest.mark.thorough

CLIENTS = 6
NEW_TOKENS = 40


def body(index: int) -> dict[str, Any]:
    """Prompts that are computed locally and relayed ones, greedy and sampled."""
    prompt = [5 + (7 * index + 3 * position) % 290 for position in range(20 + 30 * (index % 5))]
    sampling = {"temperature": 0.0} if index % 2 else {"temperature": 0.9, "seed": index}
    more = {"max_tokens": NEW_TOKENS, "ignore_eos": True, "stream": True, "return_token_ids": True}
    return {"prompt": prompt, **sampling, **more}


class Clients:
    """Clients that send the same requests over and over, at another router where one refuses or does not answer."""

    def __init__(self, urls: list[str], expected: dict[int, list[int]]) -> None:
        self._urls, self._expected = urls, expected
        self._end = threading.Event()
        self.wrong: list[str] = []
        self.answered = 0
        self.asked_again = 0
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(CLIENTS)]
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
        for attempt in range(6):
            try:
                return stream(self._urls[(index + attempt) % len(self._urls)], body(index))
            except (httpx.ConnectError, Refused):
                self.asked_again += 1
        raise AssertionError("refused by every router")


class Refused(Exception):
    """503 before any token."""


def stream(url: str, request: dict[str, Any]) -> list[int]:
    tokens: list[int] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=request, timeout=60) as answer:
        if answer.status_code == 503:
            raise Refused
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
    assert len(tokens) == NEW_TOKENS
    return tokens


def test_every_service_restarts_under_load_and_no_request_fails_or_changes(tmp_path: Path) -> None:
    port = free_port()
    options = ("--routers", "2", "--prefill", "2", "--decode", "2", "--kv-memory-gb", "0.05")
    with running_system(tmp_path, *options, port=port) as system:
        system.wait_usable(2, 2)
        urls = [f"http://127.0.0.1:{port + number}" for number in range(2)]
        expected = {index: stream(urls[0], body(index)) for index in range(CLIENTS)}
        before = pids(system)
        clients = Clients(urls, expected)
        try:
            rows = system.admin("roll", "--timeout", "60")
        finally:
            clients.stop()
        assert clients.wrong == []
        assert clients.answered > CLIENTS
        assert [row["role"] for row in rows] == ["decode", "decode", "prefill", "prefill", "router", "router"]
        assert all(row["now"] != row["before"] for row in rows)
        assert not set(pids(system).values()) & set(before.values())
        assert "exit code 75" in system.log_file.read_text()
        system.wait_whole()


def test_the_only_service_of_a_kind_is_not_restarted_unless_forced(tmp_path: Path) -> None:
    with running_system(tmp_path, "--kv-memory-gb", "0.05") as system:
        system.wait_usable()
        refused = system.admin("roll", code=1)
        assert "decode-0 is the only decode node of demo" in refused
        assert "is the only router" in refused
        # Decode nodes compute prompts while the only prefill node restarts.
        old = system.process("prefill")["pid"]
        [row] = system.admin("roll", "prefill-0")
        assert row["service"] == "prefill-0"
        assert system.process("prefill")["pid"] != old
        assert [row["role"] for row in system.admin("roll", "--force", "decode-0", "router")] == ["decode", "router"]
        system.wait_usable()
        assert len(stream(system.url, body(1))) == NEW_TOKENS


def pids(system: System) -> dict[str, int]:
    return {entry["name"]: entry["pid"] for entry in system.processes() if entry["role"] != "redis"}
