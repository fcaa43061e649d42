"""`kvrelay admin roll`: every service restarts while clients stream; no request fails and no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.ports import free_port
from support.retrying_clients import CLIENTS, NEW_TOKENS, Clients, body, stream
from support.system import System, running_system

pytestmark = pytest.mark.thorough


def test_every_service_restarts_under_load_and_no_request_fails_or_changes(tmp_path: Path) -> None:
    port = free_port()
    options = ("--routers", "2", "--prefill", "2", "--decode", "2", "--decode-tp", "2", "--tls", "true")
    options += ("--kv-memory-gb", "0.05")
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
