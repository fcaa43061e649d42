"""Failures known from other systems (docs/records/known-failures.md), at the router: over HTTP and with scripted nodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from support.redis_server import RedisServer
from support.stub_node import MAX_LEN, Stack, StubNode, make_model_folder, running_stack

from common.cluster.membership import Directory, Registrar
from common.config.service_configs import RouterConfig
from common.control.messages import NodeRecord

LONG = list(range(5, 90))
"""A prompt with more tokens than are prefilled locally."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model_folder(tmp_path_factory.mktemp("peers") / "stub-model"))


@contextlib.asynccontextmanager
async def stack_of(
    folder: str, *, prefill: int = 1, decode: int = 1, config: dict[str, Any] | None = None, **node: Any
) -> AsyncIterator[tuple[Stack, httpx.AsyncClient]]:
    """A router with this many scripted nodes, and a client; at the end every counter must be at zero."""
    nodes = [StubNode("prefill", f"p{n}", folder, **node) for n in range(prefill)]
    nodes += [StubNode("decode", f"d{n}", folder, **node) for n in range(decode)]
    settings = RouterConfig(**{"lease_s": 1.0, "local_prefill_tokens": 0, **(config or {})})
    async with (
        running_stack(settings, *nodes) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=20.0, trust_env=False) as client,
    ):
        yield stack, client
        await stack.settled()


def play(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scene(), 60))


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "stub-model", "prompt": LONG, "max_tokens": 8, "ignore_eos": True, **more}


def node(stack: Stack, name: str) -> StubNode:
    return next(each for each in stack.nodes if each.node_id == name)


async def metric(client: httpx.AsyncClient, name: str) -> float:
    lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_a_retry_has_a_number_of_its_own_and_the_client_sees_no_error(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder, decode=2, automatic=False) as (stack, client):
            answer = asyncio.create_task(client.post("/v1/completions", json=ask(max_tokens=1)))
            prefill = node(stack, "p0")
            await prefill.until(lambda: len(prefill.running) == 1)
            [key] = prefill.running
            prefill.fail(key, "transfer_failed")
            await prefill.until(lambda: len(prefill.requests()) == 2)
            first, second = (request.key for request in prefill.requests())
            assert (first.request_id, first.attempt, second.attempt) == (second.request_id, 1, 2)
            prefill.step()
            assert (await answer).status_code == 200

    play(scene)


def test_when_the_decode_node_dies_the_prefill_node_is_told_at_once(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder, decode=2, automatic=False) as (stack, client):
            answer = asyncio.create_task(client.post("/v1/completions", json=ask(max_tokens=1)))
            prefill = node(stack, "p0")
            await prefill.until(lambda: len(prefill.running) == 1)
            [request] = prefill.requests()
            used = next(each for each in stack.nodes if each.peer == request.decode)  # type: ignore[union-attr]
            await used.close()
            await prefill.until(lambda: request.key in prefill.aborts(), 3.0)
            stack.list_nodes(*[each for each in stack.nodes if each is not used])
            await prefill.until(lambda: len(prefill.running) == 1)
            prefill.step()
            assert (await answer).status_code == 200

    play(scene)


def test_a_node_that_restarts_under_its_name_takes_over_without_a_hang(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder) as (stack, client):
            old, decode = node(stack, "p0"), node(stack, "d0")
            old.gate.clear()
            answer = asyncio.create_task(client.post("/v1/completions", json=ask()))
            await old.until(lambda: len(old.running) == 1)
            new = StubNode("prefill", "p0", model_folder)
            stack.list_nodes(new, decode)  # the old process is still alive, but nothing waits for it any more
            async with asyncio.timeout(20):
                assert (await answer).status_code == 200
            assert {request.key.attempt for request in old.requests()} == {1}
            assert decode.requests()[-1].key.attempt == 2
            await old.close()

    play(scene)


