"""Whether a child of `kvrelay up` can be used, and whether it answers, by its role. Runs on the supervisor's asyncio loop."""

from __future__ import annotations

import math
import time

from common.base.errors import KvRelayError
from common.cluster.membership import Directory
from common.control.messages import NodeRecord
from common.node.healthcheck import node_complaint
from common.security.tls import Credentials
from kvrelay.up.child import Child
from kvrelay.up.health import HealthProbe, redis_answers, router_answers


class ChildHealth:
    """Asks Redis, the routers, and the nodes that Redis lists."""

    def __init__(self, redis_url: str, cluster: str, credentials: Credentials | None) -> None:
        self.probe = HealthProbe()
        self.records: dict[str, NodeRecord] = {}
        """By node id, as of the latest `find_nodes`."""
        self.redis_url = redis_url
        self._credentials = credentials
        tls_dir = None if credentials is None else credentials.folder
        self._directory = Directory(redis_url, cluster, self._on_nodes, tls_dir=tls_dir)

    async def find_nodes(self) -> None:
        """Read which nodes are registered in Redis."""
        await self._directory.poll()

    async def is_usable(self, child: Child) -> bool:
        """Whether a child that is not ready can be used now; notes its address, and a node's incarnation."""
        if child.spec.role == "redis":
            child.address = self.redis_url
            return await redis_answers(self.redis_url)
        if child.spec.role == "router":
            child.address = child.spec.url
            return await self.probe.health(child.spec.url) is not None
        # The wall clock may have been set since the child started, or since it registered.
        return self._has_registered(child, min(child.started_at, time.time() - (time.monotonic() - child.started_s)))

    def has_moved(self, child: Child) -> bool:
        """Whether a ready node has another incarnation, without a start of its process; notes its address and its role."""
        return self._has_registered(child, child.started_at)

    def _has_registered(self, child: Child, since_at: float) -> bool:
        """Whether the node has a new incarnation; notes what its record says.

        The record of a process that started before `since_at` does not count: in a shared Redis it remains for one lease.
        """
        record = self.records.get(child.spec.node_id or "")
        if record is None or record.peer.incarnation == child.incarnation or record.started_at < since_at:
            return False
        child.incarnation, child.address = record.peer.incarnation, record.peer.control_address
        if child.spec.role != "pooling":
            child.role = record.role
        return True

    async def answers(self, child: Child) -> bool:
        """Whether a ready child answers."""
        if child.spec.role == "redis":
            return await redis_answers(self.redis_url)
        if child.spec.role == "router":
            return await router_answers(child.spec.url)
        try:
            complaint = await node_complaint(child.address, max_step_age_s=math.inf, credentials=self._credentials)
        except KvRelayError:  # a malformed address
            return False
        return complaint is None

    async def close(self) -> None:
        await self.probe.close()
        await self._directory.close()

    def _on_nodes(self, records: list[NodeRecord]) -> None:
        self.records = {record.peer.node_id: record for record in records}
