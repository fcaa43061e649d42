"""Two routers over the same nodes, one is killed: its clients ask the other one, whose own clients notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from support import warm_start
from support.oracle import make_tiny
from support.ports import free_port
from support.redis_server import RedisServer
from support.system import System, running_system, wait_until

STREAMS = 6
NEW_TOKENS = 200


@contextlib.contextmanager
def second_router(folder: Path, redis_url: str, cluster: str) -> Iterator[tuple[str, warm_start.Process]]:
    port = free_port()
    command = [sys.executable, "-m", "kvrelay", "router", "--port", str(port), "--redis-url", redis_url]
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    with (folder / "router.log").open("wb") as log:
        router = warm_start.start([*command, "--cluster", cluster], log, environ)
    try:
        yield f"http://127.0.0.1:{port}", router
    finally:
        router.kill()
        router.wait(10)


def body(index: int, **more: Any) -> dict[str, Any]:
    return {
        "prompt": [(index * 31 + i) % 200 + 3 for i in range(40 + index)],
        "max_tokens": NEW_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": index,
        "temperature": 0.8,
        "presence_penalty": 0.4,
        "logprobs": 1,
        **more,
    }


async def whole(client: httpx.AsyncClient, index: int) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json=body(index))
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return {
        "ids": choice["token_ids"],
        "finish": choice["finish_reason"],
        "usage": answer.json()["usage"]["total_tokens"],
    }


async def stream_until_cut(client: httpx.AsyncClient, index: int, begun: asyncio.Event) -> None:
    with contextlib.suppress(httpx.TransportError):
        async with client.stream("POST", "/v1/completions", json=body(index, stream=True)) as answer:
            async for _ in answer.aiter_lines():
                begun.set()


async def scene(system: System, other_url: str, other: warm_start.Process) -> None:
    async with (
        httpx.AsyncClient(base_url=system.url, timeout=60) as here,
        httpx.AsyncClient(base_url=other_url, timeout=60) as there,
    ):
        expected = [await whole(here, index) for index in range(STREAMS)]
        begun = [asyncio.Event() for _ in range(STREAMS)]
        cut = [asyncio.ensure_future(stream_until_cut(there, index, event)) for index, event in enumerate(begun)]
        await asyncio.wait_for(asyncio.gather(*(event.wait() for event in begun)), 60)
        untouched = [asyncio.ensure_future(whole(here, index)) for index in range(STREAMS)]
        other.send_signal(signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*cut), 20)
        assert await asyncio.gather(*(whole(here, index) for index in range(STREAMS))) == expected, "asked again"
        assert await asyncio.gather(*untouched) == expected, "the other router's clients"


def test_killed_routers_requests_end_at_its_lease_and_the_others_clients_notice_nothing(
    tmp_path: Path, redis_server: RedisServer, cluster: str
) -> None:
    model = make_tiny("qwen2", tmp_path / "qwen2")
    args = ("--model", str(model), "--dtype", "float32", "--kv-blocks", "400", "--local-prefill-tokens", "0")
    where = ("--redis-url", redis_server.url, "--cluster", cluster)
    with running_system(tmp_path, *args, *where) as system:
        with second_router(tmp_path, redis_server.url, cluster) as (other_url, other):
            system.wait_usable()

            def usable() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return httpx.get(f"{other_url}/health", timeout=5.0).status_code == 200
                return False

            wait_until(usable, 30, "the second router finds the nodes")
            asyncio.run(scene(system, other_url, other))
        system.wait_whole(timeout_s=15)
