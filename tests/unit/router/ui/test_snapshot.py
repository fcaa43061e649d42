"""The snapshot that pages ask for each second: its figures, and that it is made only when asked for and at most once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from support.mock_clock import MockClock
from support.simulated_nodes import SimulatedNodes

from common.config.service_configs import RouterConfig
from router.planner.loop import PlannerLoop, StoredPlan
from router.planner.plan import PlanMemory
from router.planner.sizing import NodeCounts
from router.router import Router
from router.ui.snapshot import Snapshots


def _play(scene: Callable[[Snapshots, SimulatedNodes, MockClock], None]) -> None:
    async def main() -> None:
        config, clock = RouterConfig(), MockClock(100.0)
        router = Router(config)
        try:
            scene(Snapshots(router, None, clock), SimulatedNodes(router, 4), clock)
        finally:
            router.close()

    asyncio.run(main())


def test_all_pages_of_a_second_share_one_snapshot() -> None:
    def scene(snapshots: Snapshots, nodes: SimulatedNodes, clock: MockClock) -> None:
        first = snapshots.latest()
        nodes.tick(5)
        assert snapshots.latest() is first
        clock.advance(1.0)
        assert snapshots.latest().etag != first.etag

    _play(scene)


def test_an_idle_cluster_gives_the_same_tag() -> None:
    def scene(snapshots: Snapshots, nodes: SimulatedNodes, clock: MockClock) -> None:
        first = snapshots.latest()
        clock.advance(1.0)
        assert snapshots.latest().etag == first.etag

    _play(scene)


def test_relays_have_a_rate_and_those_of_a_page_that_was_closed_have_none() -> None:
    def scene(snapshots: Snapshots, nodes: SimulatedNodes, clock: MockClock) -> None:
        nodes.tick(50)
        assert {relay["per_s"] for relay in json.loads(snapshots.latest().body)["relays"]} == {0}
        before = sum(relay["bytes"] for relay in json.loads(snapshots.latest().body)["relays"])
        nodes.tick(50)
        clock.advance(2.0)
        relays = json.loads(snapshots.latest().body)["relays"]
        moved = sum(relay["bytes"] for relay in relays) - before
        assert abs(sum(relay["per_s"] for relay in relays) - moved / 2) < len(relays)
        nodes.tick(50)
        clock.advance(60.0)
        assert {relay["per_s"] for relay in json.loads(snapshots.latest().body)["relays"]} == {0}

    _play(scene)


def test_totals_are_the_metrics_of_all_models() -> None:
    def scene(snapshots: Snapshots, nodes: SimulatedNodes, clock: MockClock) -> None:
        nodes.tick(7)
        totals = json.loads(snapshots.latest().body)["totals"]
        assert (sum(totals["ttft"]["counts"]), totals["answered"], sum(totals["attempts"].values())) == (7, 7, 7)
        assert len(totals["ttft"]["counts"]) == len(totals["ttft"]["bounds"]) + 1

    _play(scene)


def test_relays_from_a_node_that_is_gone_are_not_shown() -> None:
    """Pages have no name for it: a row began with an empty cell."""

    def scene(snapshots: Snapshots, nodes: SimulatedNodes, clock: MockClock) -> None:
        for node in snapshots._router.dispatcher.nodes.known():
            node.relayed_from["gone"] = 1000
        shown = json.loads(snapshots.latest().body)
        incarnations = {node["incarnation"] for node in shown["nodes"]}
        assert {relay["src"] for relay in shown["relays"]} <= incarnations

    _play(scene)


def test_the_last_plan_is_shown_with_its_reason_and_time() -> None:
    async def main() -> None:
        config = RouterConfig(planner="advise")
        router = Router(config)
        planner = PlannerLoop(config, router.dispatcher, router.metrics.export_desired)
        snapshots = Snapshots(router, None, MockClock(100.0), planner)
        try:
            assert json.loads(snapshots.latest().body)["plan"]["why"] == "nothing was planned yet"
            planner.latest = StoredPlan(NodeCounts(3, 1), "prefill nodes are short", 7.0, PlanMemory())
            shown = Snapshots(router, None, MockClock(100.0), planner).latest()
            plan = json.loads(shown.body)["plan"]
            assert (plan["wants"], plan["planned_at"]) == ({"prefill": 3, "decode": 1}, 7.0)
            assert plan["why"] == "prefill nodes are short"
            assert json.loads(Snapshots(router, None, MockClock(100.0)).latest().body)["plan"] is None
        finally:
            await planner._client.aclose()
            router.close()

    asyncio.run(main())