def test_usage_counts_what_a_run_without_a_fault_counts(model_folder: str) -> None:
    """After a hand-over the existing tokens are sent as context, and the new node finds much of them in its cache: the
    client's usage must show neither."""

    async def scene() -> None:
        async with stack_of(model_folder, decode=2, step_s=0.02, cached_tokens=7) as (stack, client):
            body = ask(stream=True, stream_options={"include_usage": True}, return_token_ids=True)
            tokens: list[int] = []
            usage: dict[str, Any] = {}
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                used = node(stack, answer.headers["x-kvrelay-decode-node"])
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    before = len(tokens)
                    tokens += [token for choice in event["choices"] for token in choice.get("token_ids") or []]
                    if before < 3 <= len(tokens):
                        for each in stack.nodes:
                            each.cached_tokens = 80
                        await used.close()
            stack.list_nodes(*[each for each in stack.nodes if each is not used])
            assert tokens == [65 + n for n in range(8)]
            assert usage == {
                "prompt_tokens": len(LONG),
                "completion_tokens": 8,
                "total_tokens": len(LONG) + 8,
                "prompt_tokens_details": {"cached_tokens": 7},
            }

    play(scene)


def test_hits_that_the_request_itself_left_behind_are_not_billed_as_cached(model_folder: str) -> None:
    """The first attempt ends before its prefill node reported; the second one hits the blocks that the first computed."""

    async def scene() -> None:
        async with stack_of(model_folder, automatic=False) as (stack, client):
            answer = asyncio.create_task(client.post("/v1/completions", json=ask(max_tokens=1)))
            prefill = node(stack, "p0")
            await prefill.until(lambda: len(prefill.running) == 1)
            prefill.cached_tokens = 80
            prefill.fail(next(iter(prefill.running)), "transfer_failed")
            await prefill.until(lambda: len(prefill.running) == 1)
            prefill.step()
            assert (await answer).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}

    play(scene)


def test_load_is_counted_when_it_is_sent_and_is_zero_again_when_clients_leave(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder, prefill=2, decode=2, automatic=False, config={"policy": "least_load"}) as (
            stack,
            client,
        ):
            asked = [asyncio.create_task(client.post("/v1/completions", json=ask())) for _ in range(16)]
            for each in stack.nodes:
                # No node has reported yet: the router's own count of sent requests decides.
                await each.until(lambda each=each: len(each.running) == 8)
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)
            for each in stack.nodes:
                await each.until(lambda each=each: not each.running)
            await stack.settled()
            assert stack.router.dispatcher.running == 0
            assert await metric(client, "kvrelay_requests_pending ") == 0
            assert await metric(client, "kvrelay_request_cancelled_total ") == 16

    play(scene)


def test_a_prompt_computed_on_the_decode_node_is_said_to_be(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder, prefill=0) as (_, client):
            answer = await client.post("/v1/completions", json=ask())
            assert answer.headers["x-kvrelay-prefill-mode"] == "local"
            assert "prefill node" in answer.headers["x-kvrelay-reason"]
            assert await metric(client, 'kvrelay_attempts_total{mode="local"}') == 1
            assert await metric(client, 'kvrelay_attempts_total{mode="relayed"}') == 0
            assert "local" in (await client.get("/health")).json()["prefill_mode"]

    play(scene)


def test_health_is_the_engine_loops_and_not_the_web_servers(model_folder: str) -> None:
    """The other half, one request that ends an engine, is in test_peers_nodes.py."""

    async def scene() -> None:
        async with stack_of(model_folder) as (stack, client):
            assert (await client.get("/health")).status_code == 200
            node(stack, "d0").step_age_s = 1000.0
            async with asyncio.timeout(20):
                while (await client.get("/health")).status_code != 503:
                    await asyncio.sleep(0.02)
            node(stack, "d0").step_age_s = 0.0
            async with asyncio.timeout(20):
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.02)

    play(scene)


def test_a_prompt_that_is_too_long_is_refused_by_name(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder) as (stack, client):
            for body in (ask(prompt=[5] * (MAX_LEN + 1)), ask(max_tokens=MAX_LEN), ask(prompt="a" * 100_000)):
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded"
            assert not any(each.requests() for each in stack.nodes)

    play(scene)


