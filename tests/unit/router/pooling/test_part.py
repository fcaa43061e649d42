"""Parts on stub nodes: which node gets them, what failures cost, and that nothing is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.stub_node import Stack, StubNode, running_stack
from support.stub_pooling import pooled

from common.base.errors import DeadlineExceeded, EngineError, KvRelayError, Overloaded, Unavailable
from common.config.service_configs import RouterConfig
from common.control.identities import pack_ids
from common.control.pooling import PoolInput, PoolRequest
from router.policy import Fleet
from router.pooling.call import PoolCall
from router.pooling.part import pick
from router.pooling.work import PoolWork
from router.requests.queued_request import Tenant

WIDTH = 8


def play(
    model_folder: Path,
    scene: Callable[[Stack, list[StubNode]], Awaitable[None]],
    *,
    count: int = 2,
    max_num_seqs: int = 64,
    **config: object,
) -> None:
    """Run `scene` with a router and nodes of one embedding model; then check that all counters are at zero."""

    async def main() -> None:
        nodes = [
            StubNode("prefill", f"e{i}", str(model_folder), task="embed", hidden_size=WIDTH, max_num_seqs=max_num_seqs)
            for i in range(count)
        ]
        settings = RouterConfig(**{"lease_s": 1.0, **config})  # type: ignore[arg-type]
        async with running_stack(settings, *nodes) as stack:
            await scene(stack, nodes)
            await stack.settled()
            router = stack.router.dispatcher
            assert not router.queued
            assert not [each for each in router.stories.recent(100) if each["outcome"] == "running"]

    asyncio.run(asyncio.wait_for(main(), 60))


def work(count: int = 3, length: int = 5) -> PoolWork:
    inputs = [PoolInput(pack_ids([(7 * index + place) % 300 for place in range(length)])) for index in range(count)]
    return PoolWork("stub-model", inputs, WIDTH)


def expected(wanted: PoolWork) -> list[bytes]:
    return pooled(PoolRequest(None, list(wanted.inputs)), "embed", WIDTH)  # type: ignore[arg-type]


async def run(stack: Stack, wanted: PoolWork, name: str = "call") -> list[bytes] | None:
    return await PoolCall(stack.router.dispatcher, name, "", wanted).run()


async def failure(stack: Stack, wanted: PoolWork) -> KvRelayError:
    with pytest.raises(KvRelayError) as caught:
        await run(stack, wanted, "failing")
    return caught.value


def test_a_killed_node_in_the_middle_of_1000_inputs_costs_no_answer(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        first, second = nodes
        first.gate.clear()  # it takes parts and answers none
        wanted = work(1000, 9)
        call = asyncio.create_task(run(stack, wanted))
        await first.until(lambda: any(isinstance(each, PoolRequest) for each in first.received))
        await first.close()
        assert await call == expected(wanted)
        stack.list_nodes(second)
        assert {"node_lost", "retry"} <= {event["event"] for each in stories(stack) for event in each["events"]}

    play(model_folder, scene)


def stories(stack: Stack) -> list[dict]:  # type: ignore[type-arg]
    return stack.router.dispatcher.stories.get("call")["choices"]  # type: ignore[index]


def test_parts_go_to_all_nodes_and_come_back_in_order(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        wanted = work(600, 20)
        assert await run(stack, wanted) == expected(wanted)
        for node in nodes:
            assert any(isinstance(each, PoolRequest) for each in node.received)

    play(model_folder, scene, count=3)


def test_a_part_that_failed_goes_to_another_node_at_once(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        nodes[0].fail_with = ("engine_error", "scripted")
        for number in range(4):
            assert await run(stack, work(), f"call{number}") == expected(work())

    play(model_folder, scene)


def test_a_part_fails_after_as_many_attempts_as_configured(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        for node in nodes:
            node.fail_with = ("engine_error", "scripted")
        error = await failure(stack, work())
        assert isinstance(error, EngineError)
        assert error.message == "scripted (after 2 attempts)"

    play(model_folder, scene, max_attempts=2)


def test_an_error_that_any_node_would_give_is_not_retried(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        for node in nodes:
            node.fail_with = ("invalid_request", "scripted")
        assert (await failure(stack, work())).http_status == 400
        assert sum(isinstance(each, PoolRequest) for node in nodes for each in node.received) == 1

    play(model_folder, scene)


def test_a_node_that_answers_with_too_few_vectors_counts_as_failed(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        nodes[0].hidden_size = WIDTH - 1
        for number in range(3):
            assert await run(stack, work(), f"call{number}") == expected(work())

    play(model_folder, scene)


def test_without_a_node_a_new_call_is_refused_and_one_that_was_admitted_waits(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        (node,) = nodes
        node.gate.clear()
        call = asyncio.create_task(run(stack, work()))
        await node.until(lambda: bool(node.pooling))
        await node.close()
        fresh = StubNode("prefill", "e9", node.model_path, task="embed", hidden_size=WIDTH)
        stack.list_nodes()
        error = await failure(stack, work())
        assert isinstance(error, Unavailable)
        assert error.message == "no node of stub-model is available now; try again"
        stack.list_nodes(fresh)
        assert await call == expected(work())

    play(model_folder, scene, count=1)


def test_a_part_that_no_node_could_get_waits_still_and_counts_no_attempt(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        (node,), router = nodes, stack.router.dispatcher
        send, refusals = router.nodes.send, [Unavailable("no link"), Unavailable("no link")]
        counted: list[tuple[str, int]] = []

        def fail_twice(incarnation: str, message: Any, **leg: Any) -> None:
            if refusals and isinstance(message, PoolRequest):
                raise refusals.pop()
            send(incarnation, message, **leg)

        monkeypatch.setattr(router.nodes, "send", fail_twice)
        metrics = router.state("stub-model").metrics
        monkeypatch.setattr(metrics, "attempt", lambda *attempt: counted.append(attempt))
        node.gate.clear()
        call = PoolCall(router, "call", "", work())
        task = asyncio.create_task(call.run())
        while refusals:
            await asyncio.sleep(0.001)
        assert (router.waiting, counted, call.attempts, call.tried_tokens) == (1, [], 0, 0)
        await node.until(lambda: bool(node.pooling))
        assert (router.waiting, counted, call.attempts) == (0, [("pooled", 3)], 3)
        node.gate.set()
        assert await task == expected(work())

    play(model_folder, scene, count=1)


def test_a_client_that_leaves_aborts_all_parts_at_their_nodes(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        for node in nodes:
            node.gate.clear()
        call = PoolCall(stack.router.dispatcher, "call", "", work(600, 20))
        task = asyncio.create_task(call.run())
        await nodes[0].until(lambda: bool(nodes[0].pooling))
        call.cancel()
        assert await task is None
        sent = [each.key for node in nodes for each in node.received if isinstance(each, PoolRequest)]
        await nodes[0].until(lambda: {*nodes[0].aborts(), *nodes[1].aborts()} == set(sent))

    play(model_folder, scene)


def test_a_client_that_leaves_before_the_parts_start_leaves_nothing_behind(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        router = stack.router.dispatcher
        call = PoolCall(router, "call", "", work(600, 20))
        call.cancel()
        assert await call.run() is None
        await asyncio.sleep(0)
        assert (router.running, router.waiting) == (0, 0)

    play(model_folder, scene)


def test_the_story_of_a_part_names_its_node_as_those_of_generations_do(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        assert await run(stack, work()) == expected(work())
        (summary,) = stack.router.dispatcher.stories.recent(1)
        assert summary["last_decision"]["mode"] == "pooled"
        assert summary["last_decision"]["prefill"]["node"] == nodes[0].node_id

    play(model_folder, scene, count=1)


def test_stories_of_parts_that_end_with_their_call_name_its_error(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        nodes[1].gate.clear()
        nodes[0].fail_with = ("invalid_request", "scripted")
        assert (await failure(stack, work(600, 20))).message == "scripted"
        ends = {story["events"][-1]["reason"] for story in stack.router.dispatcher.stories.get("failing")["choices"]}  # type: ignore[index]
        assert ends == {"invalid_request: scripted", "the call failed: scripted"}
        stack.router.dispatcher.refuse_new(Unavailable("the router is shutting down"))
        await failure(stack, work())
        refused = stack.router.dispatcher.stories.get("failing")
        assert refused is not None
        assert refused["events"][-1]["reason"] == "the call failed: the router is shutting down"

    play(model_folder, scene)


def test_parts_wait_in_the_admission_queue_and_tenants_take_turns(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        (node,) = nodes
        node.gate.clear()
        long = PoolWork("stub-model", work(1000, 9).inputs, WIDTH, tenant=Tenant("long"))
        short = PoolWork("stub-model", work(3).inputs, WIDTH, tenant=Tenant("short"))
        ended: list[str] = []

        async def noted(name: str, wanted: PoolWork) -> None:
            assert await run(stack, wanted, name) == expected(wanted)
            ended.append(name)

        first = asyncio.create_task(noted("long", long))
        await node.until(lambda: bool(node.pooling))
        assert stack.router.dispatcher.queued
        second = asyncio.create_task(noted("short", short))
        await asyncio.sleep(0)
        node.gate.set()
        await asyncio.gather(first, second)
        assert ended == ["short", "long"]

    play(model_folder, scene, count=1, max_num_seqs=1)


def test_a_call_that_has_begun_is_not_refused_in_part(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        (node,) = nodes
        node.gate.clear()
        call = asyncio.create_task(run(stack, work(600, 20)))
        await node.until(lambda: stack.router.dispatcher.queued > 1)
        await asyncio.sleep(0.5)  # longer than a request may wait in the queue
        node.gate.set()
        assert await call == expected(work(600, 20))

    play(model_folder, scene, count=1, max_num_seqs=1, max_queue_wait_s=0.2)


def test_a_call_ends_at_its_deadline_and_with_the_router(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        for node in nodes:
            node.gate.clear()
        assert isinstance(await failure(stack, work()), DeadlineExceeded)
        call = asyncio.create_task(failure(stack, work()))
        await asyncio.sleep(0)
        stack.router.dispatcher.fail_all(Unavailable("the router is shutting down"))
        assert isinstance(await call, Unavailable)

    play(model_folder, scene, request_timeout_s=0.05)


def test_a_call_of_more_parts_than_may_wait_is_refused(model_folder: Path) -> None:
    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        assert "too much for one request" in (await failure(stack, work(400))).message
        nodes[0].gate.clear()
        running = [asyncio.create_task(run(stack, work(), f"call{number}")) for number in range(4)]
        await nodes[0].until(lambda: bool(nodes[0].pooling))
        assert isinstance(await failure(stack, work(200)), Overloaded)
        nodes[0].gate.set()
        assert await asyncio.gather(*running) == [expected(work())] * 4

    play(model_folder, scene, count=1, max_waiting=3, max_num_seqs=1)


def test_calls_of_many_users_do_not_overfill_the_queue(model_folder: Path) -> None:
    """A client chooses `user` freely. One with fewer parts in the queue takes another one's place, not a further one."""

    async def scene(stack: Stack, nodes: list[StubNode]) -> None:
        (node,) = nodes
        node.gate.clear()
        running = [asyncio.create_task(run(stack, work(), f"call{number}")) for number in range(4)]
        await node.until(lambda: bool(node.pooling))
        dispatcher = stack.router.dispatcher
        full = dispatcher.waiting
        for number in range(6):
            wanted = replace(work(), tenant=Tenant("", f"user{number}"))
            running.append(asyncio.create_task(run(stack, wanted, f"other{number}")))
            await asyncio.sleep(0.01)
            assert dispatcher.waiting == full
        node.gate.set()
        ended = await asyncio.gather(*running, return_exceptions=True)
        assert ended.count(expected(work())) == 4
        assert sum(isinstance(each, Overloaded) for each in ended) == 6

    play(model_folder, scene, count=1, max_waiting=2, max_num_seqs=1)


def test_the_node_with_the_least_work_is_picked_of_those_that_take_the_input() -> None:
    fleet = Fleet("prefill")
    fleet.add("a", "ia", context=100)
    fleet.add("b", "ib", context=500)
    fleet.add("c", "ic", context=500)
    fleet.update("ib", queued_tokens=900)
    assert pick(fleet, 200, frozenset()) == "ic"
    assert pick(fleet, 200, frozenset({"ic"})) == "ib"
    assert pick(fleet, 200, frozenset({"ib", "ic"})) == "ic"
    fleet.update("ia", queued_tokens=100)
    fleet.update("ic", queued_tokens=300)
    assert pick(fleet, 50, frozenset()) == "ia"
    assert pick(fleet, 501, frozenset()) is None
