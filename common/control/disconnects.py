"""Tells a request's handler that its client has disconnected. Runs on the event loop of a service."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

DISCONNECTS = "kvrelay.disconnects"
"""Key of a request's `DisconnectListener` in its ASGI scope."""


class DisconnectListener:
    """Calls back when the client of one connection disconnects. A connection answers one request at a time.

    A callback costs far less than a task per request that waits for ASGI's `http.disconnect`.
    """

    __slots__ = ("_on_gone", "gone")

    def __init__(self) -> None:
        self.gone = False
        """Whether the client has disconnected."""
        self._on_gone: Callable[[], None] | None = None

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Call `on_gone` when the client disconnects, at once if it has already; None ends the watch."""
        self._on_gone = on_gone
        if self.gone and on_gone is not None:
            on_gone()

    def leave(self) -> None:
        """Note that the client has disconnected."""
        self.gone = True
        if self._on_gone is not None:
            self._on_gone()


def listener_of(scope: Scope) -> DisconnectListener:
    """The listener of the request's connection."""
    return scope[DISCONNECTS]
