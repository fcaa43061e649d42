"""Chooses the addresses at which a node's sockets listen and under which the node is registered; the two may differ.

Runs when a node starts. It reads the kernel's routing table and sends nothing.
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass

from common.base.endpoints import endpoint as endpoint_of
from common.base.errors import ConfigError
from common.cluster.redis_client import addresses_of, without_password
from common.config.service_configs import NodeConfig

log = logging.getLogger(__name__)

_EVERY_INTERFACE = ("0.0.0.0", "::", "*")  # noqa: S104 - recognized, not bound
_LOOPBACK = "127.0.0.1"
_DEFAULT_REDIS_PORT = 6379


@dataclass(frozen=True)
class HostAddresses:
    """Where a node's sockets listen on this host, and the addresses by which others reach them."""

    host: str
    """Interface to listen on."""
    advertise_host: str | None
    redis_url: str
    several_hosts: bool
    """The node's ranks are spread over several hosts."""

    @classmethod
    def of(cls, config: NodeConfig) -> HostAddresses:
        return cls(config.host, config.advertise_host, config.redis_url, config.nnodes > 1)

    def advertised(self, endpoints: str) -> str:
        """`endpoints` with the host by which others reach this node.

        `endpoints` is `tcp://HOST:PORT` as a socket reports it, or a space-separated list of data addresses such as
        `zmq+tcp://HOST:PORT`, or an admin port's `http://HOST:PORT`; endpoints other than TCP are returned unchanged. The
        host becomes `advertise_host` if that is set. Otherwise it stays, unless the socket listens on every interface:
        then it becomes the address of the interface that routes to Redis.

        Raises: ConfigError if the host of Redis cannot be resolved.
        """
        return " ".join(self._advertised_endpoint(endpoint) for endpoint in endpoints.split())

    def _advertised_endpoint(self, endpoint: str) -> str:
        scheme, _, place = endpoint.partition("://")
        if scheme not in ("http", "https") and not scheme.endswith("tcp"):
            return endpoint
        bound, _, port = place.rpartition(":")
        host = self.advertise_host
        if host is None:
            if bound.strip("[]") not in _EVERY_INTERFACE:
                return endpoint
            host = source_address(self.redis_url)
            if host.startswith("127."):
                log.warning(
                    "advertising %s, which only this machine can reach; set --advertise-host to change it", host
                )
        return endpoint_of(scheme, host, port)

    @property
    def one_interface(self) -> str:
        """One address of this host that other hosts can reach, for transports that cannot listen on every interface.

        Raises: ConfigError if no address can be chosen (see `source_address`).
        """
        return source_address(self.redis_url) if self.host in _EVERY_INTERFACE else self.host

    @property
    def for_ranks(self) -> str:
        """The address of this host at which the ranks of one node reach each other; never every interface.

        If all ranks are on this host, it is loopback regardless of `host`, so that no other host may connect.

        Raises: ConfigError if no address can be chosen (see `source_address`).
        """
        return self.one_interface if self.several_hosts else _LOOPBACK

    def for_mesh(self, *, on_gpus: bool) -> str:
        """The interface that the collectives of one node's ranks are bound to.

        On GPUs it is the one that relays use. NCCL chooses an interface once per process, when these collectives first use
        it; if it chose loopback, no relay could reach another host. Raises: ConfigError if no address can be chosen.
        """
        return self.one_interface if on_gpus else self.for_ranks


def source_address(redis_url: str) -> str:
    """The local address of a connection to Redis; loopback if Redis listens on a Unix socket.

    If the URL has several addresses, such as those of Sentinels, the first one is used. Raises: ConfigError if the URL is
    malformed, or its host cannot be resolved or has no route.
    """
    host, port = next(iter(addresses_of(redis_url)), ("", None))
    if not host:
        return _LOOPBACK
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, port or _DEFAULT_REDIS_PORT, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # on a datagram socket this only looks up the route
            return probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"cannot choose an address to advertise: no route to Redis at {without_password(redis_url)} "
            f"({error.strerror or error}); set --advertise-host"
        ) from error
