"""Formats and parses TCP endpoints, and binds and connects ZMQ sockets to them. IPv6 addresses are in brackets."""

from __future__ import annotations

import ipaddress
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
