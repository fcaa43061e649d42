"""Asynchronous scheduling: which sequences the next step takes while one runs, and what happens to their blocks."""

from __future__ import annotations

from typing import Any

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

STOP = 99


def make(blocks: int = 64, slots: int = 8) -> Scheduler:
    return Scheduler(SchedulerConfig(1000, slots, 256, 256, depth=2), BlockPool(blocks))


def sequence(name: str, tokens: int, *, relays: bool = False, **params: Any) -> Sequence:
    sampling: dict[str, Any] = {"seed": 1, "max_tokens": 100, "temperature": 0.0, "stop_token_ids": [STOP], **params}
    prompt = [ord(name), *range(1, tokens)]
    key = AttemptKey(name, 1)
    return Sequence(
        key,
        EngineRequest(pack_ids(prompt), SamplingParams(**sampling)),
        list(prompt),
        root_hash("m"),
        0.0,
        relays=relays,
    )


def start(scheduler: Scheduler) -> ScheduledStep:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled


def land(scheduler: Scheduler, scheduled: ScheduledStep, *tokens: int) -> list[str | None]:
    done = scheduler.update(scheduled, [SampledToken(token) for token in tokens])
    return [progress.finish_reason for progress in done]


def test_the_next_step_has_placeholders_for_tokens_that_are_being_drawn() -> None:
    scheduler = make()
    for name in "ab":
        scheduler.add(sequence(name, 20, presence_penalty=1.0))
    first, second = start(scheduler), start(scheduler)
    assert scheduler.schedule() is None, "two are in flight"
    assert first.step.placeholders == []
    assert second.step.placeholder_step == first.step.step_id
    assert second.step.placeholders == [(0, 0), (1, 1)]
    assert second.step.positions == [20, 20]
    assert [(spec.position, spec.num_generated) for spec in second.step.samples] == [(21, 1), (21, 1)]
    assert all(spec.seen is not None and not spec.seen.ids for spec in second.step.samples)
    assert land(scheduler, first, 7, 8) == [None, None]
    third = start(scheduler)
    assert third.step.placeholder_step == second.step.step_id
    assert [spec.seen and len(spec.seen.ids) for spec in third.step.samples] == [4, 4], "7 and 8 are known by now"


def test_the_chunks_of_a_prompt_follow_each_other_without_waiting() -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 16, 16, depth=2), BlockPool(64))
    scheduler.add(sequence("a", 40))
    first, second = start(scheduler), start(scheduler)
    assert (first.step.positions[0], second.step.positions[0]) == (0, 16)
    assert not scheduler.pool.match(scheduler.running[AttemptKey("a", 1)].full_block_hashes()), (
        "nothing is computed yet"
    )
    land(scheduler, first)
    assert len(scheduler.pool.match(scheduler.running[AttemptKey("a", 1)].full_block_hashes())) == 1
    third = start(scheduler)
    assert (third.step.positions, len(third.step.samples)) == (list(range(32, 40)), 1)


def test_a_sequence_that_stops_wastes_one_row_and_keeps_its_blocks_until_then() -> None:
    scheduler = make(blocks=4)
    scheduler.add(sequence("a", 40))
    first, second = start(scheduler), start(scheduler)
    assert land(scheduler, first, STOP) == ["stop"]
    assert scheduler.schedule() is None
    assert scheduler.pool.num_used == 3
    newcomer = sequence("b", 40)
    assert scheduler.reserve(newcomer) is None, "its blocks are still being written"
    assert land(scheduler, second, 5) == [], "what it drew after its end is nobody's"
    assert scheduler.pool.num_used == 0
    assert scheduler.reserve(newcomer) == [0]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_sequence_that_surely_ends_with_the_pending_token_wastes_nothing(max_tokens: int) -> None:
    scheduler = make()
    scheduler.add(sequence("a", 20, max_tokens=max_tokens))
    all_scheduled = [start(scheduler) for _ in range(max_tokens)]
    assert scheduler.schedule() is None
    assert [land(scheduler, scheduled, 5) for scheduled in all_scheduled][-1] == ["length"]
    assert scheduler.is_idle()


def test_a_relayed_sequence_ends_with_its_first_token() -> None:
    scheduler = make()
    scheduler.add(sequence("a", 20, relays=True))
    scheduled = start(scheduler)
    assert scheduler.schedule() is None
    land(scheduler, scheduled, 5)
    assert scheduler.is_idle()


def test_blocks_that_a_transfer_gave_back_are_kept_while_a_step_writes_to_them() -> None:
    scheduler = Scheduler(SchedulerConfig(1000, 8, 16, 16, depth=2), BlockPool(64))
    seq = sequence("a", 40, relays=True)
    scheduler.add(seq)
    first, second = start(scheduler), start(scheduler)
    scheduler.end(seq, "aborted")
    scheduler.free(seq)
    assert scheduler.schedule() is None
    land(scheduler, first)
    assert scheduler.pool.num_used == 3
    land(scheduler, second)
    assert scheduler.pool.num_used == 0
    assert scheduler.is_idle()


def test_an_aborted_sequence_gets_no_more_rows_and_leaves_with_its_last() -> None:
    scheduler = make()
    a, b = sequence("a", 20), sequence("b", 20)
    scheduler.add(a)
    scheduler.add(b)
    first, second = start(scheduler), start(scheduler)
    scheduler.end(a, "aborted")
    assert land(scheduler, first, 1, 2) == [None], "only b's"
    third = start(scheduler)
    assert third.seqs == [b]
    land(scheduler, second, 1, 2)
    assert list(scheduler.running) == [b.key]
    assert a.blocks.tables == []


def test_the_youngest_sequence_skips_a_step_before_it_is_preempted_for_an_older_one() -> None:
    scheduler = make(blocks=6)
    oldest, old, young = sequence("a", 3), sequence("b", 32), sequence("c", 3)
    for seq in (oldest, old, young):
        scheduler.add(seq)
    first = start(scheduler)
    scheduler.pool.allocate(scheduler.pool.num_idle)
    second = start(scheduler)
    assert second.seqs == [oldest], "`old` needs a block for its 33rd token, and `young` is still being computed"
    land(scheduler, first, 5, 6, 7)
    third = start(scheduler)
    assert third.seqs == [oldest, old]
    assert third.step.placeholders == [(0, 0)]
    assert third.step.token_ids[1] == 6
    assert list(scheduler.waiting) == [young]
    assert young.tokens.ids[-1] == 7, "what it drew meanwhile is not lost"


def test_sequences_of_a_failed_step_leave_when_their_other_step_is_done() -> None:
    scheduler = make()
    a = sequence("a", 20)
    scheduler.add(a)
    first, second = start(scheduler), start(scheduler)
    scheduler.fail(first)
    assert scheduler.pool.num_used == 2
    assert land(scheduler, second, 5) == []
    assert scheduler.pool.num_used == 0
    assert scheduler.is_idle()
