"""The dispatcher: what ends a request, and only that one; bursts, and a full queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.mock_clock import MockClock

from common.base.clock import Clock, monotonic
from common.base.errors import BadRequest, Overloaded, Unavailable
from common.config.service_configs import RouterConfig
from common.control.identities import pack_ids
from common.control.messages import AttemptFailed, AttemptKey, EngineRequest, SamplingParams
from router.http.openai.samples import samples
from router.metrics import Metrics
from router.nodes.node_table import NodeTable
from router.policy import Query
from router.requests.dispatch import Dispatcher
from router.requests.generation import Generation
from router.requests.placement import Placement
from router.requests.queued_request import Tenant
from router.requests.request import GenerationRequest, Outcome

REQUEST = GenerationRequest(EngineRequest(pack_ids([1, 2, 3]), SamplingParams(seed=0, max_tokens=4)), detokenize=False)


def play(scene: Callable[[Dispatcher], Awaitable[None]], *, max_waiting: int = 256, clock: Clock = monotonic) -> None:
    """Run a scene that ends every request; then no part of the router may know one."""

    async def main() -> None:
        dispatcher = Dispatcher(RouterConfig(max_waiting=max_waiting), Metrics(), clock=clock)
        seen: set[str] = set()
        deadlines = dispatcher.state("m").deadlines
        add = deadlines.add

        def noted(request_id: str) -> None:
            seen.add(request_id)
            add(request_id)

        deadlines.add = noted  # type: ignore[method-assign]
        try:
            await scene(dispatcher)
            assert dispatcher.running == dispatcher.waiting == 0
            parts = [part for part in vars(dispatcher.state("m")).values() if hasattr(part, "__contains__")]
            assert len(parts) == 5
            assert not [(part, each) for part in parts for each in seen if each in part]
        finally:
            dispatcher.close()

    asyncio.run(asyncio.wait_for(main(), 20))


async def submit(dispatcher: Dispatcher, name: str) -> Generation:
    generation = dispatcher.submit("m", name, [REQUEST], cast("Any", None), lambda: None)[0]
    await asyncio.sleep(0)  # it is placed
    return generation


def make_all_wait(monkeypatch: pytest.MonkeyPatch, dispatcher: Dispatcher) -> None:
    """In the admission queue."""
    for module in ("admission", "admission_queue"):
        monkeypatch.setattr(f"router.requests.{module}.crowded", lambda *_, **__: "every node is busy")
    placement = Placement(cast("Any", None), cast("Any", None), 3, 4)
    monkeypatch.setattr(dispatcher.state("m").placer, "decide", lambda *_: placement)


def message(generation: Generation) -> str:
    assert generation.outcome is not None
    assert generation.outcome.error is not None
    return generation.outcome.error.message


def test_a_bug_in_placing_a_request_that_waited_ends_it_and_the_others_are_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)

    async def scene(dispatcher: Dispatcher) -> None:
        waiting = [await submit(dispatcher, name) for name in "abc"]
        asked: list[Query] = []

        def decide(order: Query, *_: object) -> None:
            asked.append(order)
            raise ZeroDivisionError

        monkeypatch.setattr(dispatcher.state("m").placer, "decide", decide)
        dispatcher._on_usable()
        async with asyncio.timeout(20):
            while dispatcher.running:
                await asyncio.sleep(0.001)
        assert len(asked) == 3
        assert [message(each) for each in waiting] == ["internal error in the router"] * 3

    play(scene)


def test_an_admitted_request_waits_for_nodes_to_return_and_a_new_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that waited until the nodes had room must not be refused because they were cut off in that moment."""
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)

    async def scene(dispatcher: Dispatcher) -> None:
        admitted, new = await submit(dispatcher, "a"), await submit(dispatcher, "b")
        admitted.flow.siblings.admitted = True
        monkeypatch.setattr(NodeTable, "rejoining", False)
        dispatcher._on_usable()
        async with asyncio.timeout(20):
            while dispatcher.running > 1:
                await asyncio.sleep(0.001)
        assert "no decode node" in message(new)
        assert admitted.outcome is None
        admitted.cancel()

    play(scene)


