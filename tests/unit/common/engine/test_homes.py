"""Sequences on data-parallel ranks: which home each gets, and whose blocks it may take."""

from __future__ import annotations

from common.base.hashing import BLOCK_SIZE, hash_blocks, root_hash
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, EngineRequest, SamplingParams
from common.engine.kv_allocator import KVAllocator
from common.engine.preemption import victim_of_growth
from common.engine.sequence import Sequence
from common.engine.sequence_state import SequenceState
from common.kv.pool import BlockPool

HOMES = 2


def sequence(first: int, blocks: int, name: str = "r") -> Sequence:
    """A prompt of whole blocks and one token more; prompts with the same first token begin with each other."""
    tokens = [first + i for i in range(blocks * BLOCK_SIZE + 1)]
    sampling = SamplingParams(seed=0, max_tokens=1, temperature=0.0)
    return Sequence(AttemptKey(name, 1), EngineRequest(pack_ids(tokens), sampling), tokens, root_hash("m"), 0.0)


def take(kv: KVAllocator, seq: Sequence) -> int:
    """Give a sequence its blocks. Returns its home."""
    assert kv.take(seq, hash_blocks(root_hash("m"), seq.tokens.ids), spare_blocks=0)
    assert all(block % HOMES == seq.blocks.home for block in seq.blocks.tables[0])
    return seq.blocks.home


def compute(kv: KVAllocator, seq: Sequence) -> None:
    seq.progress.num_computed = seq.num_tokens
    kv.advance(seq)


def allocator(blocks_of_rank: int = 32) -> KVAllocator:
    return KVAllocator(BlockPool(blocks_of_rank * HOMES, num_homes=HOMES), (None,), num_seqs=8)


def test_the_rank_with_fewest_blocks_in_use_gets_a_sequence() -> None:
    kv = allocator()
    homes = [take(kv, sequence(1000 * i, blocks)) for i, blocks in enumerate((4, 2, 1, 3))]
    assert homes == [0, 1, 1, 0]
    assert [kv.pool.idle_in(0, home) for home in range(HOMES)] == [32 - 9, 32 - 5]


def test_prompts_one_after_the_other_use_the_caches_of_all_ranks() -> None:
    kv, homes = allocator(), set[int]()
    for i in range(4):
        seq = sequence(1000 * i, 3)
        homes.add(take(kv, seq))
        compute(kv, seq)
        kv.free(seq)
    assert homes == {0, 1}


def test_a_cached_beginning_leads_to_its_rank_until_that_has_much_more_to_do() -> None:
    kv = allocator()
    first = sequence(0, 4)
    home = take(kv, first)
    compute(kv, first)
    homes = [take(kv, sequence(0, 8)) for _ in range(6)]
    assert homes[:2] == [home, home], "the other rank would have to compute the beginning again"
    assert 1 - home in homes, "but not all prompts that begin like this go to one rank"


def test_a_sequence_that_fits_one_rank_only_goes_there_and_the_longest_is_that_of_a_rank() -> None:
    kv = allocator(8)
    assert kv.longest == 8
    homes = [take(kv, sequence(1000 * i, blocks)) for i, blocks in enumerate((5, 3))]
    assert homes == [0, 1]
    assert take(kv, sequence(5000, 2)) == 1
    assert not kv.take(sequence(6000, 2), [], spare_blocks=0), (
        "three blocks are free, two on one rank and one on the other"
    )
    assert kv.room == 3


def test_growth_takes_blocks_of_the_same_rank_only() -> None:
    kv = allocator()
    running: dict[AttemptKey, Sequence] = {}
    for i in range(4):
        seq = sequence(1000 * i, 2, f"r{i}")
        take(kv, seq)
        seq.enter(SequenceState.WAITING, "queued")
        seq.enter(SequenceState.RUNNING, "admitted")
        running[seq.key] = seq
    for seq in running.values():
        victim = victim_of_growth(seq, running)
        assert victim.blocks.home == seq.blocks.home
        assert victim is [each for each in running.values() if each.blocks.home == seq.blocks.home][-1]
