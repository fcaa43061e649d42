"""A whole cluster as a user starts it: `kvrelay up` in a separate process, reached over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from support import warm_start
from support.ports import free_port
from typer.testing import CliRunner

from kvrelay.admin.cli import app as admin

START_TIMEOUT_S = 120.0


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str, log: Callable[[], str] | None = None) -> Any:
    """Poll `condition` until it holds and return its value. Raises: AssertionError naming `what`, followed by `log()`."""
    end = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {timeout_s:.0f} s: {what}\n{log() if log else ''}"
        time.sleep(0.05)


def ranks_of(starter_pid: int) -> list[int]:
    """Pids of the rank processes that a node's process started on its host, by rank."""
    named = [(child.name(), child.pid) for child in psutil.Process(starter_pid).children()]
    ranks = [(int(name.rpartition("-")[2]), pid) for name, pid in named if name.startswith("kvrelay-rank-")]
    return [pid for _, pid in sorted(ranks)]


@dataclass
class System:
    """A running cluster. `processes()` reads the pid file each time, so it knows restarted ones."""

    url: str
    pid_file: Path
    log_file: Path
    supervisor: warm_start.Process

    def processes(self) -> list[dict[str, Any]]:
        try:
            return json.loads(self.pid_file.read_text())
        except FileNotFoundError:
            return []

    def process(self, role: str, index: int = 0) -> dict[str, Any]:
        return [entry for entry in self.processes() if entry["role"] == role][index]

    def is_restarted(self, role: str, old_pid: int) -> bool:
        """Whether another process has taken the place of `old_pid`."""
        return any(entry["role"] == role and entry["pid"] != old_pid for entry in self.processes())

    def kill(self, role: str, index: int = 0, number: int = signal.SIGKILL) -> int:
        """Send a signal to one of our own processes; returns its pid."""
        pid = self.process(role, index)["pid"]
        os.kill(pid, number)
        return pid

    def kill_name(self, name: str) -> None:
        """Kill the process of the service with this name."""
        os.kill(next(entry["pid"] for entry in self.processes() if entry["name"] == name), signal.SIGKILL)

    def health(self) -> dict[str, Any]:
        """The router's view, {} while it cannot be reached."""
        try:
            answer = httpx.get(f"{self.url}/health", timeout=5.0)
        except httpx.TransportError:
            return {}
        return answer.json()

    def wait_usable(self, prefill: int = 1, decode: int = 1, timeout_s: float = START_TIMEOUT_S) -> None:
        def usable() -> bool:
            assert self.supervisor.poll() is None, f"kvrelay up ended:\n{self.log_tail()}"
            health = self.health()
            roles = [entry["role"] for entry in self.processes()]
            wanted = (prefill, decode)
            serves = decode == 0 or health.get("status") != "unavailable"  # also the model is known
            return serves and (
                (health.get("prefill"), health.get("decode"))
                == wanted
                == tuple(map(roles.count, ("prefill", "decode")))
            )

        wait_until(usable, timeout_s, f"{prefill} prefill and {decode} decode nodes usable", self.log_tail)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics", timeout=5.0).text.splitlines():
            sample = line.partition("{")[0].partition(" ")[0]
            if sample == name and all(f'{key}="{value}"' in line for key, value in labels.items()):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def wait_whole(self, timeout_s: float = 30.0) -> None:
        """Wait until no node runs anything or holds a block; every test ends with this."""

        def whole() -> bool:
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
            return all(self.metric(name) == 0 for name in names)

        wait_until(whole, timeout_s, "all pools whole and all counters zero")

    def admin(self, *args: str, code: int = 0) -> Any:
        """The answer of `kvrelay admin ARGS --json`; with another exit code what it wrote to standard error.

        It runs in this process, which saves half a second per call; `test_admin.py` also runs the command itself.
        """
        said = self.admin_text(*args, "--json", code=code)
        return json.loads(said) if code == 0 else said

    def admin_text(self, *args: str, code: int = 0) -> str:
        """What `kvrelay admin ARGS` prints; with another exit code what it wrote to standard error."""
        result = CliRunner().invoke(admin, args, env={"XDG_RUNTIME_DIR": str(self.pid_file.parent)})
        assert result.exit_code == code, result.stdout + result.stderr
        return result.stdout if code == 0 else result.stderr

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def running_system(folder: Path, *args: str, env: dict[str, str] | None = None, port: int = 0) -> Iterator[System]:
    """`kvrelay up ARGS`, by default at any free port, until the block ends; then SIGINT, and nothing may be left."""
    port = port or free_port()
    pid_file, log_file = folder / "pids.json", folder / "up.log"
    command = [sys.executable, "-m", "kvrelay", "up", "--port", str(port), "--pid-file", str(pid_file), *args]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder), **(env or {})}
    with log_file.open("wb") as log:
        supervisor = warm_start.start(command, log, environ)
    system = System(f"http://127.0.0.1:{port}", pid_file, log_file, supervisor)
    pids: list[int] = []
    try:
        yield system
        pids = [entry["pid"] for entry in system.processes()]
    finally:
        if supervisor.poll() is None:
            supervisor.send_signal(signal.SIGINT)
        try:
            supervisor.wait(30)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
            raise
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not left, f"processes {left} outlived kvrelay up"
