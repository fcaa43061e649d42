"""A router's admin port over stub nodes: its view of nodes and requests, and its dry runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
from support.stub_node import MAX_LEN, Stack, StubNode, make_model_folder, running_stack

from common.base.errors import Unavailable
from common.config.service_configs import RouterConfig
from common.control.admin_server import AdminServer
from router.admin import RouterAdmin
from router.requests.placement import HashChain
from router.restart import Restart

PROMPT = list(range(100, 200))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("admin") / "stub-model")


class Bench:
    """A router with two nodes of each role, its API and its admin port."""

    def __init__(self, stack: Stack, nodes: dict[str, StubNode], api: httpx.AsyncClient, admin: httpx.AsyncClient):
        self.stack, self.nodes, self.api, self.admin = stack, nodes, api, admin

    async def complete(self, **body: object) -> httpx.Response:
        return await self.api.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 3, **body})

    async def route(self, **body: object) -> httpx.Response:
        return await self.admin.post("/route", json=body)


def play(folder: Path, scene: Callable[[Bench], Awaitable[None]], policy: str = "kv_aware") -> None:
    async def main() -> None:
        names = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
        nodes = {name: StubNode(role, name, str(folder)) for name, role in names.items()}  # type: ignore[arg-type]
        config = RouterConfig(lease_s=0.6, policy=policy, admin_token="t", local_prefill_tokens=0)
        async with running_stack(config, *nodes.values()) as stack:
            server = AdminServer("127.0.0.1", 0, "t")
            server.start(RouterAdmin(stack.router, None, Restart(stack.router.dispatcher, lambda: 0)).routes())
            try:
                async with (
                    httpx.AsyncClient(base_url=stack.url, trust_env=False) as api,
                    httpx.AsyncClient(
                        base_url=server.url, trust_env=False, headers={"authorization": "Bearer t"}
                    ) as admin,
                ):
                    await scene(Bench(stack, nodes, api, admin))
                    await stack.settled()
            finally:
                await server.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_route_shows_the_hits_of_the_last_request_and_tells_tenants_apart(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        cold = (await bench.route(prompt=PROMPT)).json()
        assert {row["hit_tokens"] for role in ("prefill", "decode") for row in cold[role]} == {0}
        served = (await bench.complete()).headers["x-kvrelay-prefill-node"]
        warm = (await bench.route(prompt=PROMPT)).json()
        assert {row["node"]: row["hit_tokens"] for row in warm["prefill"]}[served] == 96
        other = (await bench.route(prompt=PROMPT, cache_salt="another tenant")).json()
        assert {row["hit_tokens"] for row in other["prefill"]} == {0}
        status = (await bench.admin.get("/status")).json()
        assert status["index"]["nodes"] == 2  # expected of both legs, published by nobody
        assert status["costs"]["stub-model"]["prefill"]["prefill_token_s"] > 0
        # Asking has changed nothing.
        assert (await bench.route(prompt=PROMPT)).json()["reason"] == warm["reason"]

    play(model_folder, scene)


def test_what_nodes_publish_reaches_the_decisions(model_folder: Path) -> None:
    """The subscriber's index and the placer's index are the same object, also while it is empty."""

    async def scene(bench: Bench) -> None:
        router = bench.stack.router
        assert router.index is router.dispatcher.state("stub-model").placer.index
        hashes = HashChain().hashes(bench.nodes["p1"].fingerprint, PROMPT)
        router.index.stored(bench.nodes["p1"].incarnation, hashes)
        told = (await bench.route(prompt=PROMPT)).json()
        assert {row["node"]: row["hit_tokens"] for row in told["prefill"]} == {"p0": 0, "p1": 96}
        assert told["prefill"][0]["node"] == "p1"
        assert (await bench.admin.get("/status")).json()["index"]["blocks"] == 6

    play(model_folder, scene)


def test_text_is_tokenized_as_the_api_does(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        text = "the quick brown fox"
        usage = (await bench.complete(prompt=text)).json()["usage"]
        assert (await bench.route(prompt=text)).json()["prompt_tokens"] == usage["prompt_tokens"]
        messages = [{"role": "user", "content": text}]
        chat = await bench.api.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
        asked = (await bench.route(prompt=text, chat=True)).json()["prompt_tokens"]
        assert asked == chat.json()["usage"]["prompt_tokens"]

    play(model_folder, scene)


def test_what_cannot_be_routed_is_refused(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        for body, words in (
            ({}, "prompt must be"),
            ({"prompt": ""}, "prompt must be"),
            ({"prompt": []}, "prompt must be"),
            ({"prompt": [True]}, "prompt must be"),
            ({"prompt": [400]}, "below 400"),
            ({"prompt": [5] * (MAX_LEN + 1)}, f"takes {MAX_LEN}"),
            ({"prompt": "fox " * 200_000}, f"than the {MAX_LEN}"),
            ({"prompt": "x", "max_tokens": "3"}, "max_tokens"),
            ({"prompt": "x", "cache_salt": 5}, "cache_salt"),
        ):
            answer = await bench.route(**body)
            assert answer.status_code == 400, answer.text
            assert words in answer.json()["error"]["message"]
        for limit in ("0", "-1", "x", "1001", "9" * 5000, "%C2%B2"):  # the last is a raised 2
            assert (await bench.admin.get(f"/requests?limit={limit}")).status_code == 400

    play(model_folder, scene)


def test_requests_are_told_by_our_id_and_by_the_clients(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        ids = [(await bench.complete()).headers["x-request-id"] for _ in range(3)]
        listed = (await bench.admin.get("/requests?limit=2")).json()["requests"]
        assert [summary["request_id"] for summary in listed] == ids[:0:-1]
        story = (await bench.admin.get(f"/requests/{ids[0]}")).json()
        assert (story["outcome"], story["attempts"]) == ("finished", 1)
        assert story["events"][-1]["event"] == "finished"
        assert (await bench.admin.get("/requests/other")).status_code == 404
        await bench.api.post("/v1/completions", json={"prompt": PROMPT}, headers={"x-request-id": "batch/7"})
        assert (await bench.admin.get("/requests/batch%2F7")).json()["client_request_id"] == "batch/7"

        bench.nodes["d0"].gate.clear()
        bench.nodes["d1"].gate.clear()
        call = asyncio.ensure_future(bench.complete())
        async with asyncio.timeout(10):
            while not any(node.running for node in (bench.nodes["d0"], bench.nodes["d1"])):
                await asyncio.sleep(0.01)
        assert (await bench.admin.get("/requests?limit=1")).json()["requests"][0]["outcome"] == "running"
        bench.nodes["d0"].gate.set()
        bench.nodes["d1"].gate.set()
        assert (await call).status_code == 200

    play(model_folder, scene)


def test_draining_nodes_get_nothing_new_and_say_so(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.nodes["d0"].draining = True
        await bench.stack.usable(2, 1)
        states = {node["node_id"]: node["state"] for node in (await bench.admin.get("/nodes")).json()["nodes"]}
        assert states == {"d0": "draining", "d1": "usable", "p0": "usable", "p1": "usable"}
        metrics = (await bench.api.get("/metrics")).text
        assert 'kvrelay_node_draining{model_name="stub-model",node="d0",role="decode"} 1.0' in metrics
        assert 'kvrelay_node_usable{model_name="stub-model",node="d0",role="decode"} 0.0' in metrics
        for _ in range(4):
            assert (await bench.complete()).headers["x-kvrelay-decode-node"] == "d1"
        bench.nodes["d1"].draining = True
        await bench.stack.usable(2, 0)
        refused = await bench.complete()
        assert refused.status_code == 503
        assert "every decode node that is left is draining" in refused.json()["error"]["message"]
        dry = (await bench.route(prompt=PROMPT)).json()
        assert (dry["mode"], dry["decode"]) == (None, [])
        bench.nodes["d0"].draining = False
        await bench.stack.usable(2, 1)
        assert (await bench.complete()).headers["x-kvrelay-decode-node"] == "d0"

    play(model_folder, scene, policy="round_robin")


def test_silent_node_is_told_from_a_usable_one(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        bench.nodes["p1"].pings_answered = False
        await bench.stack.usable(1, 2)
        nodes = {node["node_id"]: node for node in (await bench.admin.get("/nodes")).json()["nodes"]}
        assert nodes["p1"]["state"] == "not answering"
        assert nodes["p1"]["routing"] is None
        assert nodes["p0"]["routing"]["slowness"] == 1.0
        assert nodes["p0"]["breaker"]["state"] == "closed"

    play(model_folder, scene)


def test_a_router_that_shall_restart_fails_its_health_checks_and_serves_until_it_refuses(model_folder: Path) -> None:
    async def scene(bench: Bench) -> None:
        assert (await bench.api.get("/ready")).status_code == 200
        status = (await bench.admin.post("/restart", json={"grace_s": 60})).json()
        assert status["restarting"]
        assert [(await bench.api.get(path)).status_code for path in ("/health", "/ready", "/ping")] == [503, 503, 200]
        assert (await bench.complete()).status_code == 200
        bench.stack.router.dispatcher.refuse_new(Unavailable("about to restart"))
        refused = await bench.complete()
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "about to restart")

    play(model_folder, scene)
