"""Accepts TLS connections, and bounds unfinished handshakes in time and number. Runs on the asyncio loop of a service.

A connection gets its protocol when its handshake has succeeded.
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
"""Time limit of a handshake, including the wait for its first byte."""
MAX_HANDSHAKES = 512
"""Maximum unfinished handshakes. One more ends the oldest, because an honest peer would have finished that long ago."""
_MIN_S = 0.01
"""The shortest handshake timeout that is passed to asyncio, which refuses zero."""
_PAUSE_S = 0.1
"""Pause before the next attempt to accept, when the process has no file descriptor left."""


class TlsListener:
    """Accepts connections on the listening socket `sock` until `close`, which also closes the socket."""

    def __init__(
        self,
        sock: socket.socket,
        new_protocol: Callable[[], asyncio.BaseProtocol],
        new_context: Callable[[], ssl.SSLContext],
    ) -> None:
        """`new_context` is called for each connection, because certificates may have changed."""
        self._sock, self._new_protocol, self._new_context = sock, new_protocol, new_context
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self.handshakes: dict[asyncio.Task[None], None] = {}
        """Unfinished handshakes, oldest first."""
        self._accepting = self._loop.create_task(self._accept())

    def close(self) -> None:
        """Stop accepting and end unfinished handshakes; open connections stay."""
        for task in (self._accepting, *self.handshakes):
            task.cancel()
        self._sock.close()

    async def wait_closed(self) -> None:
        """Wait until no accept or handshake is in progress."""
        await asyncio.gather(self._accepting, *self.handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._sock)
            except OSError as error:
                log.warning("cannot accept a connection, retrying in %g s: %s", _PAUSE_S, error)
                await asyncio.sleep(_PAUSE_S)
                continue
            if len(self.handshakes) >= MAX_HANDSHAKES:
                oldest = next(iter(self.handshakes))
                del self.handshakes[oldest]
                oldest.cancel()
                log.warning("ended an unfinished TLS handshake: %d others are in progress", MAX_HANDSHAKES)
            task = self._loop.create_task(self._open(connection))
            self.handshakes[task] = None
            task.add_done_callback(lambda done: self.handshakes.pop(done, None))
            await asyncio.sleep(0)  # `sock_accept` does not yield while connections are waiting

    async def _open(self, connection: socket.socket) -> None:
        address, end_s = _address(connection), self._loop.time() + HANDSHAKE_S
        try:
            if not await self._says_something(connection):
                return
            left_s = max(_MIN_S, end_s - self._loop.time())
            await self._loop.connect_accepted_socket(
                self._new_protocol, connection, ssl=self._new_context(), ssl_handshake_timeout=left_s
            )
        except OSError as error:  # ssl.SSLError and the error of a timeout are OSErrors
            log.warning("refused a TLS connection: %s", why_refused(error), extra={"peer": address})

    async def _says_something(self, connection: socket.socket) -> bool:
        """Wait for the first byte. Returns False, and closes the connection, if the other end closed it before sending one,
        as a probe of the port does. Raises: TimeoutError.
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
