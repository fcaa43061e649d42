"""Finds ports for the routers of `kvrelay up`, which are equals and share only Redis. Main thread, before anything runs."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from common.base.endpoints import free_port
from common.base.errors import ConfigError
from common.config.fields import HIGHEST_PORT
from common.config.service_configs import UpConfig
from kvrelay.up.health import connect_host

ADMIN_HOST = "127.0.0.1"
"""Interface of every service's admin port: only users of this machine reach it."""


@dataclass(frozen=True)
class RouterPlace:
    """Name and ports of one router: `port` for clients, `admin_port` for `kvrelay admin`."""

    name: str
    port: int
    admin_port: int
    url: str
    """URL of the API, reachable from this machine."""
    admin_url: str


def router_places(config: UpConfig) -> list[RouterPlace]:
    """A place for each router: consecutive ports from `port` and `admin_port`, or free ones if that is 0.

    Raises: ConfigError if a port is taken or not permitted.
    """
    names = ["router"] if config.routers == 1 else [f"router-{index}" for index in range(config.routers)]
    # All ports stay bound until the last one is chosen, so that none is chosen twice.
    with contextlib.ExitStack() as bound:
        ports = _find_ports(bound, names, config.host, config.port, "--port")
        admin_ports = _find_ports(bound, names, ADMIN_HOST, config.admin_port, "--admin-port")
    host, scheme = connect_host(config.host), "https" if config.ssl_certfile else "http"
    return [
        RouterPlace(name, port, admin_port, f"{scheme}://{host}:{port}", f"http://{ADMIN_HOST}:{admin_port}")
        for name, port, admin_port in zip(names, ports, admin_ports, strict=True)
    ]


def _find_ports(bound: contextlib.ExitStack, names: list[str], host: str, first: int, option: str) -> list[int]:
    """One port for each of `names`, listened on until `bound` closes."""
    if first + len(names) - 1 > HIGHEST_PORT:
        raise ConfigError(f"{option} {first} leaves no port for {names[HIGHEST_PORT - first + 1]}")
    ports: list[int] = []
    for index, name in enumerate(names):
        port = first + index
        try:
            port = port if first else free_port(host)
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            holder = bound.enter_context(socket.socket(family, kind, protocol))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
            holder.listen()  # two sockets that are only bound may share a port
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            who = "" if len(names) == 1 else f"{name}: "
            raise ConfigError(
                f"{who}cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; choose another {option}"
            ) from error
        ports.append(holder.getsockname()[1])
    return ports
