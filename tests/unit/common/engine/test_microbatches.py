"""How the steps in flight of a pipeline share the running sequences."""

from __future__ import annotations

import pytest

from common.base.hashing import root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.kv.pool import BlockPool


def make(groups: int = 2, slots: int = 64, blocks: int = 4096) -> Scheduler:
    return Scheduler(SchedulerConfig(8192, slots, 2048, 2048, groups), BlockPool(blocks))


def sequence(name: int, tokens: int, max_tokens: int = 1000) -> Sequence:
    prompt = [name, *range(1, tokens)]  # no two share a prefix
    return Sequence(
        key=AttemptKey(f"r{name}", 1),
        request=EngineRequest(pack_ids(prompt), SamplingParams(seed=1, max_tokens=max_tokens, temperature=0.0)),
        token_ids=list(prompt),
        root=root_hash("model"),
        arrival_s=0.0,
    )


def start(scheduler: Scheduler) -> ScheduledStep:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled


def land(scheduler: Scheduler, scheduled: ScheduledStep) -> None:
    scheduler.update(scheduled, [SampledToken(7, None) for _ in scheduled.step.samples])


@pytest.mark.parametrize(("groups", "count", "sizes"), [(1, 9, [9]), (2, 9, [5, 4]), (3, 16, [6, 5, 5]), (3, 1, [1])])
def test_a_burst_is_shared_among_all_groups_in_their_first_steps(groups: int, count: int, sizes: list[int]) -> None:
    scheduler = make(groups)
    for name in range(count):
        scheduler.add(sequence(name, 20))
    assert [len(start(scheduler).admitted) for _ in sizes] == sizes
    assert scheduler.schedule() is None, "all run"


def test_a_burst_larger_than_the_sequence_slots_is_shared_as_far_as_it_is_let_in() -> None:
    scheduler = make(slots=10)
    for name in range(100):
        scheduler.add(sequence(name, 20))
    assert [len(start(scheduler).seqs) for _ in range(2)] == [5, 5]


def test_a_burst_larger_than_the_memory_is_shared_as_far_as_it_is_let_in() -> None:
    scheduler = make(blocks=45)
    for name in range(100):
        scheduler.add(sequence(name, 20))
    assert sorted(len(start(scheduler).seqs) for _ in range(2)) == [7, 8]


def test_one_that_comes_late_joins_the_lightest_group() -> None:
    scheduler = make()
    for name in range(3):
        scheduler.add(sequence(name, 20))
    all_scheduled = [start(scheduler), start(scheduler)]
    assert [len(scheduled.seqs) for scheduled in all_scheduled] == [2, 1]
    for scheduled in all_scheduled:
        land(scheduler, scheduled)
    scheduler.add(sequence(3, 20))
    assert [len(start(scheduler).seqs) for _ in range(2)] == [2, 2]


def test_a_long_sequence_does_not_push_all_short_ones_into_the_other_group() -> None:
    scheduler = make()
    scheduler.add(sequence(0, 1600))
    for name in range(1, 32):
        scheduler.add(sequence(name, 20))
    sizes = [len(start(scheduler).seqs) for _ in range(2)]
    assert sum(sizes) == 32
    assert min(sizes) >= 13, "a row costs more than many blocks"
    assert scheduler.running[AttemptKey("r0", 1)].microbatch == sizes.index(min(sizes)), "but blocks count"


def test_sequences_whose_kv_came_by_relay_are_spread_too() -> None:
    scheduler = make()
    arrived = [sequence(name, 20 + 40 * (name % 3)) for name in range(8)]
    for seq in arrived:
        assert scheduler.reserve(seq) is not None
    for seq in arrived:
        scheduler.join(seq, first_token=5)
    assert [sum(seq.microbatch == group for seq in arrived) for group in range(2)] == [4, 4]
