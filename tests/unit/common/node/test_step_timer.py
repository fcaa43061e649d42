"""The node's side of routing: its queue's order, what it says of cached prompts, how it times its steps."""

from __future__ import annotations

import pytest
from support.node_pair import ROUTER, Pair

from common.base.hashing import BLOCK_SIZE, root_hash
from common.control.identities import pack_ids
from common.control.messages import (
    AttemptFailed,
    AttemptKey,
    DecodeRequest,
    EngineRequest,
    SamplingParams,
    TokenBatch,
    TokenChunk,
)
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import StepInput
from common.kv.pool import BlockPool
from common.node.events import FromClient, OutgoingMessage, SendBuffer, ToClient
from common.node.step_timer import StepTimer


def sequence(name: str, priority: int = 0, tokens: int = 40, first: int = 1, arrival_s: float = 0.0) -> Sequence:
    ids = [first] * tokens
    sampling = SamplingParams(seed=0, max_tokens=4)
    return Sequence(
        AttemptKey(name, 1),
        EngineRequest(pack_ids(ids), sampling, priority=priority),
        list(ids),
        root_hash("m"),
        arrival_s,
    )


def scheduler() -> Scheduler:
    return Scheduler(SchedulerConfig(500, 2, 512, 512), BlockPool(64))


def test_waiting_requests_are_ordered_by_priority_then_arrival() -> None:
    made = scheduler()
    for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0), ("e", 2), ("f", -1)):
        made.add(sequence(name, priority))
    assert [seq.key.request_id for seq in made.waiting] == ["c", "f", "a", "d", "b", "e"]
    plan = made.schedule()
    assert plan is not None
    assert [seq.key.request_id for seq in plan.seqs] == ["c", "f"]


def test_kv_from_elsewhere_is_let_in_by_priority_then_arrival_among_those_that_wait() -> None:
    """Else relayed requests would get no sequence slot for as long as prompts to be computed here keep coming."""
    made = scheduler()
    made.add(sequence("runs", arrival_s=1.0))
    assert made.schedule() is not None
    made.add(sequence("waits", arrival_s=3.0))
    assert made.reserve(sequence("later", arrival_s=4.0)) is None
    assert made.reserve(sequence("same time", arrival_s=3.0)) is None
    assert made.reserve(sequence("less important", 1, arrival_s=2.0)) is None
    assert made.reserve(sequence("more important", -1, arrival_s=9.0)) is not None
    assert not made._free_slots()  # pyright: ignore[reportPrivateUsage]


def test_a_sequence_that_had_to_make_room_goes_before_kv_from_elsewhere() -> None:
    made = scheduler()
    for name in ("old", "young"):
        made.add(sequence(name, arrival_s=5.0))
    assert made.schedule() is not None
    young = made.running[AttemptKey("young", 1)]
    young.progress.in_flight = 0
    made._preempt(young, 0, "preempted")  # pyright: ignore[reportPrivateUsage]
    assert made.reserve(sequence("earlier", arrival_s=1.0)) is None


def test_a_prompt_goes_on_beside_more_streams_than_a_step_was_to_have_rows() -> None:
    made = Scheduler(SchedulerConfig(500, max_num_seqs=6, max_num_batched_tokens=4, prefill_chunk=4), BlockPool(64))
    prompt = sequence("prompt")
    made.add(prompt)
    plan = made.schedule()
    assert plan is not None
    made.update(plan, [])
    for number in range(5):
        stream = sequence(f"stream{number}", first=number + 2)
        assert made.reserve(stream) is not None
        made.join(stream, 1)
    before = prompt.progress.num_scheduled
    plan = made.schedule()
    assert plan is not None
    assert len(plan.seqs) == 6
    assert prompt.progress.num_scheduled > before


def test_a_waiting_prompt_is_known_to_be_cached() -> None:
    made = scheduler()
    first = sequence("first")
    made.add(first)
    assert first.likely_cached == 0
    plan = made.schedule()
    assert plan is not None
    first.progress.num_computed = first.num_tokens
    made.allocator.advance(first)
    second, third = sequence("second"), sequence("third", first=9)
    made.add(second)
    made.add(third)
    assert second.likely_cached == 2 * BLOCK_SIZE
    assert third.likely_cached == 0


