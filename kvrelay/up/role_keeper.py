"""Keeps as many nodes of each role on this machine as Redis says (`common.cluster.desired_state`). Supervisor's asyncio loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

from common.base.errors import KvRelayError
from common.base.process import on_own_thread
from common.cluster.desired_state import OTHER, TOTAL, read_desired, shown, write_desired
from common.cluster.redis_client import UNREACHABLE, connect, forget_connections
from common.cluster.redis_keys import Keys
from common.cluster.running_clusters import RunningCluster
from common.config.service_configs import UpConfig
from common.control.messages import Role
from kvrelay.admin.flip import Flip
from kvrelay.admin.roll import ReachedCluster
from kvrelay.up.child import Child
from kvrelay.up.child_health import ChildHealth
from kvrelay.up.console import Console
from kvrelay.up.trades import Trades

_EVERY_S, _EVERY_UNPLANNED_S = 1.0, 5.0
"""Time between two looks at the numbers: where a planner changes them, and where only an operator does."""
_DRAIN_S = 120.0
"""Time for a node's requests to end; those that are left go on at other nodes."""
_RETRY_S = 10.0


class RoleKeeper:
    """Looks at the wanted numbers and at the nodes' roles, and changes one node at a time."""

    def __init__(
        self,
        config: UpConfig,
        children: Sequence[Child],
        health: ChildHealth,
        console: Console,
        running: RunningCluster,
        on_change: Callable[[], None],
    ) -> None:
        """children: the nodes. on_change: a node has another role."""
        self._children, self._health, self._console, self._on_change = children, health, console, on_change
        self._redis, self._keys = connect(health.redis_url), Keys(config.cluster)
        self._admin_urls = ",".join(running.routers.values())
        self._start_timeout_s = config.start_timeout_s
        self._every_s = _EVERY_S if config.planner == "apply" else _EVERY_UNPLANNED_S
        self._trades = Trades({child.spec.name: child.role for child in children})
        self._whole_s = time.monotonic()
        """When all nodes were last ready."""
        self._before: str | None = None
        self._said = ""

    async def run(self) -> None:
        """Keep the numbers until cancelled."""
        try:
            while True:
                try:
                    await self._look()
                except UNREACHABLE:
                    await forget_connections(self._redis)
                await asyncio.sleep(self._every_s)
        finally:
            await self._redis.aclose()

    async def _look(self) -> None:
        await self._health.find_nodes()
        if [child for child in self._children if child.ready and self._health.has_moved(child)]:
            self._on_change()
        self._trades.observe({child.spec.name: child.role for child in self._children}, time.monotonic())
        wanted = await read_desired(self._redis, self._keys)
        if wanted is None or wanted.get(TOTAL) != self._trades.wanted[TOTAL]:
            await write_desired(self._redis, self._keys, self._trades.wanted)
        elif wanted != self._trades.wanted:
            self._trades.wanted = wanted
            self._console.say(f"wanted: {shown(wanted)}")
        child = self._next()
        if child is not None:
            await self._flip(child)

    def _next(self) -> Child | None:
        """The node to change, once two looks in a row name it: if an operator changes a node, its new role is seen a moment after
        the new numbers, or, if it restarts, when it is ready."""
        now_s = time.monotonic()
        if all(child.ready for child in self._children):
            self._whole_s = now_s
        name = self._trades.next()
        again, self._before = name is not None and name == self._before, name
        if not again or (now_s > self._whole_s and now_s < self._whole_s + self._start_timeout_s):
            return None
        return next(child for child in self._children if child.spec.name == name)

    async def _flip(self, child: Child) -> None:
        """Change the role of a node. A failure is reported once, and the change is tried again later."""
        name, node_id = child.spec.name, child.spec.node_id or ""

        def work() -> None:
            cluster = ReachedCluster(self._admin_urls)
            Flip(cluster, _DRAIN_S, self._start_timeout_s, self._console.say, wanted=True).run([node_id])

        try:
            await on_own_thread(work, "flip")
        except KvRelayError as error:
            line = f"{name} cannot change its role now: {error.message}"
            if line != self._said:
                self._console.say(line)
            self._said = line
            await asyncio.sleep(_RETRY_S)
            return
        self._said = ""
        child.role = OTHER[cast("Role", child.role)]
        self._on_change()
