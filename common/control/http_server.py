"""The uvicorn server of a service: it runs on the service's asyncio loop, is stopped by a call, and rarely wakes up when idle."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Collection, Generator, Iterable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.clock import monotonic, until_next
from common.base.errors import ConfigError
from common.control.tls_listener import TlsListener

log = logging.getLogger(__name__)

_TICK_S = 1.0
"""Period of uvicorn's housekeeping; the time in its Date header has a resolution of one second."""


def listen(
    host: str, port: int, *, backlog: int, options: Iterable[tuple[int, int]] = (), purpose: str = ""
) -> socket.socket:
    """Open a listening socket. `options`: pairs of a TCP option and its value; accepted connections inherit them.

    Raises: ConfigError if the address cannot be used; its message names the `purpose`.
    """
    with contextlib.ExitStack() as on_error:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            sock = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            for option, value in options:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
            sock.bind((host, port))
            sock.listen(backlog)
            sock.setblocking(False)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"cannot listen on {host}:{port}{purpose}: {reason}") from error
        on_error.pop_all()
        return sock


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers and with one wake-up a second instead of ten. Stop it by `stop`, not `should_exit`."""

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], None] = lambda: None) -> None:
        """on_end: called when `serve` has ended all connections."""
        super().__init__(config)
        self._stopping = asyncio.Event()
        self._on_end = on_end

    @property
    def busy(self) -> int:
        """Number of requests whose answers are not complete."""
        return len(self.server_state.tasks)

    def stop(self) -> None:
        """Make `serve` end; open connections may finish within the configured time."""
        self.should_exit = True
        self._stopping.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on `sockets`; with TLS, unfinished handshakes are bounded."""
        context: Any = self.config.ssl_context_factory
        if context is None or sockets is None:
            await super().startup(sockets)
            return
        await self.lifespan.startup()
        new: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        made = partial(new, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        self.servers: list[Any] = [TlsListener(sock, made, partial(context, self.config, None)) for sock in sockets]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what `startup` began."""
        await super().shutdown(sockets)
        self._on_end()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave the signals to the service."""
        yield

    async def main_loop(self) -> None:
        """Run until `stop`."""
        while not await self.on_tick(0):  # uvicorn renews the Date header in ticks that are multiples of ten
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_next(_TICK_S, monotonic())):
                    await self._stopping.wait()


class ConnectionLimit:
    """Passes requests to `app` within the limit. Set `connections` to the server's open connections.

    uvicorn has such a limit, too, but answers with plain text, and clients then show only the status.
    """

    def __init__(self, app: ASGIApp, most: int, refusal: Callable[[Scope], ASGIApp]) -> None:
        """`refusal` makes the answer to a request beyond the limit."""
        self.connections: Collection[object] = ()
        self._app = app
        self._most = most
        self._refusal = refusal
        self._is_full = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        full = len(self.connections) > self._most
        if full and not self._is_full:
            log.warning("refusing requests: more than %d connections are open", self._most)
        self._is_full = full
        await (self._refusal(scope) if full else self._app)(scope, receive, send)
