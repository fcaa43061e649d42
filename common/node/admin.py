"""What a node's admin port tells and does. Runs on the node's asyncio loop; the engine is asked on its own thread."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.config.options import NodeConfig
from common.control.admin_server import AdminRoute, AdminServer, Call
from common.control.messages import NodeRecord
from common.node.address import advertised

if TYPE_CHECKING:
    from common.node.server import NodeServer

_ENGINE_ANSWERS_S = 5.0
"""An engine in a longer step, or a stuck one, is reported without its attempts; the age of its round tells."""

Describe = Callable[[], dict[str, Any]]
"""Adds to a node's status what the server does not know: its ranks, its transports."""


def open_admin(config: NodeConfig) -> tuple[AdminServer | None, str]:
    """The admin port of a node, not yet answering, and the URL to register; None and "" without a token.

    Raises: ConfigError.
    """
    if not config.admin_token:
        return None, ""
    server = AdminServer(config.admin_host, config.admin_port, config.admin_token)
    return server, server.url if _is_loopback(config.admin_host) else advertised(server.url, config)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class NodeAdmin:
    """The routes of one node: `GET /status`, `POST /drain`, `POST /undrain`."""

    def __init__(self, server: NodeServer, record: NodeRecord, describe: Describe) -> None:
        self._server = server
        self._record = record
        self._describe = describe

    def routes(self) -> list[AdminRoute]:
        """For the admin port."""
        return [
            AdminRoute("GET", "/status", self._status),
            AdminRoute("POST", "/drain", self._drain),
            AdminRoute("POST", "/undrain", self._undrain),
        ]

    async def _drain(self, call: Call) -> dict[str, Any]:
        self._server.drain.begin()
        return await self._status(call)

    async def _undrain(self, call: Call) -> dict[str, Any]:
        self._server.drain.end()
        return await self._status(call)

    async def _status(self, call: Call) -> dict[str, Any]:
        server, record = self._server, self._record
        attempts = await self._attempts()
        untold = server.drain.untold(server.leases)
        return {
            "node_id": record.peer.node_id,
            "incarnation": record.peer.incarnation,
            "role": record.role,
            "model": record.model.name,
            "pid": os.getpid(),
            "up_s": round(time.time() - record.started_at, 1),
            "control_address": record.peer.control_address,
            "data_addresses": record.peer.data_addresses,
            "layout": {
                "tensor_parallel": record.layout.tp_size,
                "pipeline_stages": list(record.layout.pp_layers),
                "dtype": record.layout.dtype,
                "block_size": record.layout.block_size,
            },
            "draining": server.drain.active,
            "idle": server.drain.active and attempts == [] and untold == 0,
            "leases_untold": untold,
            "redis": "ok" if server.registered else "away: it serves on and keeps trying",
            "engine": "ok" if attempts is not None else "does not answer: in a long step, or stuck",
            "load": dataclasses.asdict(server.load),
            "leases": server.describe_leases(),
            "attempts": attempts,
            **self._describe(),
        }

    async def _attempts(self) -> list[dict[str, Any]] | None:
        """None if the engine does not answer in time."""
        try:
            async with asyncio.timeout(_ENGINE_ANSWERS_S):
                return await asyncio.wrap_future(self._server.ask_attempts())
        except TimeoutError:
            return None
