"""Actions of the playground: conversations without an API key, and killing a node. Router process, event loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import Forbidden
from router.http.client import client_of, note_client
from router.nodes.node import Node
from router.ui.access import Access
from router.ui.nodes import NodeControl

CHAT_PATH = "/v1/chat/completions"


class Chat:
    """ASGI application: the router's own chat endpoint for callers that `access` admits.

    They need no API key and are distinguished by their address, like the API's clients without keys.
    """

    def __init__(
        self, access: Access, endpoint: Callable[[], ASGIApp], on_call: Callable[[], None] = lambda: None
    ) -> None:
        """`endpoint`: the application that answers `CHAT_PATH`, once it exists. `on_call()` is called before each chat."""
        self._access = access
        self._endpoint = endpoint
        self._on_call = on_call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._access.check_chat(scope)
        self._on_call()
        asked = {**scope, "path": CHAT_PATH, "raw_path": CHAT_PATH.encode(), "root_path": "", "query_string": b""}
        note_client(asked, client_of(scope))
        await self._endpoint()(asked, receive, send)


async def kill(node: Node, control: NodeControl) -> int:
    """Kill the process of a node that the same `kvrelay up` runs as this router; `up` starts it again. Returns its pid.

    Raises: Unavailable if the node does not say its pid; Forbidden if it is no process of that `kvrelay up`.
    """
    pid = (await control.ask(node, "GET", "/status"))["pid"]
    if _parent_of(pid) != os.getppid():
        raise Forbidden(f"{node.node_id} is no process of the `kvrelay up` that runs this router, or this is not Linux")
    os.kill(pid, signal.SIGKILL)
    return pid


def _parent_of(pid: int) -> int | None:
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(about.rpartition(")")[2].split()[1])
