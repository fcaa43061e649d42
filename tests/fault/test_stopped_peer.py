"""A decode node that hangs while prompts are on their way to it: the prefill node's engine goes on serving the other one.

Tests of the transports check that a hanging rendezvous or payload blocks no other transfer (`transports/test_collective.py`,
`transports/test_processes.py`); this test uses the whole system.
"""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.oracle import first_difference, greedy, make_tiny
from support.system import System, running_system, wait_until

MODEL = "llama"
NEW_TOKENS = 16
REQUESTS = 8
ENGINE_AGE_S = 5.0
"""An engine that waited for the stopped node would make no progress until the node continues."""


def prompts(seed: int) -> list[list[int]]:
    return [[3 + (seed + 11 * n + 5 * i) % 240 for i in range(60 + n)] for n in range(REQUESTS)]


def ask(system: System, prompt: list[int]) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{system.url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60.0)


def ask_all(system: System, model: Path, seed: int) -> None:
    with ThreadPoolExecutor(REQUESTS) as pool:
        answers = list(pool.map(lambda prompt: ask(system, prompt), prompts(seed)))
    for prompt, answer in zip(prompts(seed), answers, strict=True):
        assert answer.status_code == 200, answer.text
        tokens = answer.json()["choices"][0]["token_ids"]
        assert first_difference(greedy(model, prompt, NEW_TOKENS), tokens) is None


def check_relays_are_told(system: System, transport: str) -> None:
    """Admin output and metrics name the transport, the pair of ranks, and the same bytes at both ends."""
    sums: dict[str, int] = {"prefill": 0, "decode": 0}
    for node in system.admin("nodes")["nodes"]:
        relays = system.admin("node", node["node_id"])["node"]["relays"]
        assert {relay["transport"] for relay in relays} <= {transport}
        assert all(relay["why"] and relay["peer"] and relay["transfers"] for relay in relays)
        sums[node["role"]] += sum(relay["bytes"] for relay in relays)
    assert sums["prefill"] >= sums["decode"] > 0
    wait_until(
        lambda: system.metric("kvrelay_relay_bytes_total", role="prefill", transport=transport) == sums["prefill"],
        10,
        "the metrics say the same",
    )


@pytest.mark.parametrize("transport", ["collective", "shm"])
def test_decode_node_that_hangs_stops_no_engine_but_its_own(transport: str, tmp_path: Path) -> None:
    model = make_tiny(MODEL, tmp_path / MODEL)
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "300", "--local-prefill-tokens", "0")
    with running_system(tmp_path, *args, "--decode", "2", "--kv-transport", transport) as system:
        system.wait_usable(decode=2)
        ages: list[float] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.2):
                ages.append(system.metric("kvrelay_node_step_age_seconds", role="prefill"))

        watcher = threading.Thread(target=watch)
        watcher.start()
        system.kill("decode", 1, signal.SIGSTOP)
        try:
            ask_all(system, model, seed=1)
        finally:
            done.set()
            watcher.join()
            system.kill("decode", 1, signal.SIGCONT)
        assert ages
        assert max(ages) < ENGINE_AGE_S, "the prefill node's engine waited for the node that hung"
        system.wait_usable(decode=2)
        ask_all(system, model, seed=2)
        check_relays_are_told(system, {"collective": "gloo"}.get(transport, transport))
        system.wait_whole()
