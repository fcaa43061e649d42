"""The HTTP server of a router: its listening socket, uvicorn, and the application in it. Router process, event loop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import cast

import uvicorn
from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import KvRelayError, Unavailable
from common.base.process import allow_files
from common.cluster.membership import Directory
from common.config.fields import api_keys, listed
from common.config.service_configs import RouterConfig
from common.control.http_connection import HttpConnection
from common.control.http_server import ConnectionLimit, HttpServer, listen
from router.http.api import Services, build
from router.http.api_keys import KeyGuard
from router.http.body import body_deadlines
from router.http.body_work import BodyWork
from router.http.direct_endpoints import DirectEndpoints
from router.http.hosts import HostGuard
from router.http.https import https_certificate
from router.http.key_limits import LIMIT_HEADERS, ApiKeys
from router.http.response_headers import OWN_HEADERS
from router.http.response_store import ResponseStore
from router.http.responses import error_response
from router.models.adapter_control import AdapterControl
from router.router import Router

log = logging.getLogger(__name__)


class WithRootPath:
    """Takes the path off requests, which a proxy may have taken off already. `root_path`: such as `/llm`."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._root_path or path.startswith(f"{self._root_path}/"):
            inner = path.removeprefix(self._root_path) or "/"
            scope = {**scope, "path": inner, "raw_path": inner.encode()}
        await self._app(scope, receive, send)


BODY_TIMEOUT_S = 60.0
"""Time limit for a request body to arrive."""
_MAX_CONNECTIONS = 16_384
"""Maximum of open connections, idle ones included; beyond it requests get 503."""
_FEW_CONNECTIONS = 1024
"""A lower maximum is logged as a warning."""
_OTHER_FILES = 4096
"""File descriptors reserved for everything else, mainly the links to the nodes."""
_UNREAD_S = 60.0
"""Time without reading after which a client's connection is closed."""
_GRACE_S = 3.0
"""Time for connections to end once every request was told that the router stops."""

_SHOWN_SETTINGS = ("cluster", "policy", "max_body_mb", "max_waiting", "request_timeout_s", "generation_config")
_EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", *LIMIT_HEADERS, *OWN_HEADERS)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises: ConfigError when the address cannot be used."""
    # uvloop sets it itself; asyncio does not where the protocol is left to the kernel.
    options = [(socket.TCP_NODELAY, 1)]
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux only
        options.append((socket.TCP_USER_TIMEOUT, int(1000 * _UNREAD_S)))
    return listen(host, port, backlog=1024, options=options)


def _most_connections() -> int:
    files = allow_files(_MAX_CONNECTIONS + _OTHER_FILES)
    most = min(_MAX_CONNECTIONS, max(files - _OTHER_FILES, files // 2))
    if most < _FEW_CONNECTIONS:
        log.warning(
            "takes at most %d connections at a time, others get 503: only %d file descriptors are allowed; raise the limit "
            "(ulimit -n 65536, LimitNOFILE= of systemd)",
            most,
            files,
        )
    return most


def _refusal(on_error: Callable[[KvRelayError], None], scope: Scope) -> ASGIApp:
    error = Unavailable("this router has too many open connections; try again shortly")
    on_error(error)
    return error_response(error, scope, [(b"connection", b"close")])


def _with_cors(app: ASGIApp, config: RouterConfig) -> ASGIApp:
    """`app`, also under the root path; with allowed origins, behind a middleware that answers preflights, which carry no key, and adds the headers to
    every answer.
    """
    app = WithRootPath(app, config.root_path) if config.root_path else app
    origins = listed("allowed_origins", config.allowed_origins)
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=listed("allowed_methods", config.allowed_methods),
        allow_headers=listed("allowed_headers", config.allowed_headers),
        allow_credentials=config.allow_credentials,
        expose_headers=_EXPOSED_HEADERS,
    )


def _add_root(app: FastAPI, root_path: str, dashboard: ASGIApp | None) -> None:
    """`GET /`, by which ollama's clients find out whether there is a server. With a dashboard, which is served at `/ui`, it leads
    a browser there. `root_path`: where a proxy shows the router."""
    app.root_path = root_path
    if dashboard is not None:
        app.mount("/ui", dashboard)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        if dashboard is not None and "text/html" in request.headers.get("accept", ""):
            return RedirectResponse("/ui/", 303)
        return PlainTextResponse("kvrelay is running")


def _services(
    router: Router, config: RouterConfig, directory: Directory | None, responses: ResponseStore | None
) -> Services:
    """What the routes work with."""
    return Services(
        dispatcher=router.dispatcher,
        catalog=router.catalog,
        metrics=router.metrics,
        adapters=AdapterControl(
            router.dispatcher.nodes,
            router.catalog,
            folder=config.lora_dir if config.allow_runtime_lora else None,
            admin_token=config.admin_token,
            tls_dir=config.tls_dir,
        ),
        degraded=lambda: router.degraded(directory),
        max_body_bytes=int(config.max_body_mb * 1e6),
        body_deadlines=body_deadlines(BODY_TIMEOUT_S),
        body_work=BodyWork(int(config.max_body_mb * 1e6)),
        api_keys=ApiKeys(api_keys(config.api_key), Path(config.api_key_file) if config.api_key_file else None),
        responses=responses,
        options=config,
        settings={name: getattr(config, name) for name in _SHOWN_SETTINGS},
    )


def http_server(
    router: Router,
    config: RouterConfig,
    directory: Directory | None,
    responses: ResponseStore | None = None,
    dashboard: ASGIApp | None = None,
) -> HttpServer:
    """The HTTP server of a router; not started. `dashboard` is served at `/ui` unless API keys are set.

    Raises: ConfigError if the files for HTTPS cannot be used.
    """
    services = _services(router, config, directory, responses)
    app = build(services)
    _add_root(app, config.root_path, None if services.api_keys else dashboard)
    direct = DirectEndpoints(app, lambda inner: KeyGuard(inner, services.api_keys, services.metrics.http_error))
    names = [*listed("allowed_hosts", config.allowed_hosts), config.host]
    hosts = HostGuard(direct, services.api_keys, names, services.metrics.http_error)
    limited = ConnectionLimit(hosts, _most_connections(), partial(_refusal, services.metrics.http_error))
    certificate = https_certificate(config.ssl_certfile, config.ssl_keyfile)
    settings = uvicorn.Config(
        _with_cors(limited, config),
        proxy_headers=False,
        http=HttpConnection,
        loop="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=1024,
        ssl_context_factory=None if certificate is None else certificate.make_context,
        timeout_keep_alive=cast("int", config.idle_connection_timeout_s),  # passed to `call_later`
        timeout_graceful_shutdown=int(_GRACE_S),
    )
    server = HttpServer(settings, services.body_work.close)
    limited.connections = server.server_state.connections
    return server
