"""What ends a request in the router, and only that one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from common.base.clock import MockClock
from common.base.errors import BadRequest, Overloaded, Unavailable
from common.control.messages import EngineRequest, SamplingParams
from router.metrics import Metrics
from router.nodes.node_table import NodeTable
from router.requests.dispatch import Dispatcher, DispatchSettings
from router.requests.generation import Generation, GenerationRequest, Outcome
from router.requests.placement import Placement, PlacementRequest

REQUEST = GenerationRequest(EngineRequest([1, 2, 3], SamplingParams(seed=0, max_tokens=4)), skip_special_tokens=False)


def play(scene: Callable[[Dispatcher], Awaitable[None]], *, max_waiting: int = 256) -> None:
    async def main() -> None:
        dispatcher = Dispatcher(DispatchSettings(max_waiting=max_waiting), Metrics())
        try:
            await scene(dispatcher)
            assert dispatcher.running == dispatcher.waiting == 0
        finally:
            dispatcher.close()

    asyncio.run(asyncio.wait_for(main(), 20))


async def submit(dispatcher: Dispatcher, name: str) -> Generation:
    generation = dispatcher.submit(name, [REQUEST], cast("Any", None), lambda: None)[0]
    await asyncio.sleep(0)  # it is placed
    return generation


def message(generation: Generation) -> str:
    assert generation.outcome is not None
    assert generation.outcome.error is not None
    return generation.outcome.error.message


def test_a_bug_in_the_placing_of_one_that_waited_ends_it_and_the_others_are_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)

    async def scene(dispatcher: Dispatcher) -> None:
        waiting = [await submit(dispatcher, name) for name in "abc"]
        asked: list[PlacementRequest] = []

        def decide(order: PlacementRequest, **_: object) -> None:
            asked.append(order)
            raise ZeroDivisionError

        monkeypatch.setattr(dispatcher.placer, "decide", decide)
        dispatcher._on_usable()
        async with asyncio.timeout(20):
            while dispatcher.running:
                await asyncio.sleep(0.001)
        assert len(asked) == 3
        assert [message(each) for each in waiting] == ["internal error in the router"] * 3

    play(scene)


def test_one_that_was_let_in_waits_for_nodes_to_come_back_and_a_new_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever was held back until the nodes had room must not be refused because they were cut off in that moment."""
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)

    async def scene(dispatcher: Dispatcher) -> None:
        let_in, new = await submit(dispatcher, "a"), await submit(dispatcher, "b")
        dispatcher._live["a"].admitted = True
        monkeypatch.setattr(NodeTable, "rejoining", False)
        dispatcher._on_usable()
        async with asyncio.timeout(20):
            while dispatcher.running > 1:
                await asyncio.sleep(0.001)
        assert "no decode node" in message(new)
        assert let_in.outcome is None
        let_in.cancel()

    play(scene)


def test_being_woken_in_vain_does_not_prolong_the_wait_for_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that flaps without ever being of use would else keep its clients for as long as it does."""
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)
    clock = MockClock()

    async def scene(dispatcher: Dispatcher) -> None:
        dispatcher._clock = clock
        waiting = await submit(dispatcher, "a")
        waits: list[float] = []
        park = dispatcher._retry_wait.park

        def noted(request_id: str, wait_s: float, **calls: Any) -> None:
            waits.append(wait_s)
            park(request_id, wait_s, **calls)

        monkeypatch.setattr(dispatcher._retry_wait, "park", noted)
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

    play(scene)


def test_one_that_was_parked_and_then_held_back_waits_its_whole_time_for_a_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes came back, busy; when its turn has come they are gone once more: that is another wait."""
    monkeypatch.setattr(NodeTable, "rejoining", True)
    monkeypatch.setattr("router.requests.retry_wait.WAKE_AFTER_S", 0.0)
    for module in ("admission", "admission_queue"):
        monkeypatch.setattr(f"router.requests.{module}.crowded", lambda *_: "every node is busy")
    clock = MockClock()

    async def scene(dispatcher: Dispatcher) -> None:
        dispatcher._clock = clock
        waiting = await submit(dispatcher, "a")
        decide = dispatcher.placer.decide
        placement = Placement(cast("Any", None), cast("Any", None), 3, 4)
        monkeypatch.setattr(dispatcher.placer, "decide", lambda _: placement)
        dispatcher._on_usable()
        async with asyncio.timeout(20):
            while not len(dispatcher.admission_queue):
                await asyncio.sleep(0.001)
        clock.advance(20.0)
        monkeypatch.setattr(dispatcher.placer, "decide", decide)
        dispatcher.admission_queue._queue.remove("a")
        dispatcher._let_in("a")
        assert waiting.outcome is None
        assert len(dispatcher._retry_wait) == 1
        waiting.cancel()

    play(scene)


