"""Limits of a control socket: number of connections, time until a frame is complete, and bytes of unfinished frames.

Runs on the asyncio loop of a node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from common.control.frames import FrameConnection

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
"""Maximum number of connections of routers and prefill nodes to one node."""
MAX_UNFINISHED_BYTES = 256 * 2**20
"""Maximum bytes of unfinished frames of all connections; the limit of one connection is that of a frame."""
_WAIT_S = 30.0
"""A connection must send its first frame within this time, and complete each frame within this time after its beginning."""
_CHECK_S = 5.0


class ConnectionLimits:
    """Enforces the limits for the connections of one server.

    `connections`: the open ones by identity, as the server keeps them. `drop(identity, why)` must close one and remove it.
    """

    def __init__(self, connections: Mapping[bytes, FrameConnection], drop: Callable[[bytes, str], None]) -> None:
        self._connections, self._drop = connections, drop
        self._loop = asyncio.get_running_loop()
        self._check = self._loop.call_later(_CHECK_S, self._drop_stalled)
        self._is_full = False

    def may_open(self) -> bool:
        """Whether there is room for one more connection."""
        full = len(self._connections) >= MAX_CONNECTIONS
        if full and not self._is_full:
            log.warning("refused a control connection: %d are open", MAX_CONNECTIONS)
        self._is_full = full
        return not full

    def grew(self) -> None:
        """Handle the growth of an unfinished frame: if all such frames exceed the limit, drop the connection of the largest."""
        sizes = {identity: connection.unfinished_bytes for identity, connection in self._connections.items()}
        if sum(sizes.values()) > MAX_UNFINISHED_BYTES:
            largest = max(sizes, key=sizes.__getitem__)
            self._drop(largest, "unfinished frames take too much memory, and this one the most")

    def close(self) -> None:
        """Stop watching."""
        self._check.cancel()

    def _drop_stalled(self) -> None:
        self._check = self._loop.call_later(_CHECK_S, self._drop_stalled)
        before_s = self._loop.time() - _WAIT_S
        for identity in [name for name, each in self._connections.items() if each.waiting_since_s < before_s]:
            self._drop(identity, f"it sent no whole frame for {_WAIT_S:g} s")
