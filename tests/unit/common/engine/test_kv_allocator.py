"""Blocks of sequences with sliding windows: which are held, which are found again, and what the journal promises."""

from __future__ import annotations

import pytest

from common.base.hashing import BLOCK_SIZE, hash_blocks, root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.kv_allocator import KVAllocator, first_kept, first_seen
from common.engine.scheduled_step import ScheduledStep
from common.engine.scheduler import Scheduler
from common.engine.scheduler_config import SchedulerConfig
from common.engine.sequence import Sequence
from common.engine.step import SampledToken
from common.kv.pool import BlockPool

WINDOW = 64


def sequence(tokens: list[int], max_tokens: int = 1, name: str = "r") -> Sequence:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
    return Sequence(AttemptKey(name, 1), EngineRequest(pack_ids(tokens), sampling), list(tokens), root_hash("m"), 0.0)


def hashes_of(tokens: list[int]) -> list[bytes]:
    return hash_blocks(root_hash("m"), tokens)


def allocator(*windows: int | None, num_blocks: int = 64) -> KVAllocator:
    return KVAllocator(BlockPool(num_blocks * len(windows), len(windows)), windows, num_seqs=8)


def compute(kv: KVAllocator, tokens: list[int], chunk: int = 32) -> Sequence:
    """A sequence that has computed all its tokens, chunk by chunk."""
    seq = sequence(tokens)
    assert kv.take(seq, hashes_of(tokens), spare_blocks=0)
    while seq.progress.num_computed < len(tokens):
        seq.progress.num_computed = seq.progress.num_scheduled = min(seq.progress.num_computed + chunk, len(tokens))
        kv.advance(seq)
        kv.check_integrity(seq, seq.progress.num_computed)
    return seq


def used(kv: KVAllocator, seq: Sequence, table: int) -> int:
    return len(seq.blocks.tables[table]) - seq.blocks.first[table]


@pytest.mark.parametrize(
    ("num_tokens", "window", "first"),
    [
        (0, 64, 0),
        (63, 64, 0),
        (78, 64, 0),
        (79, 64, 1),
        (80, 64, 1),
        (94, 64, 1),
        (95, 64, 2),
        (95, None, 0),
        (16, 1, 1),
    ],
)
def test_the_first_block_that_the_next_row_sees(num_tokens: int, window: int | None, first: int) -> None:
    """Row p sees positions (p - window, p]: with 79 tokens, row 79 sees 16 and up, all in blocks from 1 on."""
    assert first_seen(num_tokens, window) == first