def test_a_router_that_stops_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections stay open until their answers are through; what comes on them meanwhile would be cut off."""
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


def test_one_that_fails_and_cannot_be_ended_in_order_does_not_keep_those_behind_it_from_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async def scene(dispatcher: Dispatcher) -> None:
        monkeypatch.setattr(dispatcher.placer, "decide", broken)
        end, broken_ends = dispatcher._metrics.end, [True]
        monkeypatch.setattr(dispatcher._metrics, "end", lambda each: broken() if broken_ends.pop() else end(each))
        broken_ends[:0] = [False] * 40
        burst = [dispatcher.submit(f"r{i}", [REQUEST], cast("Any", None), lambda: None)[0] for i in range(40)]
        async with asyncio.timeout(20):
            while dispatcher.running:
                await asyncio.sleep(0)
        assert [message(each) for each in burst] == ["internal error in the router"] * 40

    play(scene)


def test_more_prompts_than_the_queue_takes_are_the_clients_mistake() -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        with pytest.raises(BadRequest, match="at most 256 prompts"):
            dispatcher.check_room(257)
        dispatcher.check_room(256)

    play(scene)


def test_a_burst_is_placed_in_portions_and_one_that_left_before_its_turn_is_not_placed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene(dispatcher: Dispatcher) -> None:
        asked: list[PlacementRequest] = []

        def decide(order: PlacementRequest, **_: object) -> None:
            asked.append(order)
            raise ZeroDivisionError  # of one request, and not of those behind it

        monkeypatch.setattr(dispatcher.placer, "decide", decide)
        burst = [dispatcher.submit(f"r{i}", [REQUEST], cast("Any", None), lambda: None)[0] for i in range(80)]
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
    """Those of one turn of the loop have not begun when the next of them asks for a place."""
    for module in ("admission", "admission_queue"):
        monkeypatch.setattr(f"router.requests.{module}.crowded", lambda *_: "every node is busy")

    async def scene(dispatcher: Dispatcher) -> None:
        placement = Placement(cast("Any", None), cast("Any", None), 3, 4)
        monkeypatch.setattr(dispatcher.placer, "decide", lambda _: placement)
        early = [await submit(dispatcher, f"a{i}") for i in range(6)]
        late: list[Generation] = []
        request = REQUEST._replace(tenant="b")
        for i in range(6):
            with contextlib.suppress(Overloaded):
                late += dispatcher.submit(f"b{i}", [request], cast("Any", None), lambda: None)
        await asyncio.sleep(0)
        assert [sum(each.outcome is None for each in those) for those in (early, late)] == [3, 3]
        for generation in early + late:
            generation.cancel()

    play(scene, max_waiting=6)


@pytest.mark.parametrize("held_up", [False, True])
def test_nodes_have_not_failed_when_the_router_was_held_up(monkeypatch: pytest.MonkeyPatch, *, held_up: bool) -> None:
    """Held up a few times, it would else think that every node is broken."""
    monkeypatch.setattr(NodeTable, "rejoining", held_up)

    async def scene(dispatcher: Dispatcher) -> None:
        dispatcher._on_lost("d0-1", "no sign of life")
        assert dispatcher.breakers.view("d0-1").failures == (0 if held_up else 1)

    play(scene)
