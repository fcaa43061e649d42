"""`kvrelay admin flip`: nodes change their roles while clients stream; no request fails and no token changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
import redis
from support.retrying_clients import CLIENTS, Clients, body, stream
from support.system import System, running_system, wait_until

from common.cluster.redis_keys import Keys


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    options = ("--prefill", "2", "--decode", "2", "--kv-memory-gb", "0.05")
    with running_system(tmp_path_factory.mktemp("flip"), *options) as system:
        system.wait_usable(2, 2)
        yield system


def roles(system: System) -> dict[str, str]:
    """The usable nodes and their roles."""
    return {node["node_id"]: node["role"] for node in system.admin("nodes")["nodes"] if node["usable"]}


def pids(system: System) -> dict[str, int]:
    return {entry["name"]: entry["pid"] for entry in system.processes() if entry["role"] != "redis"}


def test_nodes_flip_and_swap_in_place_under_load(system: System) -> None:
    """The pool stays: a prompt that a prefill node computed is found by the decode node that it becomes."""
    before = pids(system)
    expected = {index: stream(system.url, body(index)) for index in range(CLIENTS)}
    clients = Clients([system.url], expected)
    try:
        [row] = system.admin("flip", "prefill-1", "--timeout", "60")
        assert (row["was"], row["is"], row["in_place"]) == ("prefill", "decode", True)
        assert list(roles(system).values()).count("decode") == 3
        assert "only usable prefill node" in system.admin("flip", "prefill-0", code=1)
        rows = system.admin("flip", "prefill-0", "decode-1", "--timeout", "60")
        assert [(row["node"], row["is"]) for row in rows] == [("decode-1", "prefill"), ("prefill-0", "decode")]
        system.admin("flip", "prefill-1", "--timeout", "60")
        assert roles(system) == {
            "prefill-0": "decode",
            "prefill-1": "prefill",
            "decode-0": "decode",
            "decode-1": "prefill",
        }
    finally:
        clients.stop()
    assert clients.wrong == []
    assert clients.asked_again == 0
    assert clients.answered > CLIENTS
    assert pids(system) == before, "no process was started again"
    drained = [float(found) for found in re.findall(r"it was drained ([0-9.]+) s ago", system.log_file.read_text())]
    assert len(drained) == 4
    assert max(drained) < 2.0
    long = {"prompt": list(range(5, 300)), "max_tokens": 2, "temperature": 0.0, "ignore_eos": True}
    answers = [httpx.post(f"{system.url}/v1/completions", json=long, timeout=60) for _ in range(2)]
    prefill = answers[0].headers.get("x-kvrelay-prefill-node", "")
    if prefill:  # its blocks are owned by it in its other role too
        system.admin("flip", prefill)
        [node] = [node for node in system.admin("nodes")["nodes"] if node["node_id"] == prefill]
        assert node["load"]["kv_blocks_cached"] >= 295 // 16
        system.admin("flip", prefill)
    system.wait_whole()


def test_no_node_flips_while_all_others_of_its_role_drain(system: System) -> None:
    """Whether the router that is asked knows of the drain already or does not."""
    names = [name for name, role in roles(system).items() if role == "decode"]
    system.admin("drain", names[0])
    try:
        assert re.search("decode nodes? of demo", system.admin("flip", names[1], code=1))
    finally:
        system.admin("undrain", names[0])
    wait_until(lambda: len(roles(system)) == 4, 30, "all nodes are usable")


def test_a_flipped_node_that_dies_comes_back_in_its_new_role(system: System) -> None:
    name = next(name for name, role in roles(system).items() if role == "prefill")
    system.admin("flip", name)
    old = pids(system)[name]
    system.kill_name(name)
    wait_until(
        lambda: pids(system).get(name, old) != old and roles(system).get(name) == "decode", 60, f"{name} decodes"
    )
    system.admin("flip", name)
    assert roles(system)[name] == "prefill"


@pytest.mark.parametrize("place", ["drains", "second"])
def test_a_node_killed_while_it_changes_loses_nothing(system: System, place: str) -> None:
    """When two nodes change places and the second one dies, the first one gets its role back."""
    of = roles(system)
    wait_until(lambda: not flips_now(system), 30, "the flip that was killed gives up the right to change roles")
    names = [next(name for name, role in of.items() if role == wanted) for wanted in ("prefill", "decode")]
    clients = Clients([system.url], {index: stream(system.url, body(index)) for index in range(CLIENTS)})
    asked = [names[1]] if place == "drains" else names
    command = [sys.executable, "-m", "kvrelay", "admin", "flip", *asked]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(system.pid_file.parent)}
    drained = drains(system, asked[-1])
    flip = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: drains(system, asked[-1]) > drained, 30, "it drains")
        system.kill_name(asked[-1])
        _, said = flip.communicate(timeout=90)
    finally:
        clients.stop()
        flip.kill()
    assert clients.wrong == []
    assert flip.returncode == 1
    assert "while it changed its role, and is a decode node again" in said
    if place == "second":
        assert f"{names[0]} is a prefill node again" in said
    wait_until(lambda: roles(system) == of, 60, "all roles are as before")
    system.wait_whole()


def flips_now(system: System) -> bool:
    with redis.Redis.from_url(system.process("redis")["address"]) as client:
        return bool(client.exists(Keys("default").flip))


def drains(system: System, name: str) -> int:
    """How often a node has begun to change its role."""
    return len(re.findall(rf"^{name} .*drains and becomes", system.log_file.read_text(), re.MULTILINE))


def test_the_wanted_numbers_are_traded_on_one_machine(system: System) -> None:
    """`scale` changes roles; what an operator changed by name is wanted from then on."""
    answer = system.admin("scale", "prefill=1")
    assert (answer["prefill"], answer["decode"]) == (1, 3)
    wait_until(lambda: list(roles(system).values()).count("decode") == 3, 60, "three nodes decode")
    wait_until(lambda: sorted(p["role"] for p in system.processes())[:3] == ["decode"] * 3, 60, "the pid file says so")
    name = next(name for name, role in roles(system).items() if role == "decode")
    system.admin("flip", name)
    wait_until(lambda: wanted(system) == {"prefill": 2, "decode": 2, "total": 4}, 30, "two of each are wanted")
    assert "that many must be wanted" in system.admin("scale", "prefill=2", "decode=3", code=1)


def wanted(system: System) -> object:
    with redis.Redis.from_url(system.process("redis")["address"]) as client:
        return json.loads(client.get(Keys("default").desired) or b"null")
