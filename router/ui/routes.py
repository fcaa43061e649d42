"""The dashboard's JSON routes, below `/ui/api`. Router process, event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.base.errors import Forbidden, NotFound, Unavailable
from common.cluster.membership import Directory
from common.control.admin_server import Call, read_object
from router.admin import RouterAdmin, checked_limit, node_state
from router.findings import ServiceReport, find
from router.nodes.node import Node
from router.planner.loop import PlannerLoop
from router.router import Router
from router.ui.access import Access
from router.ui.app import dashboard, json_response
from router.ui.history import POINTS, TICK_S, History, NodeView
from router.ui.nodes import NodeControl
from router.ui.snapshot import Snapshots, totals

_MAX_LISTED = 200
_MAX_GROUPS, _MAX_COLUMNS = 40, 40


class DashboardRoutes:
    """The routes of one router, for all ports that serve them."""

    def __init__(
        self, router: Router, admin_token: str, directory: Directory | None, planner: PlannerLoop | None = None
    ) -> None:
        self._router = router
        self._planner = planner
        self._directory = directory
        self._snapshots = Snapshots(router, directory, planner=planner)
        self._history = History()
        self._admin = RouterAdmin(router, directory)
        self._nodes = NodeControl(router.dispatcher.nodes, admin_token, router.dispatcher.config.tls_dir)
        self.chat_endpoint: ASGIApp = _no_chat
        """The application that answers chat completions, set once it is there."""

    def application(self, access: Access) -> Starlette:
        """The dashboard for callers whom `access` admits."""
        watch = self._router.dispatcher.stories.watch
        return dashboard(access, self._routes(access), lambda: self.chat_endpoint, watch)

    async def run(self) -> None:
        """Keep the history, until it is cancelled."""
        while True:
            now_s, nodes = time.time(), self._router.dispatcher.nodes.known()
            facts = {
                "models": ", ".join(sorted(model.name for model in self._router.catalog.models)),
                "Redis": self._router.degraded(self._directory) or "ok",
            }
            if self._planner is not None and (plan := self._planner.latest) is not None:
                facts["plan"] = str(plan.counts)
            views = {node.incarnation: NodeView(node.node_id, node_state(node)) for node in nodes}
            self._history.compare(now_s, views, facts)
            if now_s >= self._history.due_s:
                self._history.add(now_s, totals(self._router, nodes))
            await asyncio.sleep(TICK_S)

    def _routes(self, access: Access) -> Sequence[BaseRoute]:

        async def node(request: Request) -> Response:
            return await self._node(request, access)

        async def findings(request: Request) -> Response:
            if not access.may_operate(request.scope):
                return json_response({"findings": None, "missing": "they are shown to operators: give the admin token"})
            return json_response({"findings": await self._findings(), "missing": ""})

        async def playground(request: Request) -> Response:
            models = [model.name for model in self._router.catalog.models if model.task == "generate"]
            return json_response({"models": models, "may_kill": access.may_kill(request.scope)})

        async def kill_node(request: Request) -> Response:
            if not access.may_kill(request.scope):
                raise Forbidden("a node can be killed only from the host where `kvrelay up` runs")
            found = self._nodes.find(request.path_params["name"])
            return json_response({"node_id": found.node_id, "pid": await self._nodes.kill(found)})

        return [
            Route("/snapshot", self._snapshot),
            Route("/history", self._shown_history),
            Route("/findings", findings),
            Route("/requests", self._requests),
            Route("/requests/{request_id:path}", self._request),
            Route("/prefixes", self._prefixes),
            Route("/prefixes/find", self._find_prefix, methods=["POST"]),
            Route("/nodes/{name}", node),
            Route("/nodes/{name}/kill", kill_node, methods=["POST"]),
            Route("/nodes/{name}/{action}", self._act, methods=["POST"]),
            Route("/playground", playground),
        ]

    async def _snapshot(self, request: Request) -> Response:
        found = self._snapshots.latest()
        headers = {"etag": found.etag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.body, headers=headers, media_type="application/json")

    async def _shown_history(self, request: Request) -> Response:
        return json_response(self._history.shown(checked_limit(request.query_params.get("limit", str(POINTS)), POINTS)))

    async def _findings(self) -> list[dict[str, str]]:
        """Those of `kvrelay admin check` that this router and its nodes can tell, without connections between nodes."""
        status = self._admin.status()
        router = ServiceReport(str(status["router_id"]), "router", status=status)
        nodes = await asyncio.gather(*(self._report(node) for node in self._router.dispatcher.nodes.known()))
        return [finding._asdict() for finding in find([router], nodes, "")]

    async def _report(self, node: Node) -> ServiceReport:
        report = ServiceReport(node.node_id, node.record.role, known=self._admin.describe(node))
        try:
            report.status = await self._nodes.ask(node, "GET", "/status")
            report.facts = await self._nodes.ask(node, "POST", "/facts")
        except Unavailable as error:
            report.silent = error.message
        return report

    async def _requests(self, request: Request) -> Response:
        limit = checked_limit(request.query_params.get("limit", "50"), _MAX_LISTED)
        return json_response({"requests": self._router.dispatcher.stories.recent(limit)})

    async def _request(self, request: Request) -> Response:
        return json_response(self._admin.story(request.path_params["request_id"]))

    async def _node(self, request: Request, access: Access) -> Response:
        """The router's view of a node, and for operators also the node's own report."""
        node = self._nodes.find(request.path_params["name"])
        about = self._admin.describe(node)
        about["own"], about["own_missing"] = None, "the node's own status is shown to operators: give the admin token"
        if access.may_operate(request.scope):
            try:
                about["own"], about["own_missing"] = await self._nodes.ask(node, "GET", "/status"), ""
            except Unavailable as error:
                about["own_missing"] = error.message
        return json_response(about)

    async def _prefixes(self, request: Request) -> Response:
        """The prefix index by sets of holders."""
        index, known = self._router.index, self._router.dispatcher.nodes.get
        nodes = [node for name in index.incarnations if (node := known(name)) is not None]
        nodes.sort(key=lambda node: (node.record.role != "prefill", node.node_id))
        shown = [{"incarnation": n.incarnation, "node": n.node_id, "role": n.record.role} for n in nodes[:_MAX_COLUMNS]]
        groups = [{"blocks": blocks, "holders": holders} for blocks, holders in index.groups(_MAX_GROUPS)]
        return json_response({"blocks": len(index), "nodes": shown, "groups": groups})

    async def _find_prefix(self, request: Request) -> Response:
        return json_response(await self._admin.find_blocks(Call({}, {}, await read_object(request))))

    async def _act(self, request: Request) -> Response:
        action = request.path_params["action"]
        if action not in ("drain", "undrain"):
            raise NotFound("a node can be drained and undrained")
        node = self._nodes.find(request.path_params["name"])
        await self._nodes.ask(node, "POST", f"/{action}")
        return json_response({"node_id": node.node_id, "draining": action == "drain"})


async def _no_chat(scope: Scope, receive: Receive, send: Send) -> None:
    raise Unavailable("the router is starting")
