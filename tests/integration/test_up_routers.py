"""`kvrelay up --routers 2` with the demo model: two equal routers; the death of one affects only its own clients."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.system import System, running_system, wait_until

PROMPT = list(range(300, 400))
"""More tokens than a decode node prefills itself."""
LONG = 500
"""Tokens of an answer that is still streaming when a router is killed."""


@pytest.fixture
def routers(tmp_path: Path, ports_in_a_row: Callable[[int], list[int]]) -> Iterator[list[System]]:
    """The same system seen through each of its two routers."""
    port = ports_in_a_row(2)[0]
    with running_system(tmp_path, "--routers", "2", "--kv-memory-gb", "0.05", port=port) as system:
        both = [system, dataclasses.replace(system, url=f"http://127.0.0.1:{port + 1}")]
        for each in both:
            each.wait_usable()
        yield both
        for each in both:
            each.wait_whole()


def body(max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}


def text(system: System, max_tokens: int = LONG) -> str:
    answer = httpx.post(f"{system.url}/v1/completions", json=body(max_tokens), timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


@contextlib.contextmanager
def streaming(system: System) -> Iterator[Iterator[str]]:
    """The pieces of a long answer, as they arrive."""
    url = f"{system.url}/v1/completions"
    with httpx.stream("POST", url, json=body(LONG, stream=True), timeout=30) as answer:
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {"))
        yield (choice["text"] for event in events for choice in json.loads(event)["choices"])


def processes(system: System) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in system.processes()}


def test_two_routers_answer_alike_and_one_keeps_serving_while_the_other_restarts(routers: list[System]) -> None:
    first, second = routers
    before = processes(first)
    assert list(before) == ["redis", "router-0", "router-1", "prefill-0", "decode-0"]
    assert [before[name]["address"] for name in ("router-0", "router-1")] == [first.url, second.url]
    assert f"kvrelay is ready at {first.url}, {second.url} (" in first.log_file.read_text()
    for each, name in ((first, "router-0"), (second, "router-1")):
        assert first.admin("router", "--url", each.url)["pid"] == before[name]["pid"]

    expected, short = text(first), text(first, 4)
    assert text(second) == expected
    with streaming(first) as lost, streaming(second) as kept:
        begun = next(lost), next(kept)
        os.kill(before["router-0"]["pid"], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lost)
        assert begun[1] + "".join(kept) == expected

    def is_back() -> bool:
        assert text(second, 4) == short
        router = processes(first).get("router-0")
        return router is not None and router["pid"] != before["router-0"]["pid"] and router["address"] == first.url

    wait_until(is_back, 20, "router-0 is started again and ready")
    first.wait_usable(timeout_s=10)
    assert text(first) == expected
    after = processes(first)
    assert first.admin("router", "--url", first.url)["pid"] == after["router-0"]["pid"]
    assert {name: entry["pid"] for name, entry in after.items() if name != "router-0"} == {
        name: entry["pid"] for name, entry in before.items() if name != "router-0"
    }
