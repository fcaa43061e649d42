"""The router process: starts all parts and runs them until a signal or an operator stops it.

One process, one event loop. `serve` is what `kvrelay router` runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from typing import cast

from starlette.types import ASGIApp

from common.base.endpoints import endpoint
from common.base.errors import Unavailable
from common.cluster.membership import LEASE_IN_REDIS, Directory
from common.cluster.running_clusters import runtime_folder
from common.config.service_configs import RouterConfig
from common.control.admin_server import AdminServer
from common.control.http_server import HttpServer
from common.control.self_report import SelfReport, public_options
from common.security.expiry import warn_before_end
from common.security.tls import open_credentials
from router import gc_policy
from router.admin import RouterAdmin
from router.http.https import https_certificate
from router.http.response_store import ResponseStore
from router.http.server import bind, http_server
from router.planner.loop import PlannerLoop
from router.restart import Restart
from router.router import Router
from router.ui.access import Access, trusts_loopback
from router.ui.app import PATH
from router.ui.routes import DashboardRoutes

log = logging.getLogger(__name__)

_KNOWS_S, _LOOK_S = 2.0, 0.01
"""Time in which a new router learns of the nodes, and the pause between two checks."""


async def serve(config: RouterConfig) -> None:
    """Serve until cancelled; then end every open request with an error that says why, and shut down.

    Raises: ConfigError with one sentence when the configuration cannot work; RestartRequested.
    """
    https_certificate(config.ssl_certfile, config.ssl_keyfile)
    sock = bind(config.host, config.port)
    try:
        router = Router(config)
        await router.catalog.load_configured()
    except BaseException:
        sock.close()
        raise
    admin = _admin_server(config)
    directory = _directory(router, config)
    subscriber = router.subscribe(config.redis_url, config.cluster)
    most = config.max_stored_responses
    responses = ResponseStore(config.redis_url, config.cluster, most) if most else None
    planner = None
    if config.planner != "off":
        planner = PlannerLoop(config, router.dispatcher, router.metrics.export_desired)
    pages = DashboardRoutes(router, config.admin_token, directory, planner)
    trusted = trusts_loopback(os.getppid(), runtime_folder(os.environ))
    ui = pages.application(Access(config.admin_token or "", trusted))
    server = http_server(router, config, directory, responses, ui)
    pages.chat_endpoint = cast("ASGIApp", server.config.app)
    restart = Restart(router.dispatcher, lambda: server.busy)
    if admin is not None:
        admin.start(
            RouterAdmin(router, directory, restart, planner).routes()
            + SelfReport(public_options(config), config.tls_dir).routes(),
            {PATH: pages.application(Access(config.admin_token, open=False))},
        )
        log.info("admin at %s", admin.url)
    scheme = "https" if config.ssl_certfile else "http"
    http = asyncio.create_task(_take_requests(server, sock, scheme, router, directory))
    parts = (directory, subscriber, router.dispatcher, restart, pages, *filter(None, [planner]))
    background = [asyncio.create_task(part.run()) for part in parts]
    if config.tls_dir is not None:
        background.append(asyncio.create_task(warn_before_end(config.tls_dir)))
    background.append(asyncio.create_task(gc_policy.run(lambda: router.dispatcher.running)))
    try:
        # The first task that ends is the server's, that of a restart, or one with a bug, which must be reported.
        await asyncio.wait([http, *background], return_when=asyncio.FIRST_COMPLETED)
    finally:
        router.dispatcher.fail_all(Unavailable("the router is shutting down; try again"))
        server.stop()
        for task in background if server.started else (http, *background):
            task.cancel()
        results = await asyncio.gather(http, *background, return_exceptions=True)
        if admin is not None:
            await admin.close()
        if responses is not None:
            await responses.close()
        router.close()
        sock.close()
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


async def _take_requests(
    server: HttpServer, sock: socket.socket, scheme: str, router: Router, directory: Directory
) -> None:
    """Serve HTTP once the registered nodes answer and their models are loaded, or `_KNOWS_S` later.

    A router that has restarted would refuse requests until it knows its nodes again.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_KNOWS_S):
            await directory.polled.wait()
            while router.catalog.is_loading or not all(node.works for node in router.dispatcher.nodes.known()):
                await asyncio.sleep(_LOOK_S)
    host, port = sock.getsockname()[:2]
    log.info("listening on %s", endpoint(scheme, host, port))
    await server.serve(sockets=[sock])


def _admin_server(config: RouterConfig) -> AdminServer | None:
    if not config.admin_token:
        return None
    return AdminServer(config.admin_host, config.admin_port, config.admin_token, open_credentials(config.tls_dir))


def _directory(router: Router, config: RouterConfig) -> Directory:
    directory = Directory(
        config.redis_url,
        config.cluster,
        router.set_nodes,
        poll_s=min(0.5, config.lease_s * (1 - LEASE_IN_REDIS)),
        grace_s=config.lease_s,
        answers=router.dispatcher.nodes.answers,
        idle=lambda: router.dispatcher.nodes.idle,
        tls_dir=config.tls_dir,
    )
    router.metrics.watch_records(lambda: len(directory.unrenewed))
    return directory
