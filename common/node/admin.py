"""The routes of a node's admin port. They run on the node's asyncio loop; questions to the engine run on its own thread."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from common.base.clock import monotonic
from common.base.endpoints import is_loopback
from common.base.transitions import unlisted_counts
from common.control.admin_server import DRAIN_S, AdminRoute, AdminServer, Call, seconds
from common.control.links import Identity
from common.control.messages import NodeLoad, NodeRecord
from common.node.drain import Drain
from common.node.options import ServerOptions
from common.security.tls import Credentials

_ENGINE_ANSWERS_S = 0.8
"""Time limit for the engine's answer. An engine that is in a longer step, or stuck, is reported without its attempts;
`step_age_s` in its load shows which."""

_IDLE_POLL_S = 0.1

Describe = Callable[[], dict[str, Any]]
"""Returns the parts of a node's status that its server does not know: its ranks and its relays."""


class AdministeredNode(Protocol):
    """The part of a node that the admin routes read and change."""

    drain: Drain

    def restart(self) -> None:
        """End the node in order, so that its supervisor starts it again."""
        ...

    @property
    def leases(self) -> list[Identity]:
        """Holders of a lease at this node."""
        ...

    def describe_leases(self) -> list[dict[str, Any]]:
        """The lease holders with details, as plain data."""
        ...

    @property
    def unregistered(self) -> str | None:
        """Why the latest renewal of the registration in Redis failed; None if it succeeded."""
        ...

    @property
    def load(self) -> NodeLoad:
        """The present load."""
        ...

    def ask_attempts(self) -> Future[list[dict[str, Any]]]:
        """All attempts as plain data, from the engine's thread."""
        ...


def open_admin(options: ServerOptions, credentials: Credentials | None) -> tuple[AdminServer | None, str]:
    """The admin port of a node, which does not answer yet, and the URL to register; None and "" without a token.

    Raises: ConfigError.
    """
    if not options.admin_token:
        return None, ""
    server = AdminServer(options.admin_host, options.admin_port, options.admin_token, credentials)
    return server, server.url if is_loopback(options.admin_host) else options.addresses.advertised(server.url)


class NodeAdmin:
    """The routes of one node: `GET /status`, `POST /drain`, `POST /undrain`, `POST /restart`."""

    def __init__(self, node: AdministeredNode, record: NodeRecord, describe: Describe) -> None:
        self._node = node
        self._record = record
        self._describe = describe
        self._restarting: asyncio.Task[None] | None = None
        self._restart_by_s = 0.0
        """Time at which a restart ends the node even if it still has attempts."""

    def routes(self) -> list[AdminRoute]:
        """The routes, for the admin port."""
        return [
            AdminRoute("GET", "/status", self._status),
            AdminRoute("POST", "/drain", self._drain),
            AdminRoute("POST", "/undrain", self._undrain),
            AdminRoute("POST", "/restart", self._restart),
        ]

    async def _drain(self, call: Call) -> dict[str, Any]:
        self._node.drain.begin()
        return await self._status(call)

    async def _undrain(self, call: Call) -> dict[str, Any]:
        self._node.drain.end()
        return await self._status(call)

    async def _restart(self, call: Call) -> dict[str, Any]:
        """Drain, then end the process, after `timeout_s` even with attempts, which the router continues elsewhere. If called
        several times, the earliest end counts."""
        until_s = monotonic() + seconds(call, "timeout_s", DRAIN_S)
        self._node.drain.begin()
        if self._restarting is None or self._restarting.done():
            self._restart_by_s = until_s
            self._restarting = asyncio.create_task(self._restart_when_idle())
        self._restart_by_s = min(self._restart_by_s, until_s)
        return await self._status(call)

    async def _restart_when_idle(self) -> None:
        while self._node.drain.active:
            if monotonic() > self._restart_by_s or is_idle(self._node, await attempts_of(self._node)):
                self._node.restart()
                return
            await asyncio.sleep(_IDLE_POLL_S)

    async def _status(self, call: Call) -> dict[str, Any]:
        node, record = self._node, self._record
        why = node.unregistered
        attempts = await attempts_of(node)
        return {
            "node_id": record.peer.node_id,
            "incarnation": record.peer.incarnation,
            "role": record.role,
            "model": record.model.name,
            "kernels": record.kernels,
            "pid": os.getpid(),
            "up_s": round(time.time() - record.started_at, 1),
            "control_address": record.peer.control_address,
            "data_addresses": record.peer.data_addresses,
            "layout": {
                "tensor_parallel": record.layout.tp_size,
                "pipeline_parallel": record.layout.pp_size,
                "context_parallel": record.layout.cp_size,
                "data_parallel": record.layout.dp_size,
                "layers_per_stage": list(record.layout.pp_layers),
                "dtype": record.layout.spec.dtype,
                "block_size": record.layout.spec.block_size,
            },
            "draining": node.drain.active,
            "restarting": self._restarting is not None and not self._restarting.done(),
            "idle": is_idle(node, attempts),
            "leases_untold": node.drain.untold(node.leases),
            "redis": "ok" if why is None else f"unavailable ({why}): the node keeps serving and retrying",
            "engine": "ok" if attempts is not None else "no answer: in a long step, or stuck",
            "unlisted_transitions": dict(unlisted_counts),
            "load": dataclasses.asdict(node.load),
            "leases": node.describe_leases(),
            "attempts": attempts,
            **self._describe(),
        }


async def attempts_of(node: AdministeredNode) -> list[dict[str, Any]] | None:
    """All attempts of a node; None if its engine does not answer in time."""
    try:
        async with asyncio.timeout(_ENGINE_ANSWERS_S):
            return await asyncio.wrap_future(node.ask_attempts())
    except TimeoutError:
        return None


def is_idle(node: AdministeredNode, attempts: list[dict[str, Any]] | None) -> bool:
    """Whether a draining node has no attempt, and everybody who could send one knows that it drains."""
    return node.drain.active and attempts == [] and node.drain.untold(node.leases) == 0
