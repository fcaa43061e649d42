"""The live view of nodes: in-flight credit and what an incarnation may say. Real links on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from support.mock_clock import MockClock
from support.stub_node import StubNode

from common.base.errors import Unavailable
from common.control import links
from common.control.identities import pack_ids
from common.control.messages import Abort, AttemptKey, DecodeRequest, EngineRequest, Message, SamplingParams
from common.kv.spec import KVSpec
from router.nodes.node_table import NodeTable


class View:
    def __init__(self) -> None:
        self.clock = MockClock(100.0)
        self.lost: list[tuple[str, str]] = []
        self.messages: list[Message] = []
        self.changed = asyncio.Event()
        self.table = NodeTable(
            "router",
            lease_s=3.0,
            on_message=lambda _, message: self.messages.append(message),
            on_lost=lambda incarnation, reason: (self.lost.append((incarnation, reason)), self.changed.set()),
            on_usable=self.changed.set,
            clock=self.clock,
        )

    async def change(self) -> None:
        async with asyncio.timeout(20):
            await self.changed.wait()
        self.changed.clear()


def play(scene: Callable[[View, StubNode], Awaitable[None]]) -> None:
    async def main() -> None:
        view, node = View(), StubNode("decode", "d0", automatic=False)
        try:
            view.table.update([node.record])
            await view.change()
            await scene(view, node)
        finally:
            view.table.close()
            await node.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def ask(number: int) -> DecodeRequest:
    return DecodeRequest(
        AttemptKey(f"r{number}", 1),
        EngineRequest(pack_ids([1] * 100), SamplingParams(seed=0, max_tokens=9)),
        pack_ids(),
        None,
        9.0,
    )


def test_requests_count_as_in_flight_until_a_pong_that_includes_them(monkeypatch: object) -> None:
    async def scene(view: View, node: StubNode) -> None:
        table = view.table
        table.send(node.incarnation, ask(1), tokens=100)
        table.tick()  # its pong will include request 1 ...
        table.send(node.incarnation, ask(2), tokens=100)  # ... but not request 2
        fleet = table.fleets("stub-model").by_role["decode"]
        at = fleet.node(node.incarnation)
        assert (at.in_flight, at.backlog) == (2, 200)
        async with asyncio.timeout(20):
            while table.usable("decode")[0].load.running != 1:
                await asyncio.sleep(0.001)
        at = fleet.node(node.incarnation)
        assert (at.running, at.in_flight, at.backlog, at.requests) == (1, 1, 100, 2)
        table.release(node.incarnation, AttemptKey("r2", 1))
        table.release(node.incarnation, AttemptKey("r2", 1))
        table.release(node.incarnation, AttemptKey("r1", 1))
        at = fleet.node(node.incarnation)
        assert (at.in_flight, at.ended, at.requests) == (0, 1, 0)

    play(scene)


def test_pings_are_rarer_while_all_nodes_answer_and_are_idle() -> None:
    async def scene(view: View, node: StubNode) -> None:
        table = view.table
        assert table.tick_s == 1.0
        table.send(node.incarnation, ask(1))
        assert table.tick_s == 0.5
        table.release(node.incarnation, AttemptKey("r1", 1))
        assert table.tick_s == 1.0
        await node.close()
        await view.change()
        assert table.tick_s == 0.5  # its link is opened again

    play(scene)


def test_new_incarnation_under_the_same_name_loses_the_old_one_at_once() -> None:
    async def scene(view: View, node: StubNode) -> None:
        reborn = StubNode("decode", "d0", automatic=False)
        try:
            view.table.update([reborn.record])
            assert [incarnation for incarnation, _ in view.lost] == [node.incarnation]
            view.changed.clear()
            await view.change()
            assert [each.incarnation for each in view.table.usable("decode")] == [reborn.incarnation]
        finally:
            await reborn.close()

    play(scene)


def test_a_node_without_a_usable_address_costs_the_others_nothing() -> None:
    async def scene(view: View, node: StubNode) -> None:
        late = StubNode("decode", "d2", automatic=False)
        try:
            broken = replace(node.record, peer=replace(node.record.peer, node_id="d1", incarnation="x"))
            broken = replace(broken, peer=replace(broken.peer, control_address="tcp://nowhere"))
            view.table.update([broken, node.record, late.record])
            while len(view.table.usable("decode")) < 2:
                await view.change()
            known = view.table.get("x")
            assert known is not None
            assert not known.usable
            view.table.tick()
            assert [len(each.pings) for each in view.table.known() if each.usable] == [1, 1]
            view.table.update([node.record, late.record])
            assert view.table.get("x") is None
        finally:
            await late.close()

    play(scene)


def test_node_that_is_no_longer_listed_finishes_its_work_but_gets_no_more() -> None:
    async def scene(view: View, node: StubNode) -> None:
        view.table.update([])
        assert view.table.usable("decode") == []
        assert view.lost == []
        assert view.table.get(node.incarnation) is not None
        await node.close()
        await view.change()
        assert len(view.lost) == 1
        view.table.tick()
        assert view.table.get(node.incarnation) is None

    play(scene)


def test_node_that_ends_in_order_is_lost_once() -> None:
    """The node closes its port shortly before membership drops it; a link that is opened in between never gets an answer."""

    async def scene(view: View, node: StubNode) -> None:
        await node.close()
        await view.change()
        view.table.tick()
        view.table.update([])
        for _ in range(9):
            view.clock.advance(view.table.tick_s)
            view.table.tick()
        assert view.table.get(node.incarnation) is None
        assert len(view.lost) == 1

    play(scene)


def test_node_that_is_listed_again_while_its_link_stood_is_told_as_usable() -> None:
    """Its pongs came all the time: whoever waits for a node would else wait in vain."""

    async def scene(view: View, node: StubNode) -> None:
        view.table.update([])
        view.changed.clear()
        view.table.update([node.record])
        assert len(view.table.usable("decode")) == 1
        assert view.changed.is_set()
        view.changed.clear()
        view.table.update([node.record])
        assert not view.changed.is_set(), "it was usable before"

    play(scene)


def test_a_draining_node_that_is_listed_again_is_told_to_the_streams_that_wait_for_it() -> None:
    async def scene(view: View, node: StubNode) -> None:
        node.draining = True
        view.table.tick()
        async with asyncio.timeout(20):
            while view.table.usable("decode"):
                await asyncio.sleep(0.001)
        view.table.update([])
        assert not view.changed.is_set()
        view.table.update([node.record])
        assert len(view.table.fleets("stub-model").finishing) == 1
        assert view.changed.is_set()

    play(scene)


@pytest.mark.parametrize("stall_s", [0.9, 2.0, 4.0])
def test_a_node_answers_whatever_the_router_itself_missed(stall_s: float) -> None:
    """Directory drops a node that does not answer for as long as Redis takes no writes."""

    async def scene(view: View, node: StubNode) -> None:
        table = view.table
        view.clock.advance(1.0)  # the usual pause between pings
        assert table.answers(node.incarnation)
        view.clock.advance(stall_s)
        assert table.answers(node.incarnation), "it was not asked"
        table.tick()
        assert table.answers(node.incarnation), "its answer could not be read yet"

    play(scene)


@pytest.mark.parametrize("stall_s", [0.9, 2.0, 4.0])
def test_a_stall_between_a_ping_and_its_answer_is_the_routers_own(stall_s: float) -> None:
    """When a whole machine stalls, the records of all nodes expire together. If the router reads Redis before the answers that
    wait in its sockets, no node must leave the list: there would be no usable one until the next poll."""

    async def scene(view: View, node: StubNode) -> None:
        node.pings_answered = False  # as good as an answer that is not read
        view.table.tick()
        view.clock.advance(stall_s)
        assert view.table.answers(node.incarnation), "read before the tick"
        view.table.tick()
        assert view.table.answers(node.incarnation), "read after the tick"
        for _ in range(8):
            view.clock.advance(0.5)
            view.table.tick()
        assert not view.table.answers(node.incarnation), "it is silent"

    play(scene)


def test_a_node_that_is_silent_for_half_a_lease_does_not_answer() -> None:
    async def scene(view: View, node: StubNode) -> None:
        node.pings_answered = False
        view.clock.advance(1.0)
        view.table.tick()
        assert view.table.answers(node.incarnation)
        view.clock.advance(0.5)
        assert not view.table.answers(node.incarnation)
        view.table.tick()
        assert not view.table.answers(node.incarnation)

    play(scene)


def test_silence_is_not_judged_when_the_router_itself_stalled() -> None:
    async def scene(view: View, node: StubNode) -> None:
        node.pings_answered = False
        view.table.tick()
        view.clock.advance(2.5)
        view.table.tick()
        assert view.lost == []
        for _ in range(5):
            view.clock.advance(0.5)
            view.table.tick()
        assert [incarnation for incarnation, _ in view.lost] == [node.incarnation]
        assert "silent" in view.lost[0][1]

    play(scene)


def test_a_router_that_is_late_every_time_still_finds_the_dead() -> None:
    async def scene(view: View, node: StubNode) -> None:
        node.pings_answered = False
        view.table.tick()
        for _ in range(4):
            view.clock.advance(1.6)  # more than half a lease, and less than one
            view.table.tick()
        assert [incarnation for incarnation, _ in view.lost] == [node.incarnation]

    play(scene)


def test_nodes_that_restart_together_are_all_gone_before_the_first_loss_is_told() -> None:
    async def scene(view: View, node: StubNode) -> None:
        other = StubNode("decode", "d1", automatic=False)
        reborn = [StubNode("decode", name, automatic=False) for name in ("d0", "d1")]
        try:
            view.table.update([node.record, other.record])
            while len(view.table.usable("decode")) < 2:
                await view.change()
            left: list[int] = []
            view.table._on_lost = lambda *_: left.append(len(view.table.usable("decode")))
            view.table.update([each.record for each in reborn])
            assert left == [0, 0]
            assert {each.incarnation for each in view.table.known()} == {each.incarnation for each in reborn}
        finally:
            for each in (other, *reborn):
                await each.close()

    play(scene)


def test_nodes_that_fall_silent_together_are_all_unusable_before_the_first_loss_is_told() -> None:
    """A router behind a cut link: its attempts must not be moved from node to node, each of which is next."""

    async def scene(view: View, node: StubNode) -> None:
        others = [StubNode("decode", f"d{n}", automatic=False) for n in (1, 2)]
        try:
            view.table.update([node.record, *(other.record for other in others)])
            while len(view.table.usable("decode")) < 3:
                await view.change()
            left: list[int] = []
            view.table._on_lost = lambda *_: left.append(len(view.table.usable("decode")))
            for each in (node, *others):
                each.pings_answered = False
            for _ in range(8):
                view.clock.advance(0.5)
                view.table.tick()
            assert left == [0, 0, 0]
        finally:
            for other in others:
                await other.close()

    play(scene)


def test_router_that_stalled_past_its_lease_loses_all_attempts_and_links_anew() -> None:
    async def scene(view: View, node: StubNode) -> None:
        other = StubNode("decode", "d1", automatic=False)
        try:
            view.table.update([node.record, other.record])
            await view.change()
            view.lost.clear()
            view.clock.advance(10)
            view.table.tick()
            assert {incarnation for incarnation, _ in view.lost} == {node.incarnation, other.incarnation}
            assert "stalled for 10.0 s" in view.lost[0][1]
            assert view.table.usable("decode") == []
            assert view.table.rejoining
            async with asyncio.timeout(20):
                while len(view.table.usable("decode")) != 2:
                    await asyncio.sleep(0.001)
            view.clock.advance(0.5)
            view.table.tick()
            assert len(view.lost) == 2
        finally:
            await other.close()

    play(scene)


def test_abort_of_the_turn_that_filled_the_link_goes_out_over_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real_send, full = links.Link._send, [True]

    def send(self: links.Link, messages: list[bytes]) -> None:
        if full:
            full.clear()
            raise Unavailable("full")
        real_send(self, messages)

    async def scene(view: View, node: StubNode) -> None:
        view.changed.clear()
        monkeypatch.setattr(links.Link, "_send", send)
        view.table.send(node.incarnation, Abort(ask(1).key))
        await view.change()
        assert "cannot send" in view.lost[0][1]
        view.table.tick()
        await node.until(lambda: node.aborts() == [ask(1).key])

    play(scene)


def test_node_whose_engine_stands_still_is_lost_until_it_turns_again() -> None:
    async def scene(view: View, node: StubNode) -> None:
        view.changed.clear()
        node.step_age_s = 31.0
        for _ in range(2):
            view.clock.advance(0.5)
            view.table.tick()
        await view.change()
        assert view.table.usable("decode") == []
        await asyncio.sleep(0.05)  # the second pong says it again
        assert [incarnation for incarnation, _ in view.lost] == [node.incarnation]
        assert "no progress for 31 s" in view.lost[0][1]
        view.changed.clear()
        node.step_age_s = 0.0
        view.table.tick()
        await view.change()
        assert len(view.table.usable("decode")) == 1

    play(scene)


def test_nodes_that_cannot_exchange_kv_are_told_with_both_values(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(view: View, node: StubNode) -> None:
        alike, other = (StubNode("prefill", name, automatic=False) for name in ("p0", "p1"))
        layout = replace(other.record.layout, spec=KVSpec.uniform(2, 2, 16, "bfloat16"))
        try:
            view.table.update([node.record, alike.record, replace(other.record, layout=layout)])
            async with asyncio.timeout(20):
                while len(view.table.usable("prefill")) < 2:
                    await asyncio.sleep(0.001)
        finally:
            await alike.close()
            await other.close()

    play(scene)
    told = [record.message for record in caplog.records if "no KV can be relayed" in record.message]
    assert told == [
        "no KV can be relayed from p1 to d0: dtype differs: prefill node has 'bfloat16', decode node has 'float32'"
    ]
