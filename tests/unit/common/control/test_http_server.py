"""The services' HTTP server: it answers, and ends as soon as it is told to."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from common.control import http_server
from common.control.http_server import HttpServer


def test_stop_ends_a_server_between_its_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_TICK_S", 3600.0)

    async def main() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("here"))])
        server = HttpServer(uvicorn.Config(app, loop="none", lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        async with httpx.AsyncClient(trust_env=False) as client:
            answer = await client.get(f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert answer.text == "here"
        assert answer.headers["date"].startswith(time.strftime("%a, %d %b %Y", time.gmtime()))
        server.stop()
        await asyncio.wait_for(serving, 30)

    asyncio.run(main())
