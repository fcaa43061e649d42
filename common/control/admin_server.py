"""The admin port of a service: JSON over HTTP, protected by a token. Runs on the service's asyncio loop.

Access is denied by default: without a configured token there is no admin port, and with one every path requires it. The port
listens on its own interface (`--admin-host`, by default loopback), not on that of the clients' API. With `--tls-dir`, it uses
HTTPS on interfaces other than loopback, and callers need a certificate.
"""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.endpoints import endpoint, is_loopback
from common.base.errors import (
    BadRequest,
    ConfigError,
    KvRelayError,
    NotFound,
    PayloadTooLarge,
    RequestTimeout,
    Unauthorized,
    Unavailable,
)
from common.config.fields import check_token
from common.control.http_connection import HttpConnection, listener_of
from common.control.http_server import ConnectionLimit, HttpServer, listen
from common.security.tls import Credentials

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 4 * 2**20
_BODY_TIMEOUT_S = 10.0
_MAX_SECONDS = 86_400
_MAX_CONNECTIONS = 64
_IDLE_S = 10
"""A connection without a whole request for this long is closed."""
_GRACE_S = 1
_END_ARRIVES_S = 0.01
"""Time after a request in which the event loop reads the end of its connection; that takes one or two turns."""
DRAIN_S = 600.0
"""How long a service waits for its requests before it restarts, unless the admin request says otherwise."""


@dataclass(frozen=True)
class Call:
    """One admin request, as passed to a handler."""

    path: Mapping[str, str]
    """Values of the placeholders in the path."""
    query: Mapping[str, str]
    body: Mapping[str, Any]
    """The JSON object in the body; empty for GET."""


Handler = Callable[[Call], "Any | Awaitable[Any]"]
"""Returns the value to send as JSON, or bytes. Raises: KvRelayError, which is sent with its HTTP status."""


@dataclass(frozen=True)
class AdminRoute:
    """One endpoint, such as `GET /requests/{id}`."""

    method: str
    path: str
    handler: Handler


def seconds(call: Call, field: str, default: float) -> float:
    """Read a duration from the body. Raises: BadRequest."""
    value = call.body.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_SECONDS:
        raise BadRequest(f"{field} must be a number of seconds up to {_MAX_SECONDS}", param=field)
    return float(value)


class _TokenGuard:
    """ASGI middleware that answers requests without the token with 401, even for unknown paths, except below `open_at`."""

    def __init__(self, app: ASGIApp, token: str, open_at: tuple[str, ...]) -> None:
        self._app = app
        self._open_at = tuple(f"{path}/" for path in open_at)
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Encode it to the received bytes again: in text decoded as Latin-1, 0x85 and 0xA0 would count as spaces.
        # Compare the token even if the scheme is wrong, so that timing reveals nothing.
        right = hmac.compare_digest(given.encode("latin-1").strip(b" \t"), self._token)
        if (right and scheme.lower() == "bearer") or f"{scope['path']}/".startswith(self._open_at):
            await self._app(scope, receive, send)
            return
        await _error(Unauthorized("the admin token is missing or wrong"))(scope, receive, send)


class AdminServer:
    """Listens from construction on, and answers between `start` and `close`. With `credentials`, callers from other hosts must
    show a certificate of the same authority; on loopback it uses plain HTTP.

    Raises: ConfigError if `host`:`port` cannot be bound, or `token` is empty or not valid in a header.
    """

    def __init__(self, host: str, port: int, token: str, credentials: Credentials | None = None) -> None:
        if not token:
            raise ConfigError("an admin port needs a token")
        check_token(token)
        self._token = token
        self._credentials = None if is_loopback(host) else credentials
        self._socket = listen(host, port, backlog=_MAX_CONNECTIONS, purpose=" for admin")
        self._server: HttpServer | None = None
        self._task: asyncio.Task[None] | None = None
        bound, self.port = self._socket.getsockname()[:2]
        self.url = endpoint("http" if self._credentials is None else "https", bound, self.port)

    def start(self, routes: list[AdminRoute], mounted: Mapping[str, ASGIApp] | None = None) -> None:
        """Serve `routes` from now on, and the applications `mounted` by path, which check the token themselves."""
        app = ConnectionLimit(build(routes, self._token, mounted or {}), _MAX_CONNECTIONS, _refusal)
        config = uvicorn.Config(
            app,
            http=HttpConnection,
            loop="none",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_context_factory=None if self._credentials is None else self._secured,
        )
        self._server = HttpServer(config)
        app.connections = self._server.server_state.connections
        self._task = asyncio.get_running_loop().create_task(self._run(self._server))

    def _secured(self, *_: object) -> ssl.SSLContext:
        assert self._credentials is not None
        return self._credentials.for_server()

    async def _run(self, server: HttpServer) -> None:
        try:
            await server.serve(sockets=[self._socket])
        except Exception:  # a broken admin port must not end the service
            log.exception("the admin port failed")

    async def close(self) -> None:
        """Stop answering and release the port."""
        if self._server is not None and self._task is not None:
            self._server.stop()
            await self._task
        self._socket.close()


