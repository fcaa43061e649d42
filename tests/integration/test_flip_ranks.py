"""Nodes of several ranks change their roles in place; the end of a rank meanwhile is the node's, and costs no token."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis
from integration.test_flip import drains, pids, roles
from support.oracle import greedy, make_tiny
from support.retrying_clients import CLIENTS, Clients, body, stream
from support.system import System, ranks_of, running_system, wait_until

from common.cluster.redis_keys import Keys

PROMPT = list(range(5, 205))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3", tmp_path_factory.mktemp("flip-ranks") / "model")


@pytest.fixture(scope="module")
def system(model: Path) -> Iterator[System]:
    options = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "300", "--local-prefill-tokens", "0")
    tp = ("--prefill-tp", "2", "--decode-tp", "2")
    with running_system(model.parent, *options, *tp, "--prefill", "2", "--decode", "2") as system:
        system.wait_usable(2, 2)
        yield system


def ranks(system: System) -> dict[str, list[int]]:
    """Pids of the ranks of each node, the leader's first."""
    nodes = [entry for entry in system.processes() if entry["role"] in ("prefill", "decode")]
    return {entry["name"]: [entry["pid"], *ranks_of(entry["pid"])] for entry in nodes}


@contextmanager
def clients(system: System) -> Iterator[Clients]:
    """Streams that must not fail, wait for another router or change a token."""
    running = Clients([system.url], {index: stream(system.url, body(index)) for index in range(CLIENTS)})
    try:
        yield running
    finally:
        running.stop()
    assert running.wrong == []
    assert running.asked_again == 0


def test_nodes_of_two_ranks_flip_and_swap_in_place_under_load(model: Path, system: System) -> None:
    before = ranks(system)
    assert [len(pids) for pids in before.values()] == [2] * 4
    with clients(system) as running:
        [row] = system.admin("flip", "prefill-1", "--timeout", "60")
        assert (row["is"], row["in_place"]) == ("decode", True)
        rows = system.admin("flip", "prefill-0", "decode-1", "--timeout", "60")
        assert [row["in_place"] for row in rows] == [True, True]
        system.admin("flip", "prefill-1", "--timeout", "60")
    assert running.answered > CLIENTS
    assert roles(system) == {"prefill-0": "decode", "prefill-1": "prefill", "decode-0": "decode", "decode-1": "prefill"}
    assert ranks(system) == before, "no rank was started again"
    drained = [float(found) for found in re.findall(r"it was drained ([0-9.]+) s ago", system.log_file.read_text())]
    assert len(drained) == 4
    assert max(drained) < 2.0
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(f"{system.url}/v1/completions", json=asked, timeout=60)
    assert answer.headers["x-kvrelay-prefill-node"] in ("prefill-1", "decode-1")
    assert answer.json()["choices"][0]["token_ids"] == greedy(model, PROMPT, 12).tokens
    system.wait_whole()


@pytest.mark.parametrize("moment", ["drains", "between"])
def test_a_rank_killed_while_its_node_changes_ends_the_node_which_comes_back(system: System, moment: str) -> None:
    """Between its roles a node is not registered, but the numbers that are wanted have changed: the supervisor makes them true."""
    name = next(name for name, role in roles(system).items() if role == "decode")
    node, rank = ranks(system)[name]
    drained = drains(system, name)
    with clients(system), redis.Redis.from_url(system.process("redis")["address"]) as client:
        wait_until(lambda: not client.exists(Keys("default").flip), 30, "no other node changes its role")
        command = [sys.executable, "-m", "kvrelay", "admin", "flip", name]
        flip = subprocess.Popen(command, env={**os.environ, "XDG_RUNTIME_DIR": str(system.pid_file.parent)})
        try:
            wait_until(lambda: drains(system, name) > drained, 30, "it drains")
            until_s = time.monotonic() + 30
            while moment == "between" and client.get(Keys("default").node(name)) and time.monotonic() < until_s:
                time.sleep(0.001)
            os.kill(rank, signal.SIGKILL)
            wait_until(lambda: pids(system).get(name, node) != node, 60, "another process")
            flip.wait(60)
        finally:
            flip.kill()
        after = "decode" if moment == "drains" else "prefill"
        wait_until(lambda: len(now := roles(system)) == 4 and now[name] == after, 90, f"{name} is a {after} node")
    system.wait_whole()
