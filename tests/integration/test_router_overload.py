"""More requests than nodes can use: they are queued, ordered, refused with a reason; none is lost. Scripted nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.stub_node import Stack, StubNode, make_model_folder, running_stack

from common.config.service_configs import RouterConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("overload") / "model")


Scene = Callable[[Stack, StubNode, httpx.AsyncClient], Awaitable[None]]


def play(folder: Path, scene: Scene, *, prefill: bool = False, **config: Any) -> None:
    """One decode node that runs four requests at once, or a prefill node before it; its gate is closed at first."""

    async def main() -> None:
        nodes = [StubNode("decode", "d0", str(folder), max_num_seqs=4)]
        if prefill:
            nodes.insert(0, StubNode("prefill", "p0", str(folder), prefill_s=3.0))
        nodes[0].gate.clear()
        settings = RouterConfig(**{"lease_s": 3.0, "local_prefill_tokens": 0, **config})
        async with (
            running_stack(settings, *nodes) as stack,
            httpx.AsyncClient(base_url=stack.url, timeout=20.0, trust_env=False) as client,
        ):
            await scene(stack, nodes[0], client)
            nodes[0].gate.set()
            await stack.settled()
            assert stack.router.dispatcher.queued == 0

    asyncio.run(asyncio.wait_for(main(), 60))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


class Asker:
    """Sends requests one after the other; each is placed or queued before the next one is sent."""

    def __init__(self, stack: Stack, client: httpx.AsyncClient) -> None:
        self.stack, self.client = stack, client
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    async def ask(self, mark: int, **body: Any) -> asyncio.Task[httpx.Response]:
        dispatcher = self.stack.router.dispatcher
        seen = dispatcher.queued + sum(len(node.requests()) for node in self.stack.nodes)
        ended = sum(task.done() for task in self.tasks)
        prompt = [mark % 200 + 10] * 20
        task = asyncio.create_task(
            self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **body})
        )
        self.tasks.append(task)
        await until(
            lambda: (
                dispatcher.queued + sum(len(node.requests()) for node in self.stack.nodes) > seen
                or sum(each.done() for each in self.tasks) > ended
            )
        )
        return task


def marks(node: StubNode) -> list[int]:
    return [request.token_ids[0] - 10 for request in node.requests()]


def test_what_no_node_can_use_yet_waits_and_leaves_by_priority(folder: Path) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        asker = Asker(stack, client)
        for mark in range(5):
            await asker.ask(mark)
        for mark, priority in ((10, 4), (11, 3), (12, 7), (13, 0), (14, 3)):
            await asker.ask(mark, priority=priority)
        assert marks(node) == [0, 1, 2, 3, 4], "a quarter more than it can run"
        assert stack.router.dispatcher.queued == 5
        assert "kvrelay_requests_held 5.0" in (await client.get("/metrics")).text
        node.gate.set()
        answers = await asyncio.gather(*asker.tasks)
        assert [answer.status_code for answer in answers] == [200] * 10
        assert marks(node)[5:] == [13, 11, 14, 10, 12]
        assert node.requests()[5].request.priority == 0

    play(folder, scene)


def test_users_share_what_there_is(folder: Path) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        asker = Asker(stack, client)
        for mark in range(5):
            await asker.ask(mark, user="greedy")
        for mark in range(100, 108):
            await asker.ask(mark, user="greedy")
        for mark in range(20, 24):
            await asker.ask(mark, user="modest")
        node.gate.set()
        await asyncio.gather(*asker.tasks)
        order = marks(node)[5:]
        assert all(mark < 100 for mark in order[1:8:2]), order

    play(folder, scene)


def test_a_full_queue_refuses_with_a_reason_and_loses_nothing_accepted(folder: Path) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        asker = Asker(stack, client)
        for mark in range(30):
            await asker.ask(mark)
        refused = [task.result() for task in asker.tasks if task.done()]
        assert [answer.status_code for answer in refused] == [429] * 22
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert refused[0].json()["error"]["code"] == "overloaded"
        assert "8 requests are waiting" in refused[0].json()["error"]["message"]
        other = await asker.ask(50, user="somebody else")
        node.gate.set()
        answers = await asyncio.gather(*asker.tasks)
        assert other.result().status_code == 200, "a newcomer takes the place of one of the greedy"
        assert sum(answer.status_code == 200 for answer in answers) == 8

    play(folder, scene, max_waiting=8)


def test_who_waits_too_long_or_leaves_is_let_go(folder: Path) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        asker = Asker(stack, client)
        for mark in range(5):
            await asker.ask(mark)
        late, gone = await asker.ask(6), await asker.ask(7)
        gone.cancel()
        await until(lambda: stack.router.dispatcher.queued == 1)
        answer = await late
        assert answer.status_code == 429
        assert "no node had room for 0.2 s" in answer.json()["error"]["message"]
        assert "retry-after" in answer.headers
        node.gate.set()
        assert [(await task).status_code for task in asker.tasks[:5]] == [200] * 5
        assert marks(node) == [0, 1, 2, 3, 4]

    play(folder, scene, max_queue_wait_s=0.2)


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        ({"n": 20}, {"max_queue_wait_s": 0.05}),
        ({"prompt": [[5] * 20, [6] * 20] * 10}, {"max_queue_wait_s": 0.05}),
        ({"n": 20}, {"slo_ttft": 0.001}),
    ],
)
def test_a_request_that_has_begun_is_not_refused_in_part(
    folder: Path, body: dict[str, Any], limit: dict[str, Any]
) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        node.step_s, node.prefill_s = 0.1, 3.0
        node.gate.set()
        wanted = {"prompt": [5] * 20, "max_tokens": 3, "ignore_eos": True}
        await client.post("/v1/completions", json=wanted)  # the router learns how long it takes
        answer = await client.post("/v1/completions", json={**wanted, "stream": True, **body})
        assert answer.status_code == 200, answer.text
        assert answer.text.count('"finish_reason":"length"') == 20
        assert "overloaded" not in answer.text

    play(folder, scene, **limit)


def test_a_client_that_leaves_has_no_more_of_its_samples_sent(folder: Path) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        call = await Asker(stack, client).ask(5, n=8)
        call.cancel()
        await node.until(lambda: bool(node.aborts()))
        assert len(node.requests()) == len(node.aborts()) == 1

    play(folder, scene)


def test_an_objective_that_would_be_missed_is_said_at_once(folder: Path) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        asker = Asker(stack, client)
        node.gate.set()
        first = await (await asker.ask(0))
        assert first.status_code == 200, "nothing is measured yet"
        node.gate.clear()
        await asker.ask(1)
        refused = await (await asker.ask(2))
        assert refused.status_code == 429
        assert "first token would take about" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert marks(node) == [0, 1], "an idle node is tried, whatever the estimate"
        node.gate.set()
        assert (await asker.tasks[1]).status_code == 200

    play(folder, scene, prefill=True, slo_ttft=2.0)


def test_with_no_decode_node_new_requests_get_503_at_once_and_service_comes_back(folder: Path) -> None:
    async def scene(stack: Stack, node: StubNode, client: httpx.AsyncClient) -> None:
        asker = Asker(stack, client)
        for mark in range(7):
            await asker.ask(mark)
        stack.list_nodes()
        await node.close()
        node.running.clear()
        answer = await client.post("/v1/completions", json={"prompt": [5] * 20, "max_tokens": 2})
        assert answer.status_code == 503
        assert answer.json()["error"]["type"]
        reborn = StubNode("decode", "d0", str(folder), max_num_seqs=4)
        stack.list_nodes(reborn)
        await stack.usable(0, 1)
        answer = await client.post("/v1/completions", json={"prompt": [5] * 20, "max_tokens": 2})
        assert answer.status_code == 200
        begun = await asyncio.gather(*asker.tasks)
        assert [answer.status_code for answer in begun] == [200] * 7, "what had begun or waited goes on"

    play(folder, scene)
