"""Starts Redis like `kvrelay up`, for tests and benchmarks. Runs on the caller's thread."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import redis
from support.ports import free_port

from common.base.errors import ConfigError
from common.base.files import temporary_folder
from common.cluster.redis_server import find_redis_binary, redis_command

_START_TIMEOUT_S, _STOP_TIMEOUT_S = 15.0, 5.0
_POLL_S = 0.01


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


class RedisServer:
    """One server process. `start` returns once it answers; `restart` keeps the port; `stop` removes its files.

    Use it as a context manager, or call `start` and `stop`.
    """

    def __init__(self, port: int = 0) -> None:
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
        self.port = self.port or free_port()
        complaint = self._try_start()
        if complaint is not None:
            self.stop()
            raise ConfigError(f"the Redis server {find_redis_binary()} did not start: {complaint}")

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
        deadline = time.monotonic() + _START_TIMEOUT_S
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
            else f"no answer within {_START_TIMEOUT_S:.0f} s"
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
