"""The router process: puts the parts together and runs them until it is told to stop.

One process, one event loop. `serve` is what `kvrelay router` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Generator

import uvicorn

from common.base.errors import ConfigError, Unavailable
from common.base.process import allow_files
from common.cluster.membership import LEASE_IN_REDIS, Directory
from common.config.options import RouterConfig
from common.control.admin_server import AdminServer
from common.control.messages import NodeRecord
from router.admin import RouterAdmin
from router.fast import gc_policy
from router.fast.endpoints import Front
from router.fast.http_connection import Connection
from router.http.api import Services, body_deadlines, build
from router.index.kv_event_subscriber import Follower
from router.index.metrics import IndexCollector
from router.index.prefix_index import PrefixIndex
from router.metrics import Metrics
from router.model_catalog import ModelCatalog
from router.requests.admission import Objectives
from router.requests.dispatch import Dispatcher, DispatchSettings

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0
"""A body that has not arrived by then is given up."""
_MAX_CONNECTIONS = 16_384
"""Beyond so many open connections or requests, uvicorn answers 503 by itself; idle connections count."""
_OTHER_FILES = 4096
"""Descriptors for everything else: the links to the nodes above all."""
_UNREAD_S = 60.0
"""A client that takes nothing of what was sent to it for so long loses its connection, and its place among them."""
_IDLE_S = 65
"""An idle connection is kept for longer than load balancers and clients keep theirs (a minute is usual): what is sent on one
that the router gives up at that moment is lost, and their users get a 502.
"""
_GRACE_S = 3.0
"""For connections to end once every request was told that the router stops."""


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: whoever runs `serve` cancels it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class Router:
    """All parts of a router, without the HTTP server and Redis. Must be made on the event loop.

    Raises: ConfigError for an unknown policy.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.metrics = Metrics()
        self.catalog = ModelCatalog(
            model=config.model,
            served_model_name=config.served_model_name,
            chat_template=config.chat_template,
            generation_config=config.generation_config,
        )
        settings = DispatchSettings(
            lease_s=config.lease_s,
            request_timeout_s=config.request_timeout_s,
            max_waiting=config.max_waiting,
            local_prefill_tokens=config.local_prefill_tokens,
            policy=config.policy,
            max_attempts=config.max_attempts,
            objectives=Objectives(config.slo_ttft, config.slo_tpot),
            max_queue_wait_s=config.max_queue_wait_s,
        )
        self.index = PrefixIndex(config.index_blocks)
        self.dispatcher = Dispatcher(settings, self.metrics, index=self.index)
        self.metrics.watch_nodes(self.dispatcher.nodes.known, self.dispatcher.breakers)
        self.follower: Follower | None = None
        self.metrics.watch_queue(
            lambda: self.dispatcher.running,
            lambda: self.dispatcher.waiting,
            lambda: len(self.dispatcher.admission_queue),
        )

    def set_nodes(self, records: list[NodeRecord]) -> None:
        """Take over what membership lists now."""
        accepted = self.catalog.accept(records)
        self.dispatcher.set_nodes(accepted)
        if self.follower is not None:
            self.follower.set_nodes(accepted)

    def follow(self, redis_url: str, cluster: str) -> Follower:
        """Have the prefix index follow what nodes publish there; run what this returns."""
        nodes = self.dispatcher.nodes
        loads = lambda: {node.incarnation: node.load for node in nodes.known()}  # noqa: E731
        self.follower = Follower(redis_url, cluster, self.index, loads=loads)
        self.metrics.registry.register(IndexCollector(self.index, self.follower))
        return self.follower

    def degraded(self, directory: Directory | None) -> str:
        """What of Redis is missing, in a few words; empty when nothing is."""
        follower = self.follower
        if (directory is not None and directory.degraded) or (follower is not None and follower.away):
            return "away: serving with the nodes known"
        if directory is not None and directory.unrenewed:
            return f"{len(directory.unrenewed)} nodes answer whose records have ended: it takes no writes"
        if follower is not None and follower.silent:
            return f"{len(follower.silent)} nodes' blocks never reached the prefix index"
        return ""

    def close(self) -> None:
        """End all requests, close all links."""
        self.catalog.close()
        self.dispatcher.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises: ConfigError when the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # the second: what no host can be called
        raise ConfigError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; its connections inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * _UNREAD_S))
        sock.bind((host, port))
        sock.listen(1024)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


def _most_connections() -> int:
    files = allow_files(_MAX_CONNECTIONS + _OTHER_FILES)
    return min(_MAX_CONNECTIONS, max(files - _OTHER_FILES, files // 2))


def http_server(router: Router, config: RouterConfig, directory: Directory | None) -> uvicorn.Server:
    """The HTTP server over a router; not started."""
    services = Services(
        dispatcher=router.dispatcher,
        catalog=router.catalog,
        metrics=router.metrics,
        degraded=lambda: router.degraded(directory),
        max_body_bytes=int(config.max_body_mb * 1e6),
        bodies=body_deadlines(BODY_TIMEOUT_S),
        api_keys=tuple(key.strip() for key in config.api_key.split(",") if key.strip()),
    )
    settings = uvicorn.Config(
        Front(build(services), services.api_keys, services.metrics.http_error),
        proxy_headers=False,
        http=Connection,
        loop="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=1024,
        limit_concurrency=_most_connections(),
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=int(_GRACE_S),
    )
    return _Server(settings)


async def serve(config: RouterConfig) -> None:
    """Serve until cancelled; then tell every open request, and return in order.

    Raises: ConfigError, one sentence, when the configuration cannot work.
    """
    sock = bind(config.host, config.port)
    try:
        router = Router(config)
        await router.catalog.load_configured()
    except BaseException:
        sock.close()
        raise
    admin = AdminServer(config.admin_host, config.admin_port, config.admin_token) if config.admin_token else None
    directory = Directory(
        config.redis_url,
        config.cluster,
        router.set_nodes,
        poll_s=min(0.5, config.lease_s * (1 - LEASE_IN_REDIS)),
        grace_s=config.lease_s,
        answers=router.dispatcher.nodes.answers,
    )
    follower = router.follow(config.redis_url, config.cluster)
    server = http_server(router, config, directory)
    host, port = sock.getsockname()[:2]
    log.info("listening on http://%s:%d", host, port)
    if admin is not None:
        admin.start(RouterAdmin(router, config, directory).routes())
        log.info("admin at %s", admin.url)
    http = asyncio.create_task(server.serve(sockets=[sock]))
    background = [asyncio.create_task(part.run()) for part in (directory, follower, router.dispatcher)]
    background.append(asyncio.create_task(gc_policy.run(lambda: router.dispatcher.running)))
    try:
        # Background tasks run for ever: the first to end is the server, or a bug that must not go unseen.
        await asyncio.wait([http, *background], return_when=asyncio.FIRST_COMPLETED)
    finally:
        router.dispatcher.fail_all(Unavailable("the router is shutting down; try again"))
        server.should_exit = True
        for task in background:
            task.cancel()
        results = await asyncio.gather(http, *background, return_exceptions=True)
        if admin is not None:
            await admin.close()
        router.close()
        sock.close()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
