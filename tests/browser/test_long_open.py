"""Pages that are open for an hour of changing load on 100 nodes, one update a second: their memory does not grow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from browser.conftest import OpenPage
from support.dashboards import served_dashboard
from support.simulated_nodes import SimulatedNodes

import router.ui.snapshot
from router.router import Router

pytestmark = [pytest.mark.browser, pytest.mark.thorough, pytest.mark.timeout(600)]
HOUR = 3600
_SETTLED = 900
"""Updates after which a page keeps all that it ever keeps: charts keep ten minutes."""
_SPARE_BYTES = 2e6
_FAST = """
    const wait = window.setTimeout, began = Date.now();
    let updates = 0;
    window.updates = () => updates;
    window.setTimeout = (call, ms, ...rest) => wait(call, ms >= 1000 ? 0 : ms, ...rest);
    const ask = window.fetch;
    window.fetch = (...what) => { updates += 1; return ask(...what); };
    performance.now = () => 1000 * updates;
    Date.now = () => began + 1000 * updates;
"""
"""A second passes with each update."""


@pytest.mark.parametrize("name", ["", "charts.html"], ids=["cluster", "charts"])
def test_a_page_that_is_open_for_an_hour_does_not_grow(
    name: str, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.ui.snapshot, "INTERVAL_S", 0.0)
    ticking: list[asyncio.Task[None]] = []

    async def keep_changing(router: Router) -> None:
        nodes = SimulatedNodes(router, 100)

        async def tick() -> None:
            while True:
                nodes.tick(5)
                await asyncio.sleep(0.01)

        ticking.append(asyncio.create_task(tick()))

    with served_dashboard(prepare=keep_changing) as url:
        page = open_page(f"{url}/ui/{name}", script=_FAST)
        settled = _heap_after(page, _SETTLED)
        elements = page.evaluate("document.querySelectorAll('*').length")
        assert _heap_after(page, HOUR) < settled + _SPARE_BYTES
        assert page.evaluate("document.querySelectorAll('*').length") <= 1.05 * elements


def _heap_after(page: Any, updates: int) -> float:
    """Bytes of JavaScript's heap, without garbage, after so many updates in all."""
    page.wait_for_function("wanted => window.updates() >= wanted", arg=updates, timeout=300_000, polling=500)
    page.evaluate("gc()")
    return page.evaluate("performance.memory.usedJSHeapSize")
