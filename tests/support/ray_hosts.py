"""A Ray cluster of several raylets on this machine, and `kvrelay up --on ray` on it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from support.ports import free_port
from support.redis_server import RedisServer
from support.system import wait_until

_HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""Those of docs/ray.md: a lost host is noticed within a second instead of 15."""


class RayHosts:
    """A head without resources for nodes, and `count` hosts of two CPUs each."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False, "_system_config": _HEALTH}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._hosts: dict[str, Any] = {}
        for _ in range(count):
            self.add()
        self.address: str = self._cluster.address

    def add(self) -> str:
        """One more host. Returns its node id."""
        host = self._cluster.add_node(num_cpus=2)
        self._hosts[host.node_id] = host
        return host.node_id

    def kill(self, node_id: str) -> None:
        """Kill a host's raylet (-9), and with it all that it runs."""
        (raylet,) = self._hosts.pop(node_id).all_processes["raylet"]
        raylet.process.kill()
        raylet.process.wait()

    def raylet_pids(self) -> dict[int, str]:
        """Node id by the pid of its raylet."""
        return {host.all_processes["raylet"][0].process.pid: node_id for node_id, host in self._hosts.items()}

    def close(self) -> None:
        self._cluster.shutdown()


class UpOnRay:
    """`kvrelay up --on ray` of one cluster, which may die and be started again."""

    def __init__(self, hosts: RayHosts, redis: RedisServer, folder: Path, *arguments: str) -> None:
        self._hosts, self._folder = hosts, folder
        self.port = free_port()
        self._command = [
            *(
                sys.executable,
                "-m",
                "kvrelay",
                "up",
                "--on",
                "ray",
                "--address",
                hosts.address,
                "--redis-url",
                redis.url,
            ),
            *("--port", str(self.port), "--kv-memory-gb", "0.05", *arguments),
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self.log_file = folder / "up.log"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(self._folder)}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environ)

    def wait_usable(self, prefill: int, decode: int, timeout_s: float = 90.0) -> None:
        """Wait until the router sees exactly so many nodes."""

        def usable() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            health = self.health()
            return (health.get("prefill"), health.get("decode")) == (prefill, decode)

        wait_until(usable, timeout_s, f"{prefill} prefill and {decode} decode nodes", self.log)

    def health(self) -> dict[str, Any]:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).json()
        except httpx.TransportError:
            return {}

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Ctrl-C. Returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def log(self) -> str:
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-40:])


def services() -> dict[str, psutil.Process]:
    """The processes of services that Ray's actors started, by node id or role."""
    found: dict[str, psutil.Process] = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if "kvrelay" not in words or process.info["status"] == psutil.STATUS_ZOMBIE:
            continue
        role = words[words.index("kvrelay") + 1] if words[-1] != "kvrelay" else ""
        parent = process.parent()
        if (
            role in ("router", "prefill", "decode")
            and parent is not None
            and "ServiceActor" in " ".join(parent.cmdline())
        ):
            found[words[words.index("--node-id") + 1] if "--node-id" in words else role] = process
    return found


@contextlib.contextmanager
def ray_hosts(count: int) -> Iterator[RayHosts]:
    hosts = RayHosts(count)
    try:
        yield hosts
    finally:
        hosts.close()
        end_s = time.monotonic() + 10
        while services() and time.monotonic() < end_s:
            time.sleep(0.1)
