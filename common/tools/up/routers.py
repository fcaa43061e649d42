"""Where the routers of `kvrelay up` listen. None is special: they share nothing but Redis. Main thread, before anything runs."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from common.base.errors import ConfigError
from common.config.options import UpConfig
from common.tools.up.health import connect_host

ADMIN_HOST = "127.0.0.1"
"""Of every service's admin port: whoever may use it has an account on this machine."""

_LAST_PORT = 65535


@dataclass(frozen=True)
class RouterPlace:
    """One router: its name, and its ports for clients and for `kvrelay admin`."""

    name: str
    port: int
    admin_port: int
    url: str
    """Of the API, as it is reached from this machine."""
    admin_url: str


def router_places(config: UpConfig) -> list[RouterPlace]:
    """A place for each router: consecutive ports from `port` and `admin_port` on, or any free ones where that is 0.

    Raises: ConfigError if a port is taken, or is not ours to take.
    """
    names = ["router"] if config.routers == 1 else [f"router-{index}" for index in range(config.routers)]
    # All are held until all are found: no free port is found twice, no admin port is another router's port.
    with contextlib.ExitStack() as held:
        ports = _find_ports(held, names, config.host, config.port, "--port")
        admin_ports = _find_ports(held, names, ADMIN_HOST, config.admin_port, "--admin-port")
    host = connect_host(config.host)
    return [
        RouterPlace(name, port, admin_port, f"http://{host}:{port}", f"http://{ADMIN_HOST}:{admin_port}")
        for name, port, admin_port in zip(names, ports, admin_ports, strict=True)
    ]


def _find_ports(held: contextlib.ExitStack, names: list[str], host: str, first: int, option: str) -> list[int]:
    """One port for each of `names`, listened on until `held` ends."""
    if first + len(names) - 1 > _LAST_PORT:
        raise ConfigError(f"{option} {first} leaves no port for {names[_LAST_PORT - first + 1]}")
    ports: list[int] = []
    for index, name in enumerate(names):
        port = first + index if first else 0
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            holder = held.enter_context(socket.socket(family, kind, protocol))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(address)
            holder.listen()  # two sockets that are only bound may share a port
        except (OSError, UnicodeError) as error:  # the second: what no host can be called
            who = "" if len(names) == 1 else f"{name}: "
            raise ConfigError(
                f"{who}cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}; choose another {option}"
            ) from error
        ports.append(holder.getsockname()[1])
    return ports
