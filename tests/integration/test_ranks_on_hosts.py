"""A node whose ranks are started on several hosts, as with torchrun; and invalid layouts and command lines."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support import warm_start
from support.oracle import greedy, make_tiny
from support.ports import free_port
from support.redis_server import RedisServer
from support.system import wait_until


@contextmanager
def kvrelay(log: Path, *args: str) -> Iterator[warm_start.Process]:
    """One `kvrelay` command until the block ends."""
    with log.open("wb") as output:
        process = warm_start.start([sys.executable, "-m", "kvrelay", *args], output, os.environ)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(30)


@pytest.mark.parametrize(
    ("role", "size"),
    [
        ("decode", "--tensor-parallel-size"),
        pytest.param("decode", "--decode-context-parallel", marks=pytest.mark.thorough),
        ("prefill", "--prefill-context-parallel"),
    ],
)
def test_ranks_of_one_node_started_by_two_commands(
    role: str, size: str, redis_server: RedisServer, cluster: str, tmp_path: Path
) -> None:
    model = make_tiny("qwen3", tmp_path / "qwen3")
    url = f"http://127.0.0.1:{(http_port := free_port())}"
    shared = ("--redis-url", redis_server.url, "--cluster", cluster)
    node = (*shared, "--model", str(model), "--dtype", "float32", "--kv-blocks", "200")
    master = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    several, other = (role, *node, size, "2", *master), "prefill" if role == "decode" else "decode"
    with ExitStack() as stack:
        router = ("router", *shared, "--port", str(http_port), "--local-prefill-tokens", "0")
        stack.enter_context(kvrelay(tmp_path / "router.log", *router))
        stack.enter_context(kvrelay(tmp_path / "other.log", other, *node))
        leader = stack.enter_context(kvrelay(tmp_path / "rank-0.log", *several, "--node-rank", "0"))
        follower = stack.enter_context(kvrelay(tmp_path / "rank-1.log", *several, "--node-rank", "1"))

        def usable() -> bool:
            for process, log in ((leader, "rank-0.log"), (follower, "rank-1.log")):
                assert process.poll() is None, (tmp_path / log).read_text()
            try:
                health = httpx.get(f"{url}/health", timeout=5.0).json()
            except httpx.TransportError:
                return False
            return (health["prefill"], health["decode"]) == (1, 1)

        wait_until(usable, 120, "both nodes are usable")
        prompt = list(range(3, 120))  # enough rows for context-parallel ranks to share out
        body = {"model": "qwen3", "prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60.0)
        assert answer.json()["choices"][0]["token_ids"] == greedy(model, prompt, 20).tokens
        follower.kill()
        assert leader.wait(30) != 0, "ranks share fate over hosts, too"
        assert "rank 1" in (tmp_path / "rank-0.log").read_text().splitlines()[-1]


def test_ranks_whose_leader_does_not_come_say_so_and_end(
    redis_server: RedisServer, cluster: str, tmp_path: Path
) -> None:
    model = make_tiny("qwen3", tmp_path / "qwen3")
    master = ("--nnodes", "2", "--node-rank", "1", "--master-port", str(free_port()), "--start-timeout-s", "6")
    node = ("--model", str(model), "--redis-url", redis_server.url, "--cluster", cluster)
    with kvrelay(tmp_path / "node.log", "decode", *node, "--tensor-parallel-size", "2", *master) as process:
        assert process.wait(60) not in (0, None)
    log = (tmp_path / "node.log").read_text()
    assert "rank 1 is waiting for the leader at tcp://127.0.0.1:" in log
    assert "within 6 s: blocked until all ranks have started" in log
    assert "rank 1 (pid " in log.splitlines()[-1], "what ended is told at the end"


@pytest.mark.parametrize(
    ("role", "args", "said"),
    [
        ("prefill", ["--tensor-parallel-size", "3"], "sizes that would work: [1, 2, 4]"),
        ("decode", ["--pipeline-parallel-size", "4"], "does not fit 3 layers"),
        ("decode", ["--pp-layers", "1,1"], "does not cover 3 layers"),
        ("decode", ["--pp-layers", "1,x"], "not a list of numbers"),
        (
            "decode",
            ["--tensor-parallel-size", "2", "--nnodes", "2", "--start-timeout-s", "3"],
            "no report from ranks [1] within 3 s",
        ),
    ],
)
def test_impossible_layouts_are_refused_at_start_in_one_sentence(
    role: str, args: list[str], said: str, redis_server: RedisServer, cluster: str, tmp_path: Path
) -> None:
    model = make_tiny("qwen3", tmp_path / "qwen3")
    with kvrelay(
        tmp_path / "node.log", role, "--model", str(model), "--redis-url", redis_server.url, "--cluster", cluster, *args
    ) as process:
        assert process.wait(60) == 78
    last = (tmp_path / "node.log").read_text().splitlines()[-1]
    assert said in last
    assert "Traceback" not in (tmp_path / "node.log").read_text()
