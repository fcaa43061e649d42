"""The router service as `kvrelay router` runs it: nodes found through a real Redis, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.certificates import made
from support.redis_server import RedisServer
from support.stub_node import StubNode, make_model_folder
from tokenizers import Tokenizer

from common.cluster.membership import Registrar
from common.config.service_configs import RouterConfig
from common.security.tls import Credentials
from router.service import serve


async def _healthy(http: httpx.AsyncClient, decode: int) -> None:
    async with asyncio.timeout(20):
        while True:
            try:
                answer = await http.get("/health")
                if answer.json()["decode"] == decode and (answer.status_code == 200) == (decode > 0):
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "TLS"])
def test_nodes_are_found_in_redis_and_open_streams_are_told_of_the_end(
    tmp_path: Path, redis_server: RedisServer, cluster: str, free_port: int, secured: bool
) -> None:
    folder = make_model_folder(tmp_path / "stub-model")

    async def main() -> None:
        keys = made()
        files: dict[str, Any] = {
            "tls_dir": str(keys / "router"),
            "ssl_certfile": str(keys / "router" / "cert.pem"),
            "ssl_keyfile": str(keys / "router" / "key.pem"),
        }
        config = RouterConfig(
            port=free_port, redis_url=redis_server.url, cluster=cluster, lease_s=1.0, **(files if secured else {})
        )
        decode = StubNode("decode", "d0", str(folder), credentials=Credentials(str(keys / "node")) if secured else None)
        tls_dir = str(keys / "node") if secured else None
        registrar = Registrar(redis_server.url, cluster, decode.record, lease_s=1.0, tls_dir=tls_dir)
        renewal = asyncio.create_task(registrar.run())
        service = asyncio.create_task(serve(config))
        url = f"{'https' if secured else 'http'}://127.0.0.1:{free_port}"
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as http:
            await _healthy(http, 1)
            whole = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            assert whole.json()["choices"][0]["text"] == tokenizer.decode([65, 66, 67, 68])

            decode.gate.clear()
            body = {"prompt": "hi", "max_tokens": 100, "stream": True}
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await decode.until(lambda: bool(decode.running))
            decode.step()
            await asyncio.sleep(0)
            service.cancel()
            await asyncio.gather(service, return_exceptions=True)
            answer = await request
            assert "shutting down" in answer.text
            if answer.status_code == 200:
                assert answer.text.endswith("data: [DONE]\n\n")
            await decode.until(lambda: len(decode.aborts()) == 1)
        renewal.cancel()
        await asyncio.gather(renewal, return_exceptions=True)
        await registrar.deregister()
        await decode.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_router_that_starts_beside_running_nodes_refuses_no_request(
    tmp_path: Path, redis_server: RedisServer, cluster: str, free_port: int
) -> None:
    """The first request arrives before the router knows its nodes: it must wait, not fail with 503."""
    folder = make_model_folder(tmp_path / "stub-model")

    async def main() -> None:
        config = RouterConfig(port=free_port, redis_url=redis_server.url, cluster=cluster, lease_s=1.0)
        decode = StubNode("decode", "d0", str(folder))
        registrar = Registrar(redis_server.url, cluster, decode.record, lease_s=1.0)
        renewal = asyncio.create_task(registrar.run())
        await registrar.registered.wait()
        service = asyncio.create_task(serve(config))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", timeout=20) as http:
            answer = None
            while answer is None:
                with contextlib.suppress(httpx.ConnectError):
                    answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
            assert answer.status_code == 200, answer.text
        for task in (service, renewal):
            task.cancel()
        await asyncio.gather(service, renewal, return_exceptions=True)
        await registrar.deregister()
        await decode.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_without_redis_the_router_serves_on_and_says_that_it_is_degraded(
    tmp_path: Path, cluster: str, free_port: int
) -> None:
    folder = make_model_folder(tmp_path / "stub-model")

    async def main() -> None:
        with RedisServer() as server:
            config = RouterConfig(port=free_port, redis_url=server.url, cluster=cluster, lease_s=1.0)
            decode = StubNode("decode", "d0", str(folder))
            registrar = Registrar(server.url, cluster, decode.record, lease_s=1.0)
            tasks = [asyncio.create_task(registrar.run()), asyncio.create_task(serve(config))]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_port}", timeout=20) as http:

                async def says(status: str, away: str) -> None:
                    async with asyncio.timeout(10):
                        while (health := await http.get("/health")).json()["status"] != status:
                            assert health.status_code == 200
                            await asyncio.sleep(0.02)
                        # The index has its own connection, which notices a moment before or after the node table's.
                        while f"kvrelay_redis_away {away}" not in (await http.get("/metrics")).text:
                            await asyncio.sleep(0.02)

                await _healthy(http, 1)
                await says("ok", "0.0")
                server.kill()
                await says("degraded", "1.0")
                answer = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 4})
                assert answer.status_code == 200
                await asyncio.to_thread(server.restart)
                await says("ok", "0.0")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await registrar.deregister()
            await decode.close()

    asyncio.run(asyncio.wait_for(main(), 60))