def test_being_woken_in_vain_does_not_prolong_the_wait_for_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a node that flaps without ever being of use would keep its clients waiting for as long as it does."""
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)
    clock = MockClock()

    async def scene(dispatcher: Dispatcher) -> None:
        waiting = await submit(dispatcher, "a")
        waits: list[float] = []
        until_node = dispatcher._retry_wait.until_node

        def noted(request_id: str, wait_s: float, **calls: Any) -> None:
            waits.append(wait_s)
            until_node(request_id, wait_s, **calls)

        monkeypatch.setattr(dispatcher._retry_wait, "until_node", noted)
        async with asyncio.timeout(20):
            for _ in range(20):
                if waiting.outcome is not None:
                    break
                before = len(waits)
                clock.advance(4.0)
                dispatcher._on_usable()
                while len(waits) == before and waiting.outcome is None:
                    await asyncio.sleep(0.001)
        assert waits == [11.0, 7.0, 3.0]
        assert "no decode node" in message(waiting)

    play(scene, clock=clock)


def test_a_request_that_waited_for_a_node_and_then_in_the_queue_waits_its_whole_time_for_a_node_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes returned, busy; when its turn came they were gone again: that is another wait."""
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)
    clock = MockClock()

    async def scene(dispatcher: Dispatcher) -> None:
        waiting = await submit(dispatcher, "a")
        decide = dispatcher.state("m").placer.decide
        make_all_wait(monkeypatch, dispatcher)
        dispatcher._on_usable()
        async with asyncio.timeout(20):
            while not len(dispatcher.state("m").admission_queue):
                await asyncio.sleep(0.001)
        clock.advance(20.0)
        monkeypatch.setattr(dispatcher.state("m").placer, "decide", decide)
        monkeypatch.setattr("router.requests.admission_queue.crowded", lambda *_, **__: "")
        dispatcher.state("m").admission_queue._release()
        assert waiting.outcome is None
        assert len(dispatcher._retry_wait) == 1
        waiting.cancel()

    play(scene, clock=clock)


def test_a_router_that_stops_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections stay open until their answers are complete; requests that come on them meanwhile would be cut off."""
    monkeypatch.setattr(NodeTable, "rejoining", True)

    async def scene(dispatcher: Dispatcher) -> None:
        running = await submit(dispatcher, "a")
        dispatcher.fail_all(Unavailable("the router is shutting down; try again"))
        assert "shutting down" in message(running)
        with pytest.raises(Unavailable, match="shutting down"):
            await submit(dispatcher, "b")

    play(scene)


def test_a_request_that_cannot_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("router.requests.dispatch.Generation", broken)

    async def scene(dispatcher: Dispatcher) -> None:
        with pytest.raises(ZeroDivisionError):
            await submit(dispatcher, "a")
        assert dispatcher.stories.recent(10) == []

    play(scene)


def test_a_request_that_fails_and_cannot_be_ended_in_order_does_not_block_those_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async def scene(dispatcher: Dispatcher) -> None:
        monkeypatch.setattr(dispatcher.state("m").placer, "decide", broken)
        metrics, broken_ends = dispatcher.state("m").metrics, [True]
        failed = metrics.failed
        monkeypatch.setattr(metrics, "failed", lambda code: broken() if broken_ends.pop() else failed(code))
        broken_ends[:0] = [False] * 40
        burst = [dispatcher.submit("m", f"r{i}", [REQUEST], cast("Any", None), lambda: None)[0] for i in range(40)]
        async with asyncio.timeout(20):
            while dispatcher.running:
                await asyncio.sleep(0)
        assert [message(each) for each in burst] == ["internal error in the router"] * 40

    play(scene)


def test_more_prompts_than_the_queue_takes_are_the_clients_mistake() -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        with pytest.raises(BadRequest, match="at most 256 prompts times n, not 257") as refusal:
            dispatcher.check_room("m", 257)
        assert refusal.value.param == "n", "both completion calls have it"
        dispatcher.check_room("m", 256)

    play(scene)


def test_a_burst_is_placed_in_portions_and_a_request_cancelled_before_its_turn_is_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        asked: list[Query] = []

        def decide(order: Query, *_: object) -> None:
            asked.append(order)
            raise ZeroDivisionError  # of one request, and not of those behind it

        monkeypatch.setattr(dispatcher.state("m").placer, "decide", decide)
        burst = [dispatcher.submit("m", f"r{i}", [REQUEST], cast("Any", None), lambda: None)[0] for i in range(80)]
        assert not asked
        burst[40].cancel()
        turns = list[int]()
        while dispatcher.running:
            before = len(asked)
            await asyncio.sleep(0)
            turns.append(len(asked) - before)
        assert turns == [32, 31, 16]
        assert [generation.outcome == Outcome() for generation in burst] == [i == 40 for i in range(80)]

    play(scene)


def test_a_burst_takes_no_more_of_a_full_queue_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one turn of the loop are not placed yet when the next of them asks for room."""

    async def scene(dispatcher: Dispatcher) -> None:
        make_all_wait(monkeypatch, dispatcher)
        early = [await submit(dispatcher, f"a{i}") for i in range(6)]
        late: list[Generation] = []
        request = replace(REQUEST, tenant=Tenant("b"))
        for i in range(6):
            with contextlib.suppress(Overloaded):
                late += dispatcher.submit("m", f"b{i}", [request], cast("Any", None), lambda: None)
        await asyncio.sleep(0)
        assert [sum(each.outcome is None for each in those) for those in (early, late)] == [3, 3]
        for generation in early + late:
            generation.cancel()

    play(scene, max_waiting=6)


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one_in_a_full_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        make_all_wait(monkeypatch, dispatcher)
        patient = replace(REQUEST, engine=REQUEST.engine._replace(priority=10))
        early = [dispatcher.submit("m", f"a{i}", [patient], cast("Any", None), lambda: None)[0] for i in range(3)]
        with pytest.raises(Overloaded, match="3 requests are waiting"):
            dispatcher.submit("m", "b", [patient], cast("Any", None), lambda: None)
        late = await submit(dispatcher, "c")
        assert [each.outcome is None for each in [*early, late]] == [True, True, False, True]
        assert "more urgent" in message(early[2])
        for generation in [*early, late]:
            generation.cancel()

    play(scene, max_waiting=3)


