"""`kvrelay admin` as a command against the real `kvrelay up` with the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.system import System, running_system, wait_until

LONG = list(range(300, 400))
"""More tokens than a decode node prefills itself."""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("admin")
    args = ("--decode", "2", "--decode-tp", "2", "--kv-memory-gb", "0.05", "--policy", "least_load")
    with running_system(folder, *args) as system:
        system.wait_usable(1, 2)
        yield system
        system.wait_whole()


def complete(system: System, prompt: Any, max_tokens: int, **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **more}
    return httpx.post(f"{system.url}/v1/completions", json=body, timeout=60)


class Streams:
    """Long streams in the background; `join` returns each one's tokens."""

    def __init__(self, system: System, count: int, max_tokens: int) -> None:
        self._system, self._max_tokens = system, max_tokens
        self.begun = [threading.Event() for _ in range(count)]
        self.ids: list[list[int]] = [[] for _ in range(count)]
        self.nodes = [""] * count
        self.request_ids = [""] * count
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        body = {"prompt": [*LONG, 400 + index], "max_tokens": self._max_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True}
        url = f"{self._system.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            self.nodes[index] = answer.headers["x-kvrelay-decode-node"]
            self.request_ids[index] = answer.headers["x-request-id"]
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    self.ids[index] += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                    self.begun[index].set()

    def join(self) -> list[list[int]]:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.ids


def test_nodes_are_listed_and_shown(system: System) -> None:
    nodes = {node["node_id"]: node for node in system.admin("nodes")["nodes"]}
    assert {name: node["state"] for name, node in nodes.items()} == dict.fromkeys(
        ("prefill-0", "decode-0", "decode-1"), "usable"
    )
    assert nodes["prefill-0"]["breaker"]["state"] == "closed"
    assert nodes["decode-0"]["layout"]["tensor_parallel"] == 2

    about = system.admin("node", "decode-1")
    assert about["router"]["incarnation"] == about["node"]["incarnation"] == nodes["decode-1"]["incarnation"]
    leader, other = about["node"]["ranks"]
    assert leader["pid"] == about["node"]["pid"] == system.process("decode", 1)["pid"]
    assert Path(f"/proc/{other['pid']}").exists()
    assert min(leader["memory_bytes"], other["memory_bytes"]) > 10_000_000
    assert leader["kv_blocks"] == other["kv_blocks"] > 0
    assert (about["node"]["attempts"], about["node"]["redis"], about["node"]["draining"]) == ([], "ok", False)
    assert any(lease["holder"].startswith("router-") for lease in about["node"]["leases"])

    assert [model["name"] for model in system.admin("router")["models"]] == ["demo"]
    assert "decode-0, decode-1" in system.admin("node", "dec", code=1)
    assert "known: " in system.admin("drain", "nobody", code=1)


def test_a_request_has_a_story_and_route_explains_the_next_one(system: System) -> None:
    answer = complete(system, LONG, 3)
    request_id = answer.headers["x-request-id"]
    story = system.admin("request", request_id)
    events = [event["event"] for event in story["events"]]
    assert events[0] == "arrived"
    assert events[-1] == "finished"
    assert {"decision", "first_token"} <= set(events)
    times = [event["t_s"] for event in story["events"]]
    assert times == sorted(times)
    decision = next(event["data"] for event in story["events"] if event["event"] == "decision")
    assert decision["decode"]["node"] == answer.headers["x-kvrelay-decode-node"]
    assert request_id in [summary["request_id"] for summary in system.admin("requests")["requests"]]
    assert "does not know the request" in system.admin("request", "cmpl-nothing", code=1)

    wait_until(lambda: system.admin("router")["index"]["blocks"] > 0, 10, "the index hears of stored blocks")
    index = system.admin("router")["index"]
    assert (index["gaps"], index["silent"], index["nodes"]) == (0, [], 3)
    before = system.metric("kvrelay_attempts_total")
    explained = system.admin("route", "--tokens", ",".join(map(str, LONG)))
    assert explained["prompt_tokens"] == len(LONG)
    assert {row["node"] for row in explained["decode"]} == {"decode-0", "decode-1"}
    assert [row["picked"] for row in explained["decode"]] == [True, False]
    assert [row["node"] for row in explained["prefill"]] == ["prefill-0"]
    text = system.admin("route", "--prompt", "What is the capital of France?", "--chat")
    assert text["prompt_tokens"] > 5
    assert text["reason"]
    assert "token ids below" in system.admin("route", "--tokens", "99999999", code=1)
    assert system.metric("kvrelay_attempts_total") == before


