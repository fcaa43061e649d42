"""Formats and parses TCP endpoints, binds and connects ZMQ sockets to them, and finds free ports. IPv6 addresses are in brackets."""

from __future__ import annotations

import ipaddress
import random
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import zmq


def endpoint(scheme: str, host: str, port: int | str) -> str:
    """Return `scheme://host:port`."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tcp_place(address: str) -> tuple[str, int] | None:
    """Host and port of `tcp://host:port`; None if this is not a TCP address."""
    try:
        parts = urlsplit(address)
        return (parts.hostname, parts.port) if parts.scheme == "tcp" and parts.hostname and parts.port else None
    except ValueError:  # unbalanced bracket, or not a port number
        return None


def is_loopback(host: str) -> bool:
    """Whether `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def bind(socket: zmq.Socket[bytes], host: str, port: int) -> None:
    """Bind a socket to TCP `host`:`port`; port 0 means any free port. Raises: zmq.ZMQError."""
    if ":" in host:
        socket.setsockopt(zmq.IPV6, 1)
    socket.bind(endpoint("tcp", host, port or "*"))


def connect(socket: zmq.Socket[bytes], address: str) -> None:
    """Connect a socket to `tcp://host:port`. Raises: zmq.ZMQError."""
    if "://[" in address:
        socket.setsockopt(zmq.IPV6, 1)
    socket.connect(address)


_FIRST_PORT = 10_000
_TRIES = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port of `host` that was free a moment ago. If possible, one that the system does not give to outgoing
    connections, because one of those could take it before the server listens. Raises: OSError.
    """
    for _ in range(_TRIES):
        with suppress(OSError):
            return _bound(host, random.randrange(_FIRST_PORT, _end()))
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
    return first if first > _FIRST_PORT else 65_536