def build(routes: list[AdminRoute], token: str, mounted: Mapping[str, ASGIApp]) -> Starlette:
    """The ASGI application behind an admin port."""
    served: list[BaseRoute] = [Route(route.path, _endpoint(route.handler), methods=[route.method]) for route in routes]
    served += [Mount(path, app) for path, app in mounted.items()]
    return Starlette(
        routes=served,
        middleware=[Middleware(_TokenGuard, token=token, open_at=tuple(mounted))],
        exception_handlers={HTTPException: _on_http_error, KvRelayError: _on_error, Exception: _on_bug},
    )


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = {} if request.method == "GET" else await _read_call_body(request)
        answer = handler(Call(request.path_params, dict(request.query_params), body))
        value = await answer if inspect.isawaitable(answer) else answer
        return Response(value, media_type="application/octet-stream") if isinstance(value, bytes) else _json(value)

    return endpoint


async def _read_call_body(request: Request) -> dict[str, Any]:
    """Read the body of a POST, but only if its client still waits for the answer. While this process was suspended, the client
    may have reported that the request failed.

    Raises: PayloadTooLarge, RequestTimeout, BadRequest, which also means that the client has gone.
    """
    body = await read_object(request)
    await asyncio.sleep(_END_ARRIVES_S)
    if listener_of(request.scope).gone:
        log.warning("ignored %s: its client did not wait for the answer", request.url.path)
        raise BadRequest("the client has gone")
    return body


async def read_object(request: Request) -> dict[str, Any]:
    """Read the JSON object in the body of a POST; an empty body is an empty object.

    Raises: PayloadTooLarge, RequestTimeout, BadRequest.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and (len(declared) > 18 or int(declared) > MAX_BODY_BYTES):
        raise PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    data = b""
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BODY_BYTES:
                    raise PayloadTooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {_BODY_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise BadRequest("the body is incomplete") from None
    if not data:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {str(error)[:200]}") from None
    if b"\\ud" in data.lower() and not _is_unicode(value):
        raise BadRequest("the body has text that is not Unicode: a lone surrogate")
    if not isinstance(value, dict):
        raise BadRequest("the body is not a JSON object")
    return cast("dict[str, Any]", value)


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True


def _json(content: Any, status: int = 200) -> Response:
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), default=str).encode(errors="replace")
    return Response(data, status, media_type="application/json")


def _error(error: KvRelayError) -> Response:
    return _json({"error": {"code": error.code, "message": error.message}}, error.http_status)


def _refusal(_: Scope) -> Response:
    response = _error(Unavailable(f"the admin port has more than {_MAX_CONNECTIONS} open connections"))
    response.headers["connection"] = "close"
    return response


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, KvRelayError)
    response = _error(error)
    if isinstance(error, RequestTimeout) or (isinstance(error, PayloadTooLarge) and "expect" in request.headers):
        response.headers["connection"] = "close"  # the next bytes may not be the announced body
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = NotFound(f"{error.detail}: {request.method} {request.url.path[:200]}")
    known.http_status = error.status_code
    return _error(known)


async def _on_bug(request: Request, error: Exception) -> Response:
    return _error(KvRelayError("internal error in the admin port; the service's log says more"))