def test_drained_node_finishes_its_streams_gets_no_new_ones_and_can_be_undrained(system: System) -> None:
    count = 1500  # long enough to be running still when the admin asks
    streams = Streams(system, 4, count)
    for begun in streams.begun:
        assert begun.wait(30)
    assert set(streams.nodes) == {"decode-0", "decode-1"}
    about = system.admin("node", "decode-0")["node"]["attempts"]
    assert len(about) == streams.nodes.count("decode-0") or not about
    system.admin("drain", "decode-0", "--wait", "--timeout", "60")
    status = system.admin("node", "decode-0")["node"]
    assert (status["idle"], status["attempts"]) == (True, [])
    ids = streams.join()
    assert [len(each) for each in ids] == [count] * 4
    # Drained, not moved: every stream ended on the node where it began.
    assert [system.admin("request", request_id)["attempts"] for request_id in streams.request_ids] == [1] * 4
    assert complete(system, LONG, 2).headers["x-kvrelay-decode-node"] == "decode-1"

    system.admin("drain", "decode-1", "--wait")
    refused = complete(system, LONG, 2)
    assert refused.status_code == 503
    assert "draining" in refused.json()["error"]["message"]
    assert system.admin("route", "--tokens", "5,6")["mode"] is None
    assert httpx.get(f"{system.url}/health").status_code == 503
    states = [node["state"] for node in system.admin("nodes")["nodes"] if node["role"] == "decode"]
    assert states == ["draining", "draining"]

    for name in ("decode-0", "decode-1"):
        system.admin("undrain", name)
    wait_until(lambda: system.health()["decode"] == 2, 10, "both nodes usable again")
    assert complete(system, LONG, 2).status_code == 200


def test_drained_prefill_node_leaves_prompts_to_the_decode_nodes(system: System) -> None:
    system.admin("drain", "prefill-0", "--wait")
    answer = complete(system, list(range(500, 600)), 2)
    assert (answer.status_code, answer.headers["x-kvrelay-prefill-mode"]) == (200, "local")
    system.admin("undrain", "prefill-0")
    wait_until(lambda: system.health()["prefill"] == 1, 10, "the prefill node usable again")
    answer = complete(system, list(range(600, 700)), 2)
    assert answer.headers["x-kvrelay-prefill-mode"] == "relayed"


def test_a_restarted_router_sees_the_drained_node_as_drained_and_keeps_its_admin_address(system: System) -> None:
    system.admin("drain", "decode-0")
    old_pid = system.kill("router")
    wait_until(lambda: system.is_restarted("router", old_pid), 30, "the router comes back")
    wait_until(lambda: (system.health().get("prefill"), system.health().get("decode")) == (1, 1), 30, "one of each")
    states = {node["node_id"]: node["state"] for node in system.admin("nodes")["nodes"]}
    assert states == {"decode-0": "draining", "decode-1": "usable", "prefill-0": "usable"}
    assert complete(system, LONG, 2).headers["x-kvrelay-decode-node"] == "decode-1"
    system.admin("undrain", "decode-0")
    wait_until(lambda: system.health()["decode"] == 2, 10, "both nodes usable again")


def test_tables_are_plain_text_and_the_token_is_required(system: System) -> None:
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(system.pid_file.parent)}

    def run(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvrelay", "admin", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**environ, **more})

    for args in (["nodes"], ["node", "prefill"], ["requests"], ["router"], ["route", "--prompt", "Hello"]):
        result = run(*args)
        assert result.returncode == 0, result.stderr
        assert "\x1b" not in result.stdout
        assert len(result.stdout.splitlines()) > 3
    [file] = (system.pid_file.parent / "kvrelay").glob("up-*.json")
    cluster = json.loads(file.read_text())
    assert file.stat().st_mode & 0o077 == 0
    assert run("nodes", KVRELAY_ADMIN_TOKEN="wrong").returncode == 1
    assert run("nodes", "--url", *cluster["routers"].values()).returncode == 0
    assert run("nodes", "--url", "http://127.0.0.1:1", KVRELAY_ADMIN_TOKEN="x").returncode == 3
    for node in system.admin("nodes")["nodes"]:
        assert httpx.get(f"{node['admin_address']}/status").status_code == 401
        assert httpx.post(f"{node['admin_address']}/drain").status_code == 401
    # The token is in no command line.
    for process in system.processes():
        assert cluster["token"] not in Path(f"/proc/{process['pid']}/cmdline").read_text()
