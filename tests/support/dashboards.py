"""A router's HTTP server with its dashboard in a thread, for tests in a browser: without nodes, or with simulated ones."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

from starlette.types import ASGIApp

from common.config.service_configs import RouterConfig
from router.http.server import bind, http_server
from router.router import Router
from router.ui.access import Access
from router.ui.routes import DashboardRoutes


@contextlib.contextmanager
def served_dashboard(
    config: RouterConfig | None = None, prepare: Callable[[Router], Awaitable[None]] | None = None
) -> Iterator[str]:
    """The URL of a running router that has no Redis; `prepare` runs on its event loop before it answers."""
    config = config or RouterConfig()
    started, failed = threading.Event(), []
    url = ""
    end: Callable[[], None] = lambda: None  # noqa: E731

    async def run() -> None:
        nonlocal url, end
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        end = lambda: loop.call_soon_threadsafe(stop.set)  # noqa: E731
        router, sock = Router(config), bind("127.0.0.1", 0)
        try:
            if prepare is not None:
                await prepare(router)
            pages = DashboardRoutes(router, config.admin_token, None)
            server = http_server(router, config, None, dashboard=pages.application(Access(config.admin_token)))
            pages.chat_endpoint = cast("ASGIApp", server.config.app)
            task = asyncio.create_task(server.serve(sockets=[sock]))
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            started.set()
            await stop.wait()
            server.stop()
            await task
        finally:
            router.close()
            sock.close()

    def main() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # shown to the test
            failed.append(error)
            started.set()

    thread = threading.Thread(target=main)
    thread.start()
    try:
        assert started.wait(30)
        if failed:
            raise failed[0]
        yield url
    finally:
        end()
        thread.join(30)
