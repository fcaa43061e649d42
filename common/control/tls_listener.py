"""Accepts connections over TLS: unfinished handshakes are bounded in time and number. Runs on the asyncio loop of a service.

A connection's protocol hears of it once its handshake has succeeded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable

from common.security.tls import why_refused

log = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Time limit of a handshake, with the wait for its first byte."""
MAX_HANDSHAKES = 512
"""Unfinished handshakes; one more ends the oldest, which a peer that means well has finished long ago."""
_LEAST_S = 0.01
"""The shortest handshake timeout that is passed to asyncio, which refuses zero."""
_PAUSE_S = 0.1
"""Pause before the next attempt to accept, when the process has no file descriptor left."""


class TlsListener:
    """Accepts from the listening `sock`, which it closes, until `close`."""

    def __init__(
        self,
        sock: socket.socket,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        new_context: Callable[[], ssl.SSLContext],
    ) -> None:
        """`new_context` is called for each connection: certificates may have changed."""
        self._sock, self._new_protocol, self._new_context = sock, new_protocol, new_context
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """In the order of their beginning."""
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting and end unfinished handshakes; open connections stay."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """Return once nothing of it is under way."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    @property
    def unfinished(self) -> int:
        """Number of handshakes that have begun and not ended."""
        return len(self._handshakes)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:
                log.warning("cannot accept a connection, retrying in %g s: %s", _PAUSE_S, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
                log.warning("ended an unfinished TLS handshake: %d others are under way", MAX_HANDSHAKES)
            task = self._loop.create_task(self._open(connection))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))
            await asyncio.sleep(0)  # `sock_accept` does not wait while connections are there

    async def _open(self, connection: socket.socket) -> None:
        address, end_s = _address(connection), self._loop.time() + HANDSHAKE_S
        try:
            if not await self._says_something(connection):
                return
            left_s = max(_LEAST_S, end_s - self._loop.time())
            await self._loop.connect_accepted_socket(
                self._new_protocol, connection, ssl=self._new_context(), ssl_handshake_timeout=left_s
            )
        except OSError as error:  # ssl.SSLError is one, and what a timeout raises
            log.warning("refused a TLS connection: %s", why_refused(error), extra={"peer": address})

    async def _says_something(self, connection: socket.socket) -> bool:
        """Whether anything arrives; a connection that is closed again only asked whether the port is open.

        It is closed here where nothing does. Raises: TimeoutError.
        """
        readable: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection, lambda: readable.done() or readable.set_result(None))
        arrived = False
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await readable
            with contextlib.suppress(ConnectionError):
                arrived = bool(connection.recv(1, socket.MSG_PEEK))
        finally:
            self._loop.remove_reader(connection)
            if not arrived:
                connection.close()
        return arrived


def _address(connection: socket.socket) -> str:
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0])
    return ""
