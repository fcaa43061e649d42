"""Lower priority numbers go first: to KV blocks while they run, in the queue, and before KV that arrives."""

from __future__ import annotations

from collections import deque

import pytest

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.shares import Shares
from common.engine.step import SampledToken
from common.engine.waiting_queue import WaitingQueue, goes_first
from common.kv.pool import BlockPool


def sequence(
    name: str,
    priority: int,
    *,
    arrival_s: float = 0.0,
    preemptions: int = 0,
    num_tokens: int = 30,
    relays: bool = False,
) -> Sequence:
    prompt = [ord(name), *range(1, num_tokens)]
    sampling = SamplingParams(seed=1, max_tokens=100, temperature=0.0)
    request = EngineRequest(pack_ids(prompt), sampling, priority=priority)
    seq = Sequence(AttemptKey(name, 1), request, list(prompt), root_hash("m"), relays=relays, arrival_s=arrival_s)
    seq.preemptions = preemptions
    return seq


def step(scheduler: Scheduler) -> list[Sequence]:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    scheduler.update(scheduled, [SampledToken(7) for _ in scheduled.step.samples])
    scheduler.check_integrity()
    return scheduled.seqs


def test_the_youngest_of_the_lowest_priority_is_preempted() -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 256, 256), BlockPool(10))
    batch, later_batch, chat = sequence("b", 5), sequence("c", 5), sequence("a", 0)
    scheduler.add(batch)
    scheduler.add(later_batch)
    step(scheduler)
    scheduler.add(chat)
    step(scheduler)
    assert list(scheduler.running.values()) == [chat, batch, later_batch]
    scheduler.pool.allocate(scheduler.pool.num_idle)
    for _ in range(4):
        step(scheduler)
    assert later_batch.preemptions == 1
    assert list(scheduler.running.values()) == [chat, batch]
    scheduler.pool.allocate(scheduler.pool.num_idle)
    while not batch.preemptions:
        step(scheduler)
    assert chat.preemptions == 0
    assert list(scheduler.waiting) == [batch, later_batch]


@pytest.mark.parametrize("urgent", [False, True])
def test_an_urgent_prompt_is_computed_before_the_rest_of_one_that_has_begun(*, urgent: bool) -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 16, 16), BlockPool(20))
    long, late = sequence("l", 0), sequence("u", -urgent)  # 30 tokens each
    scheduler.add(long)
    assert step(scheduler) == [long]
    scheduler.add(late)
    assert step(scheduler) == ([late] if urgent else [long, late])
    step(scheduler)
    assert late.num_tokens == (31 if urgent else 30)
    step(scheduler)
    assert (long.num_tokens > 30, late.num_tokens > 30) == (True, True)


def test_a_prompt_whose_kv_is_sent_goes_on_behind_urgent_ones() -> None:
    """Without progress for a minute its transfer was given up, as that of a node that does not work any more."""
    scheduler = Scheduler(SchedulerConfig(1000, 8, 64, 64), BlockPool(100))
    batch = sequence("b", 5, num_tokens=300, relays=True)
    scheduler.add(batch)
    step(scheduler)
    for name in "uv":
        scheduler.add(sequence(name, 0, num_tokens=200))
    for computed in range(80, 80 + 16 * 8, 16):
        assert batch in step(scheduler)
        assert batch.progress.num_computed == computed


def test_an_urgent_prompt_without_memory_stops_nobody() -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 16, 16), BlockPool(3))
    long, urgent = sequence("l", 0), sequence("u", -1)
    scheduler.add(long)
    step(scheduler)
    scheduler.add(urgent)
    assert step(scheduler) == [long]
    assert list(scheduler.waiting) == [urgent]


def test_a_lower_priority_is_preempted_in_another_stage_of_a_pipeline() -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 256, 256, num_microbatches=2), BlockPool(10))
    chat, batch = sequence("a", 0), sequence("b", 5)
    flying: deque[ScheduledStep] = deque()
    for seq in (chat, batch):
        scheduler.add(seq)
        flying += filter(None, [scheduler.schedule()])
    assert (chat.microbatch, batch.microbatch) == (0, 1)
    while chat.tokens.num_generated < 100:
        scheduled = flying.popleft()
        scheduler.update(scheduled, [SampledToken(7) for _ in scheduled.step.samples])
        scheduler.check_integrity()
        while following := scheduler.schedule():
            flying.append(following)
    assert (chat.preemptions, batch.preemptions) == (0, 1)


@pytest.mark.parametrize("ends", [True, False])
def test_who_yields_in_vain_goes_on(ends: bool) -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 256, 256, num_microbatches=2), BlockPool(10))
    chat, batch = sequence("a", 0), sequence("b", 5)
    flying: dict[int, ScheduledStep] = {}

    def start() -> None:
        while following := scheduler.schedule():
            flying[following.microbatch] = following

    def land(group: int) -> None:
        scheduled = flying.pop(group)
        scheduler.update(scheduled, [SampledToken(7) for _ in scheduled.step.samples])

    for seq in (chat, batch):
        scheduler.add(seq)
        start()
    taken = scheduler.pool.allocate(scheduler.pool.num_idle)
    while 0 in flying:
        land(0)
        start()
    assert 1 in flying, "its blocks are waited for"
    if ends:
        scheduler.end(chat, "aborted")
    else:
        scheduler.pool.release(taken)
    land(1)
    start()
    assert (0 in flying, 1 in flying, batch.preemptions) == (not ends, True, 0)


def test_what_was_preempted_waits_behind_higher_priorities_and_before_its_own() -> None:
    queue = WaitingQueue()
    for name, priority in (("b", 0), ("d", 3), ("c", 0), ("a", -1)):
        queue.add(sequence(name, priority))
    assert [seq.key.request_id for seq in queue] == ["a", "b", "c", "d"]
    for priority, at in [(5, 4), (0, 1), (-1, 0)]:
        inserted = sequence("x", priority, preemptions=1)
        queue.add_preempted(inserted)
        assert list(queue).index(inserted) == at
        queue.remove(inserted)


@pytest.mark.parametrize(
    ("waiting", "arriving", "first"),
    [
        (sequence("w", 0, arrival_s=2.0), sequence("a", 0, arrival_s=1.0), False),
        (sequence("w", 0, arrival_s=2.0, preemptions=1), sequence("a", 0, arrival_s=1.0), True),
        (sequence("w", 5, arrival_s=1.0, preemptions=1), sequence("a", 0, arrival_s=2.0), False),
        (sequence("w", 0, arrival_s=2.0), sequence("a", 5, arrival_s=1.0), True),
    ],
)
def test_what_ran_before_goes_before_what_arrives_with_the_same_priority(
    waiting: Sequence, arriving: Sequence, first: bool
) -> None:
    assert goes_first(waiting, arriving, Shares(8, 10)) == first