@pytest.mark.parametrize("window", [2, 16, 17, 33, WINDOW])
@pytest.mark.parametrize("num_tokens", range(1, 200, 7))
def test_another_sequence_of_the_same_tokens_finds_all_full_blocks(num_tokens: int, window: int) -> None:
    kv = allocator(None, window)
    tokens = list(range(num_tokens))
    seq = sequence(tokens)
    assert kv.take_for_arrival(seq, [], spare_blocks=0) == [0, first_kept(num_tokens, window)]
    assert first_seen(num_tokens, window) - 1 <= first_kept(num_tokens, window) <= first_seen(num_tokens, window)
    seq.progress.num_computed = seq.progress.num_scheduled = num_tokens
    kv.advance(seq)
    usable = hashes_of(tokens)[: (num_tokens - 1) // BLOCK_SIZE]
    assert kv.hit_blocks(usable) == len(usable)


@pytest.mark.parametrize("windows", [(512,), (512, None), (None, 512, 512)])
def test_the_blocks_of_a_window_stay_as_many_through_an_answer_of_4000_tokens(windows: tuple[int | None, ...]) -> None:
    scheduler = Scheduler(SchedulerConfig(5000, 4, 64, 64), BlockPool(260 * len(windows), len(windows)), windows)
    seq = sequence(list(range(40)), max_tokens=4000)
    scheduler.add(seq)
    most = [0] * len(windows)
    while not scheduler.is_idle():
        scheduled = scheduler.schedule()
        assert isinstance(scheduled, ScheduledStep)
        most = [max(known, used(scheduler.allocator, seq, t)) for t, known in enumerate(most)]
        scheduler.update(scheduled, [SampledToken(7) for _ in scheduled.step.samples])
    assert seq.tokens.num_generated == 4000
    for window, blocks in zip(windows, most, strict=True):
        assert blocks == (512 // BLOCK_SIZE + 2 if window else -(-(40 + 4000 - 1) // BLOCK_SIZE))
    assert scheduler.pool.num_used == 0


def test_a_shorter_prompt_is_a_hit_only_while_every_block_in_its_window_is_there() -> None:
    kv = allocator(WINDOW, num_blocks=16)
    tokens = list(range(16 * 12))
    kv.free(compute(kv, tokens))
    hashes = hashes_of(tokens)
    assert [kv.hit_blocks(hashes[:n]) for n in (0, 3, 7, 12)] == [0, 3, 7, 12]
    # Blocks behind the window were released first, and are evicted first.
    kv.free(compute(kv, list(range(1000, 1000 + 16 * 8))))
    lost = next(i for i in range(12) if kv.pool.holds(hashes[i]))
    assert lost > 0
    assert kv.hit_blocks(hashes) == 12, "the whole prompt needs only its window"
    assert kv.hit_blocks(hashes[: lost + 2]) == 0, "a shorter one needs blocks that are gone"
    seq = sequence(tokens[: (lost + 2) * 16])
    assert kv.take(seq, hashes[: lost + 2], spare_blocks=0)
    assert (seq.progress.num_computed, seq.blocks.first) == (0, [0])


def test_a_hit_needs_the_window_of_each_table_and_everything_of_one_without() -> None:
    kv = allocator(None, WINDOW)
    tokens = list(range(16 * 10))
    seq = sequence(tokens)
    first = kv.take_for_arrival(seq, [], spare_blocks=0)
    assert first == [0, first_kept(160, WINDOW)] == [0, 5]
    assert kv.pool.num_used == 10 + 5, "of the window only what is kept"
    seq.progress.num_computed = seq.progress.num_scheduled = seq.num_tokens
    kv.advance(seq)
    hashes = hashes_of(tokens)
    assert kv.hit_blocks(hashes) == 10
    assert [kv.hit_blocks(hashes[:n]) for n in (9, 8, 5)] == [9, 0, 0], "the window before them never arrived"
    stored, _ = kv.pool.journal.take()
    assert stored == set(hashes[5:]), "a hash is promised with blocks for all tables"
    longer = sequence(tokens + list(range(16)))
    again = kv.take_for_arrival(longer, hashes_of(longer.tokens.ids), spare_blocks=0)
    assert again == [10, 10], "what is here is not sent again"


def test_kv_that_arrives_is_asked_for_from_the_window_on() -> None:
    kv = allocator(WINDOW)
    tokens = list(range(16 * 100 + 5))
    seq = sequence(tokens)
    assert kv.take_for_arrival(seq, hashes_of(tokens), spare_blocks=0) == [first_kept(len(tokens), WINDOW)]
    assert kv.pool.num_used == 101 - first_kept(len(tokens), WINDOW) == 5
    assert kv.pool.num_blocks < 101, "a prompt that this node could not hold whole"
    kv.free(seq)
    assert kv.pool.num_used == 0


def test_a_hash_leaves_the_journal_with_the_first_of_its_blocks() -> None:
    pool = BlockPool(4, num_tables=2)
    first, second = pool.allocate(2)
    pool.publish(first, b"a" * 16, 0)
    assert pool.journal.take() == (set(), set())
    pool.publish(second, b"a" * 16, 1)
    assert pool.journal.take() == ({b"a" * 16}, set())
    pool.release([first])
    pool.allocate(3)
    assert pool.journal.take() == (set(), {b"a" * 16})
    assert (pool.holds(b"a" * 16, 0), pool.holds(b"a" * 16, 1)) == (False, True)
    pool.check_integrity()