def test_samples_take_places_of_who_has_more_in_a_full_queue_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        make_all_wait(monkeypatch, dispatcher)
        early = [await submit(dispatcher, f"a{i}") for i in range(6)]
        request = replace(REQUEST, tenant=Tenant("b"))
        with pytest.raises(Overloaded, match="6 requests are waiting"):
            dispatcher.submit("m", "four", [request] * 4, cast("Any", None), lambda: None)
        assert not [each for each in early if each.outcome is not None]
        late = dispatcher.submit("m", "three", [request] * 3, cast("Any", None), lambda: None)
        await asyncio.sleep(0)
        assert [each.outcome is None for each in early] == [True] * 3 + [False] * 3
        assert [each.outcome is None for each in late] == [True] * 3
        for generation in early + late:
            generation.cancel()

    play(scene, max_waiting=6)


@pytest.mark.parametrize("begun", [False, True])
def test_samples_that_wait_for_the_first_of_their_prompt_do_not_shut_others_out(
    monkeypatch: pytest.MonkeyPatch, *, begun: bool
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        state = dispatcher.state("m")
        make_all_wait(monkeypatch, dispatcher)
        early = dispatcher.submit("m", "a", samples(REQUEST, 6, ranked=False), cast("Any", None), lambda: None)
        await asyncio.sleep(0)
        assert len(state.admission_queue) == 1
        early[0].flow.siblings.admitted = begun
        request = replace(REQUEST, tenant=Tenant("b"))
        late: list[Generation] = []
        for name in ("b0", "b1"):
            late += dispatcher.submit("m", name, [request], cast("Any", None), lambda: None)
            if early[0].outcome is not None:
                for generation in early:
                    generation.cancel()
            await asyncio.sleep(0)
        assert [early[0].outcome is None, *(each.outcome is None for each in late)] == [begun, True, True]
        for generation in early + late:
            generation.cancel()

    play(scene, max_waiting=6)


def test_a_tenant_with_a_free_share_of_slots_is_not_refused_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        make_all_wait(monkeypatch, dispatcher)
        dispatcher.state("m").fleets.by_role["decode"].add("d", "d", capacity=4)
        early = [await submit(dispatcher, f"a{i}") for i in range(6)]
        request = replace(REQUEST, tenant=Tenant("b"))
        for generation in early:  # none can be replaced
            generation.flow.siblings.admitted = True
        late = dispatcher.submit("m", "two", [request] * 2, cast("Any", None), lambda: None)
        with pytest.raises(Overloaded, match="8 requests are waiting"):
            dispatcher.submit("m", "a", [REQUEST], cast("Any", None), lambda: None)
        await asyncio.sleep(0)
        assert [each.outcome is None for each in [*early, *late]] == [True] * 8
        for generation in early + late:
            generation.cancel()

    play(scene, max_waiting=6)


def test_tenants_with_samples_that_have_begun_do_not_fill_a_router_without_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        make_all_wait(monkeypatch, dispatcher)

        def submit(tenant: str) -> list[Generation]:
            wanted = samples(replace(REQUEST, tenant=Tenant(tenant)), 6, ranked=False)
            return dispatcher.submit("m", tenant, wanted, cast("Any", None), lambda: None)

        begun: list[Generation] = []
        for tenant in ("a", "b"):
            begun += submit(tenant)
            await asyncio.sleep(0)
            begun[-1].flow.siblings.admitted = True
        with pytest.raises(Overloaded, match="12 requests are waiting"):
            submit("c")
        for generation in begun:
            generation.cancel()

    play(scene, max_waiting=6)


@pytest.mark.parametrize("stalled", [False, True])
def test_a_loss_of_nodes_is_no_failure_of_theirs_when_the_router_stalled(
    monkeypatch: pytest.MonkeyPatch, *, stalled: bool
) -> None:
    """Otherwise, after a few stalls, the router would think that every node is broken."""
    monkeypatch.setattr(NodeTable, "rejoining", stalled)

    async def scene(dispatcher: Dispatcher) -> None:
        dispatcher._on_lost("d0-1", "no sign of life")
        assert dispatcher.breakers.view("d0-1").failures == (0 if stalled else 1)

    play(scene)


def test_the_log_names_the_node_of_a_failed_attempt(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It had the random number of the node's process."""

    async def scene(dispatcher: Dispatcher) -> None:
        nodes = {"3a46": SimpleNamespace(node_id="prefill-0")}
        monkeypatch.setattr(dispatcher.nodes, "get", nodes.get)
        for incarnation in ("3a46", "gone"):
            dispatcher._on_message(incarnation, AttemptFailed(AttemptKey("cmpl-1", 1), "peer_lost", "cut"))

    play(scene)
    assert "cmpl-1#1 failed at prefill-0: peer_lost: cut" in caplog.text
    assert "cmpl-1#1 failed at gone: peer_lost: cut" in caplog.text