def test_steps_in_flight_together_are_busy_time_once() -> None:
    meter = StepTimer()
    meter.begin(1, 10.0)
    meter.begin(2, 10.5)
    meter.end(1, 11.0, decodes=True, prompts=True, tokens=8)
    assert (meter.prompt_busy_s, meter.step_s) == (1.0, 1.0)
    meter.end(2, 11.5, decodes=False, prompts=True, tokens=8)
    assert meter.prompt_busy_s == 1.5
    meter.begin(3, 12.0)
    meter.end(3, 14.0, decodes=True, prompts=False, tokens=8)
    assert meter.prompt_busy_s == 1.5, "nothing but decode rows"
    assert meter.step_s == pytest.approx(1.1)
    meter.begin(4, 15.0)
    meter.drop(4)
    meter.end(4, 16.0, decodes=False, prompts=True, tokens=8)
    assert meter.prompt_busy_s == 1.5


def test_steps_in_flight_age_until_one_of_them_ends() -> None:
    """The loop still makes rounds meanwhile, so by itself it would report a GPU that hangs as well."""
    meter = StepTimer(depth=2)
    assert meter.age_s(5.0) == 0.0
    meter.begin(1, 10.0)
    meter.begin(2, 10.1)
    assert meter.age_s(40.0) == 30.0
    meter.end(1, 41.0, decodes=True, prompts=False, tokens=8)
    assert meter.age_s(42.0) == 1.0, "the second could not run before the first had ended"
    meter.end(2, 43.0, decodes=True, prompts=False, tokens=8)
    assert meter.age_s(99.0) == 0.0
    meter.begin(3, 100.0)
    meter.drop(3)
    assert meter.age_s(200.0) == 0.0


def test_a_node_whose_step_never_ends_says_so_though_its_loop_comes_round() -> None:
    class Hangs:
        def submit(self, step: StepInput) -> None:
            """Its output is to come as an event."""

    pair = Pair()
    pair.p.executor = Hangs()
    pair.request()
    pair.p.on_time(pair.clock())
    assert pair.p.load.step_age_s == 0.0
    pair.p.step()
    pair.clock.advance(31.0)
    pair.p.on_time(pair.clock())
    assert pair.p.load.step_age_s == 31.0


def test_a_prompt_counts_as_queued_until_it_is_computed_on_either_node() -> None:
    """Routers judge by it how long the next prompt waits; a decode node computes its own in many small chunks."""
    pair = Pair(chunk=16)
    params = SamplingParams(seed=0, max_tokens=3, temperature=0.0)
    pair.request()
    pair.d.handle(
        FromClient(
            ROUTER,
            DecodeRequest(
                AttemptKey("local", 1), EngineRequest(pack_ids(list(range(500, 540))), params), pack_ids(), None, 60.0
            ),
        )
    )
    for node in (pair.p, pair.d):
        for left in (40, 24, 8, 0):
            node.on_time(pair.clock())
            assert node.load.queued_tokens == left
            node.step()
    assert pair.d.load.running == 1


def test_what_one_router_gets_keeps_its_order() -> None:
    """Two outputs and a failure can fall into one round; a failure that overtakes the last token costs another attempt."""
    sent: list[OutgoingMessage] = []
    send_buffer = SendBuffer(sent.extend)
    first, second, other = (TokenChunk(AttemptKey(name, 1), 0, [7], None, None, None) for name in "abc")
    failed = AttemptFailed(AttemptKey("a", 1), "engine_error", "")
    send_buffer.tokens(b"r1", first)
    send_buffer.tokens(b"r2", other)
    send_buffer.reply(b"r1", failed)
    send_buffer.tokens(b"r1", second)
    send_buffer.flush()
    to_first = [out.message for out in sent if isinstance(out, ToClient) and out.identity == b"r1"]
    assert to_first == [TokenBatch([first]), failed, TokenBatch([second])]
    assert ToClient(b"r2", TokenBatch([other])) in sent
    assert len(sent) == 4
