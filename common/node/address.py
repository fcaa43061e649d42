"""Under which address a node is registered, which need not be the one that its sockets listen on.

Runs once at a node's start, on its asyncio loop; asks the kernel's routing table, sends nothing.
"""

from __future__ import annotations

import logging
import re
import socket
from urllib.parse import urlsplit

from common.base.errors import ConfigError
from common.cluster.redis_client import without_password
from common.config.options import NodeConfig

log = logging.getLogger(__name__)

_EVERY_INTERFACE = ("0.0.0.0", "::", "*", "")
_LOOPBACK = "127.0.0.1"
_DEFAULT_REDIS_PORT = 6379


def advertised(endpoints: str, config: NodeConfig) -> str:
    """`endpoints` (`tcp://HOST:PORT` as a socket reports it, or several with spaces between, as a rank's data address
    lists them: `zmq+tcp://HOST:PORT`) as others must write them to reach this node. What is no TCP stays as it is.

    A host is `config.advertise_host` where that is set. Else it stays, unless the socket listens on every
    interface: then it becomes the address of the interface that routes to Redis.

    Raises: ConfigError if `advertise_host` is no host, or Redis' host cannot be resolved.
    """
    if config.advertise_host is not None:
        _check_host(config.advertise_host)
    return " ".join(_advertised_endpoint(endpoint, config) for endpoint in endpoints.split())


def _advertised_endpoint(endpoint: str, config: NodeConfig) -> str:
    scheme, _, place = endpoint.partition("://")
    if not scheme.endswith("tcp"):
        return endpoint
    bound, _, port = place.rpartition(":")
    host = config.advertise_host
    if host is None:
        if bound.strip("[]") not in _EVERY_INTERFACE:
            return endpoint
        host = source_address(config.redis_url)
        if host.startswith("127."):
            log.warning("advertising %s, which only this machine can reach; --advertise-host changes it", host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def rank_host(config: NodeConfig) -> str:
    """The address of this host by which the ranks of one node talk to each other; never every interface.

    Loopback where all are on this host, whatever `--host` is: nobody else is to reach them.

    Raises: ConfigError as `source_address`.
    """
    return _LOOPBACK if config.nnodes == 1 else one_interface(config)


def one_interface(config: NodeConfig) -> str:
    """One address of this host by which other hosts reach it, for what cannot listen on every interface.

    Raises: ConfigError as `source_address`.
    """
    return source_address(config.redis_url) if config.host in _EVERY_INTERFACE else config.host


def mesh_interface(config: NodeConfig, *, on_gpus: bool) -> str:
    """What the exchanges among the ranks of one node are bound to.

    On cards the same as a relay's: NCCL settles on one interface when a process first uses it, which is for these, and
    from loopback no relay would reach another host. Raises: ConfigError as `source_address`.
    """
    return one_interface(config) if on_gpus else rank_host(config)


def source_address(redis_url: str) -> str:
    """The address from which this machine would talk to Redis; loopback for a Redis behind a Unix socket.

    Raises: ConfigError if its host cannot be resolved or reached by any route.
    """
    parts = urlsplit(redis_url)
    if not parts.hostname:
        return _LOOPBACK
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or _DEFAULT_REDIS_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket: only looks up the route
            return probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"no route to Redis at {without_password(redis_url)} tells which address to advertise "
            f"({error.strerror or error}); give --advertise-host"
        ) from error


def _check_host(host: str) -> None:
    if host in _EVERY_INTERFACE or re.search(r"[\s/@\[\]]", host) or re.fullmatch(r"[^:]*:\d+", host):
        raise ConfigError(
            f"advertise_host must be a name or an address that others can reach, without a port; not {host!r}"
        )
