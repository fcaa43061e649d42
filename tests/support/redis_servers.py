"""Real Redis servers with options chosen by tests: passwords, TLS, Redis Cluster, replicas, Sentinels."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.certificates import made
from support.ports import free_port

from common.base.process import tied_command
from common.cluster.redis_server import find_redis_binary

_START_S = 15.0


def binary_with_tls() -> str:
    """A server program with TLS support; without one, the test is skipped and counted."""
    for candidate in (shutil.which("redis-server"), "/usr/bin/redis-server", shutil.which("valkey-server")):
        if candidate and Path(candidate).exists():
            probe = subprocess.run(
                [candidate, "--port", "0", "--tls-port", "1"], capture_output=True, text=True, timeout=10, check=False
            )
            if "No tls-cert-file" in probe.stdout:
                return candidate
    pytest.skip("needs a Redis server with TLS support: apt-get install redis-server")


def client(port: int, **options: Any) -> redis.Redis:
    """A synchronous client for the test itself."""
    return redis.Redis(port=port, socket_timeout=2, socket_connect_timeout=2, **options)


def ask(port: int, *command: str | int | bytes) -> Any:
    """Run one command on a new connection."""
    with client(port) as connection:
        return connection.execute_command(*command)


@contextlib.contextmanager
def redis_server_with(
    folder: Path, *options: str, port: int = 0, binary: str = "", sentinel: bool = False, tls: bool = False
) -> Iterator[int]:
    """A server on loopback with these options; yields its port once it accepts connections."""
    port = port or free_port()
    home = folder / f"redis-{port}"
    home.mkdir()
    config = home / "redis.conf"
    port_option = f"port 0\ntls-port {port}" if tls else f"port {port}"
    saving = [] if sentinel else ['save ""', "appendonly no", "repl-diskless-sync-delay 0"]
    config.write_text("\n".join([port_option, "bind 127.0.0.1", f"dir {home}", *saving, *options, ""]))
    command = [binary or find_redis_binary(), str(config), *(["--sentinel"] if sentinel else [])]
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(tied_command(command), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        _wait_for(port, process, home / "log", tls)
        yield port
    finally:
        process.kill()
        process.wait(10)


def _tls() -> dict[str, Any]:
    own = made() / "router"
    files = {"ssl_certfile": str(own / "cert.pem"), "ssl_keyfile": str(own / "key.pem")}
    return {"ssl": True, "ssl_cert_reqs": "none", **files}


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path, tls: bool) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            with client(port, **(_tls() if tls else {})) as connection:
                connection.ping()
                return
        except redis.exceptions.AuthenticationError:
            return
        except redis.RedisError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
