"""Notices that a client disconnects before its answer. Runs on the router's event loop."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive


async def cancel_on_disconnect(receive: Receive, cancel: Callable[[], None]) -> None:
    """Call `cancel` once the client has disconnected. `receive`: of a request whose body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
    cancel()
