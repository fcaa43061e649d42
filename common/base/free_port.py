"""Finds a port for a server that this process starts."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_FIRST = 10_000
_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that was free a moment ago. If possible, one that the system does not give to outgoing
    connections, because one of those could take it before the server listens. Raises: OSError.
    """
    for _ in range(_TRIES):
        with suppress(OSError):
            return _bound(host, random.randrange(_FIRST, _end()))
    return _bound(host, 0)


def _bound(host: str, port: int) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return probe.getsockname()[1]


def _end() -> int:
    """The first port that the system gives to connections."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32_768
    return first if first > _FIRST else 65_536
