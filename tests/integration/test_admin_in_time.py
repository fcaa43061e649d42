"""Every command of `kvrelay admin` answers, or fails with the right exit code, within two seconds: whatever is stopped or dead."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.system import System, running_system, wait_until
from typer.testing import CliRunner

from kvrelay.admin.cli import app

pytestmark = pytest.mark.thorough

LIMIT_S = 2.0
DONE, REFUSED, SILENT = 0, 1, 3
LEASE = {"KVRELAY_LEASE_S": "30"}
"""A stopped node stays listed while all commands are tried."""
GONE = {
    "router": [DONE],
    "unknown request": [REFUSED],
    "check": [REFUSED],
    "node": [REFUSED],
    "all nodes": [DONE],
    "refusing nodes": [REFUSED],
}


def commands(folder: Path, node: str) -> dict[tuple[str, ...], str]:
    """Every command, and whom it asks: the router, this node, or all nodes."""
    return {
        ("nodes",): "router",
        ("router",): "router",
        ("requests",): "router",
        ("route", "--prompt", "Hello"): "router",
        ("blocks", "--prompt", "Hello"): "router",
        ("watch", "--count", "1"): "router",
        ("support-bundle", "-o", str(folder / "bundle.tar.gz")): "router",
        ("request", "cmpl-unknown"): "unknown request",
        ("check",): "check",
        ("node", node): "node",
        ("profile", node, "--seconds", "0.1", "-o", str(folder / "profile.json.gz")): "node",
        ("drain", node): "node",
        ("undrain", node): "node",
        ("lora", "list"): "all nodes",
        ("lora", "load", "x", "/nowhere"): "refusing nodes",
        ("lora", "unload", "x"): "refusing nodes",
        ("lora", "list", "--node", node): "node",
    }


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("in-time")
    with running_system(folder, "--decode", "3", "--kv-memory-gb", "0.02", env=LEASE) as system:
        system.wait_usable(1, 3)
        system.admin("profile", "decode-2", "--seconds", "0.1", "-o", str(folder / "first.gz"))  # it loads the profiler
        yield system


@contextlib.contextmanager
def unsupervised(system: System) -> Iterator[None]:
    """Nobody restarts what is dead or stopped."""
    os.kill(system.supervisor.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(system.supervisor.pid, signal.SIGCONT)


def check_all(system: System, folder: Path, node: str, codes: dict[str, Sequence[int]]) -> None:
    wrong: list[str] = []
    for command, whom in commands(folder, node).items():
        started_s = time.monotonic()
        result = CliRunner().invoke(app, command, env={"XDG_RUNTIME_DIR": str(system.pid_file.parent), "COLUMNS": "80"})
        took_s = time.monotonic() - started_s
        said = (result.stderr or result.stdout).strip()
        if result.exit_code not in codes[whom] or took_s > LIMIT_S or "Traceback" in said:
            wrong.append(f"{' '.join(command)}: exit code {result.exit_code} after {took_s:.2f} s: {said[-300:]}")
    assert not wrong, "\n".join(wrong)


def state_of(system: System, node: str) -> str:
    known = [each for each in system.admin("nodes")["nodes"] if each["node_id"] == node]
    return known[0]["state"] if known else "gone"


def test_healthy_services_answer(system: System, tmp_path: Path) -> None:
    codes = {
        "router": [DONE],
        "unknown request": [REFUSED],
        "check": [DONE],
        "node": [DONE],
        "all nodes": [DONE],
        "refusing nodes": [REFUSED],
    }
    check_all(system, tmp_path, "decode-2", codes)


def test_a_stopped_node_is_reported_by_the_commands_that_ask_it(system: System, tmp_path: Path) -> None:
    silent = {
        "router": [DONE],
        "unknown request": [REFUSED],
        "check": [REFUSED],
        "node": [SILENT],
        "all nodes": [SILENT],
        "refusing nodes": [SILENT],
    }
    with unsupervised(system):
        pid = system.kill("decode", 0, signal.SIGSTOP)
        try:
            check_all(system, tmp_path, "decode-0", silent)
            assert "does not answer" in system.admin("roll", "decode-0", code=SILENT)
            wait_until(lambda: state_of(system, "decode-0") == "gone", 90, "the router forgets it")
            check_all(system, tmp_path, "decode-0", GONE)
        finally:
            os.kill(pid, signal.SIGCONT)
    system.wait_usable(1, 3)
    check_all(
        system,
        tmp_path,
        "decode-0",
        {**silent, "check": [DONE], "node": [DONE], "all nodes": [DONE], "refusing nodes": [REFUSED]},
    )


def test_a_dead_node_is_reported_and_later_unknown(system: System, tmp_path: Path) -> None:
    with unsupervised(system):
        system.kill("decode", 1)
        listed = {
            "router": [DONE],
            "unknown request": [REFUSED],
            "check": [DONE, REFUSED],
            "node": [SILENT, REFUSED],
            "all nodes": [SILENT, DONE],
        }
        check_all(system, tmp_path, "decode-1", {**listed, "refusing nodes": [SILENT, REFUSED]})
        wait_until(lambda: state_of(system, "decode-1") == "gone", 90, "the router forgets it")
        check_all(system, tmp_path, "decode-1", GONE)
    system.wait_usable(1, 3)


def test_a_stopped_or_dead_router_is_no_answer(system: System, tmp_path: Path) -> None:
    nothing = {whom: [SILENT] for whom in GONE}
    with unsupervised(system):
        pid = system.kill("router", 0, signal.SIGSTOP)
        try:
            check_all(system, tmp_path, "decode-2", nothing)
            system.admin("roll", code=SILENT)
        finally:
            os.kill(pid, signal.SIGCONT)
        system.kill("router", 0)
        check_all(system, tmp_path, "decode-2", nothing)
        system.admin("roll", code=SILENT)
    system.wait_usable(1, 3)
