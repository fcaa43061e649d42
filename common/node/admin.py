"""The routes of a node's admin port. They run on the node's asyncio loop; questions to the engine run on its own thread."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

from common.base.clock import monotonic
from common.base.transitions import unlisted_counts
from common.control.admin_server import DRAIN_S, AdminRoute, Call, seconds
from common.control.messages import NodeRecord
from common.control.self_report import SelfReport, public_options
from common.node.profile import device_facts, node_profile
from common.node.server import NodeServer

_ENGINE_ANSWERS_S = 0.8
"""Time limit for the engine's answer. An engine that is in a longer step, or stuck, is reported without its attempts;
`step_age_s` in its load shows which."""

_IDLE_POLL_S = 0.1


class NodeAdmin:
    """The routes of one node: `GET /status`, `POST /drain`, `POST /undrain`, `POST /restart`, and those of `SelfReport`."""

    def __init__(
        self, node: NodeServer, record: NodeRecord, describe: Callable[[], dict[str, Any]] = dict[str, Any]
    ) -> None:
        """`describe`: the parts of the status that `node` does not know, such as its ranks and its relays."""
        self._node = node
        self._record = record
        self._describe = describe
        self._restarting: asyncio.Task[None] | None = None
        self._restart_by_s = 0.0
        """Time at which a restart ends the node even if it still has attempts."""

    def routes(self) -> list[AdminRoute]:
        """The routes, for the admin port."""
        config = self._node.config
        report = SelfReport(public_options(config), config.tls_dir, node_profile, device_facts)
        return [
            AdminRoute("GET", "/status", self._status),
            AdminRoute("POST", "/drain", self._drain),
            AdminRoute("POST", "/undrain", self._undrain),
            AdminRoute("POST", "/restart", self._restart),
            *report.routes(),
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
                **record.layout.described_ranks(),
                "dtype": record.layout.spec.dtype,
                "block_size": record.layout.spec.block_size,
            },
            "draining": node.drain.active,
            "restarting": self._restarting is not None and not self._restarting.done(),
            "idle": is_idle(node, attempts),
            "leases_untold": node.drain.num_unaware(node.leases),
            "redis": "ok" if why is None else f"unavailable ({why}): the node keeps serving and retrying",
            "engine": "ok" if attempts is not None else "no answer: in a long step, or stuck",
            "unlisted_transitions": dict(unlisted_counts),
            "load": dataclasses.asdict(node.load),
            "leases": node.describe_leases(),
            "attempts": attempts,
            **self._describe(),
        }


async def attempts_of(node: NodeServer) -> list[dict[str, Any]] | None:
    """All attempts of a node; None if its engine does not answer in time."""
    try:
        async with asyncio.timeout(_ENGINE_ANSWERS_S):
            return await asyncio.wrap_future(node.ask_attempts())
    except TimeoutError:
        return None


def is_idle(node: NodeServer, attempts: list[dict[str, Any]] | None) -> bool:
    """Whether a draining node has no attempt, and everybody who could send one knows that it drains."""
    return node.drain.active and attempts == [] and node.drain.num_unaware(node.leases) == 0
