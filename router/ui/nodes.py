"""Asks, drains and kills nodes for the dashboard, through their admin ports. Router process, event loop."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx

from common.base.errors import Forbidden, NotFound, Unavailable
from router.admin_http import admin_address, admin_http
from router.nodes.node import Node
from router.nodes.node_table import NodeTable

_TIMEOUT_S = 3.0
"""A node whose engine is in a long step answers after 0.8 s."""


class NodeControl:
    """Calls the admin ports of nodes with the router's admin token."""

    def __init__(self, nodes: NodeTable, admin_token: str, tls_dir: str | None) -> None:
        self._nodes = nodes
        self._admin_token = admin_token
        self._tls_dir = tls_dir

    def find(self, name: str) -> Node:
        """The node with this incarnation or node id. Raises: NotFound."""
        for node in self._nodes.known():
            if name in (node.incarnation, node.node_id):
                return node
        raise NotFound(f"no node is named {name[:100]!r}")

    async def ask(self, node: Node, method: str, path: str) -> dict[str, Any]:
        """The answer of a node's admin port. Raises: Unavailable."""
        if not self._admin_token:
            raise Unavailable("this router cannot ask nodes: start all services with --admin-token")
        try:
            address = await admin_address(node.record)
        except Unavailable as error:
            raise Unavailable(f"{node.node_id}: {error.message}") from None
        try:
            async with admin_http(self._admin_token, _TIMEOUT_S, self._tls_dir) as http:
                answer = await http.request(method, address + path, json={} if method == "POST" else None)
                found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise Unavailable(f"no answer from {node.node_id}'s admin port: {error or type(error).__name__}") from None
        if answer.status_code != 200:
            raise Unavailable(f"{node.node_id}: {found.get('error', {}).get('message', answer.status_code)}")
        return found

    async def kill(self, node: Node) -> int:
        """Kill the process of a node that the same `kvrelay up` runs as this router; `up` starts it again. Returns its pid.

        Raises: Unavailable if the node does not say its pid; Forbidden if it is no process of that `kvrelay up`.
        """
        pid = (await self.ask(node, "GET", "/status"))["pid"]
        if _parent_of(pid) != os.getppid():
            raise Forbidden(
                f"{node.node_id} is no process of the `kvrelay up` that runs this router, or this is not Linux"
            )
        os.kill(pid, signal.SIGKILL)
        return pid


def _parent_of(pid: int) -> int | None:
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(about.rpartition(")")[2].split()[1])
