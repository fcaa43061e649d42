"""What a router's admin port tells: its nodes, its requests, and what it would decide. Runs on the router's event loop."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from common.admin.server import AdminRoute, Call
from common.clock import monotonic
from common.config import RouterConfig
from common.membership import Directory
from router.nodes import Node

if TYPE_CHECKING:
    from router.service import Router


class RouterAdmin:
    """The routes of one router: `GET /status`, `GET /nodes`."""

    def __init__(self, router: Router, config: RouterConfig, directory: Directory | None) -> None:
        self._router = router
        self._config = config
        self._directory = directory
        self._started_s = monotonic()

    def routes(self) -> list[AdminRoute]:
        """For the admin port."""
        return [
            AdminRoute("GET", "/status", self._status),
            AdminRoute("GET", "/nodes", self._nodes),
        ]

    def _status(self, call: Call) -> Mapping[str, Any]:
        dispatcher, model = self._router.dispatcher, self._router.catalog.model
        degraded = self._directory is not None and self._directory.degraded
        return {
            "role": "router",
            "pid": os.getpid(),
            "up_s": round(monotonic() - self._started_s, 1),
            "cluster": self._config.cluster,
            "model": None if model is None else model.name,
            "policy": self._config.policy,
            "requests_running": dispatcher.running,
            "requests_waiting": dispatcher.waiting,
            "redis": "away: serving with the nodes known" if degraded else "ok",
        }

    def _nodes(self, call: Call) -> Mapping[str, Any]:
        now_s, lease_s = monotonic(), self._config.lease_s
        nodes = sorted(self._router.dispatcher.nodes.known(), key=lambda node: (node.record.role, node.node_id))
        return {"time": time.time(), "lease_s": lease_s, "nodes": [describe_node(node, now_s) for node in nodes]}


def node_state(node: Node) -> str:
    """In a few words: usable, or why not."""
    if node.usable:
        return "usable"
    if node.link is None or node.last_pong_s is None:
        return "not answering"
    if node.stuck:
        return "stuck: its engine stands still"
    if node.load.draining:
        return "draining"
    return "not listed in Redis any more"


def describe_node(node: Node, now_s: float) -> dict[str, Any]:
    """All that this router knows of a node, as plain data. `now_s` is of the clock of `common.clock`."""
    record = node.record
    return {
        "node_id": node.node_id,
        "incarnation": node.incarnation,
        "role": record.role,
        "state": node_state(node),
        "usable": node.usable,
        "draining": node.load.draining,
        "model": record.model.name,
        "layout": {"tensor_parallel": record.layout.tp_size, "pipeline_stages": list(record.layout.pp_layers)},
        "control_address": record.peer.control_address,
        "admin_address": record.admin_address,
        "started_at": record.started_at,
        "answered_s_ago": None if node.last_pong_s is None else round(now_s - node.last_pong_s, 3),
        "unreported": len(node.unreported),
        "load": dataclasses.asdict(node.load),
    }
