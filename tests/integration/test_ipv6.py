"""A cluster whose services, ranks and Redis listen on IPv6 only."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from support.ports import free_port
from support.system import wait_until

from common.base.process import tied_command
from common.cluster.redis_server import find_redis_binary

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("transport", ["zmq", "shm"])
def test_a_cluster_on_ipv6_relays_and_answers(tmp_path: Path, transport: str) -> None:
    redis_port, port = free_port(), free_port()
    where = ["--host", "::1", "--redis-url", f"redis://[::1]:{redis_port}/0"]
    node = [
        *where,
        "--model",
        "demo",
        "--kv-blocks",
        "200",
        "--kv-transport",
        transport,
        "--port",
        "0",
        "--data-port",
        "0",
    ]
    kvrelay = [sys.executable, "-m", "kvrelay"]
    commands = [
        [find_redis_binary(), "--bind", "::1", "--port", str(redis_port), "--save", "", "--dir", str(tmp_path)],
        [*kvrelay, "prefill", *node],
        [*kvrelay, "decode", *node, "--tp", "2"],
        [*kvrelay, "router", *where, "--port", str(port), "--local-prefill-tokens", "0"],
    ]
    log_file, url = tmp_path / "log", f"http://[::1]:{port}"

    def usable() -> bool:
        with contextlib.suppress(httpx.TransportError):
            found = httpx.get(f"{url}/health", timeout=5).json()
            return (found["prefill"], found["decode"]) == (1, 1)
        return False

    with contextlib.ExitStack() as running, log_file.open("wb") as log:
        for command in commands:
            process = subprocess.Popen(tied_command(command), stdout=log, stderr=log, env={**os.environ})
            running.callback(process.wait, 30)
            running.callback(process.terminate)
        wait_until(usable, 60, "both nodes are usable", lambda: log_file.read_text(errors="replace"))
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 20}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert "Paris" in answer.text
        assert answer.headers["x-kvrelay-prefill-mode"] == "relayed"
    assert f"over {transport}" in log_file.read_text(errors="replace")