def test_a_client_cannot_set_what_is_internal(model_folder: str) -> None:
    """Known names of other systems are refused, anything else is ignored, and nothing of it reaches a node."""
    evil = "tcp://198.51.100.1:666"

    async def scene() -> None:
        async with stack_of(model_folder) as (stack, client):
            refused = await client.post("/v1/completions", json=ask(kv_transfer_params={"remote_host": evil}))
            assert refused.status_code == 400
            fields = ("decode", "prefill", "peer", "data_addresses", "src", "bootstrap_host", "key", "attempt")
            answer = await client.post("/v1/completions", json=ask(**dict.fromkeys(fields, evil)))
            assert answer.status_code == 200
            headers = {"x-request-id": evil, "x-kvrelay-prefill-node": evil, "x-kvrelay-decode-node": evil}
            answer = await client.post("/v1/completions", json=ask(), headers=headers)
            assert answer.status_code == 200
            sent = [request for each in stack.nodes for request in each.requests()]
            assert len(sent) == 4
            assert evil not in repr(sent)

    play(scene)


def test_the_tenants_salt_reaches_the_nodes(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder) as (stack, client):
            await client.post("/v1/completions", json=ask(cache_salt="tenant"))
            assert {request.request.cache_salt for each in stack.nodes for request in each.requests()} == {"tenant"}

    play(scene)


def test_nothing_that_a_client_sizes_is_unbounded(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder) as (stack, client):
            for field in (
                {"n": 10**9},
                {"best_of": 10**9},
                {"logprobs": 10**9},
                {"stop": ["x"] * 1000},
                {"stop": ["x" * 100_000]},
                {"stop_token_ids": list(range(300)) * 100},
                {"cache_salt": "s" * 100_000},
                {"max_tokens": 10**30},
                {"prompt": [[5]] * 100_000},
                {"logit_bias": {str(n): 1 for n in range(100_000)}},
            ):
                answer = await client.post("/v1/completions", json=ask(**field))
                assert answer.status_code == 400, (field.keys(), answer.text[:200])
                assert len(answer.content) < 1000
            assert not any(each.requests() for each in stack.nodes)

    play(scene)


def test_a_key_guards_every_route_but_those_of_load_balancers(model_folder: str) -> None:
    async def scene() -> None:
        async with stack_of(model_folder, config={"api_key": "secret"}) as (_, client):
            paths = (await client.get("/openapi.json", headers={"authorization": "Bearer secret"})).json()["paths"]
            assert len(paths) >= 7
            for path in (*paths, "/docs", "/openapi.json", "/nothing"):
                for method in ("GET", "POST"):
                    status = (await client.request(method, path)).status_code
                    assert status == 401 or path in ("/health", "/ready", "/ping"), (method, path, status)
            assert (await client.get("/health")).status_code == 200

    play(scene)


def test_a_lost_redis_and_a_new_router_both_find_every_node_again(model_folder: str) -> None:
    async def scene() -> None:
        node = StubNode("decode", "d0", model_folder)
        views: dict[str, list[NodeRecord]] = {}

        async def until(router: str, count: int) -> None:
            async with asyncio.timeout(10):
                while len(views.get(router, [])) != count:
                    await asyncio.sleep(0.02)

        def directory(router: str) -> asyncio.Task[None]:
            view = Directory(redis.url, "c", lambda records: views.__setitem__(router, records), 0.05, grace_s=1.0)
            return asyncio.create_task(view.run())

        with RedisServer() as redis:
            registrar = Registrar(redis.url, "c", node.record, lease_s=1.0)
            tasks = [asyncio.create_task(registrar.run()), directory("first")]
            try:
                await until("first", 1)
                await asyncio.to_thread(redis.kill)
                await asyncio.to_thread(redis.restart)
                tasks.append(directory("started during the outage"))
                await until("started during the outage", 1)
                assert len(views["first"]) == 1, "a brief loss makes nobody vanish"
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await registrar.deregister()
                await node.close()

    play(scene)
