"""The dashboard's JSON routes: what they refuse."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from common.config.service_configs import RouterConfig
from router.router import Router
from router.ui.access import Access
from router.ui.routes import DashboardRoutes


@pytest.mark.parametrize(
    ("limit", "status"), [("1", 200), ("200", 200), ("0", 400), ("201", 400), ("x", 400), ("9" * 5000, 400)]
)
def test_a_limit_out_of_range_is_refused(limit: str, status: int) -> None:
    async def ask() -> int:
        config = RouterConfig()
        router = Router(config)
        try:
            app = DashboardRoutes(router, config.admin_token, None).application(Access())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
                return (await http.get("/api/requests", params={"limit": limit})).status_code
        finally:
            router.close()

    assert asyncio.run(ask()) == status
