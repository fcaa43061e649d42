"""The block pool against a plain model of it, under random operations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.kv.pool import BlockPool, NoFreeBlocks

NUM_BLOCKS = 8


class BlockPoolMachine(RuleBasedStateMachine):
    """`holders` are the lists of blocks that somebody references; `named` what every named block holds."""

    stripes = homes = 1

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, num_stripes=self.stripes, num_homes=self.homes)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.next_name = 0

    def used(self) -> set[int]:
        return {block for holder in self.holders for block in holder}

    @rule(count=st.integers(0, NUM_BLOCKS + 1), first=st.integers(0, 5), home=st.integers(0, 3))
    def allocate(self, count: int, first: int, home: int) -> None:
        ranks, home = self.stripes * self.homes, home % self.homes
        wanted = [home if self.homes > 1 else position % self.stripes for position in range(first, first + count)]
        free = Counter(block % ranks for block in set(range(NUM_BLOCKS)) - self.used())
        if Counter(wanted) - free:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count, first, home)
            return
        blocks = self.pool.allocate(count, first, home)
        assert len(set(blocks)) == count
        assert [block % ranks for block in blocks] == wanted, "a position's block is on another rank"
        assert not set(blocks) & self.used(), "handed out a block in use"
        for block in blocks:
            self.content.pop(block, None)
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        for block in holder:
            if block not in self.content:
                name = self.next_name.to_bytes(16, "big")
                self.next_name += 1
                self.pool.publish(block, name)
                self.content[block] = name

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.pool.release(holder)

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def reuse_cached(self, data: st.DataObject) -> None:
        home = data.draw(st.sampled_from(sorted(self.content))) % self.homes
        there = sorted(name for block, name in self.content.items() if block % self.homes == home)
        names = data.draw(st.lists(st.sampled_from(there), unique=True))
        blocks = self.pool.match(names, home=home)
        assert [self.content[block] for block in blocks] == names[: len(blocks)]
        assert len(blocks) == len(names), "a cached block was lost without being evicted"
        self.pool.acquire(blocks)
        self.holders.append(blocks)

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.used())
        assert self.pool.num_cached == len(set(self.content) - self.used())


class StripedPoolMachine(BlockPoolMachine):
    """The same for four context-parallel ranks."""

    stripes = 4


class HomesPoolMachine(BlockPoolMachine):
    """The same for four data-parallel ranks."""

    homes = 4


TestHomesPool = HomesPoolMachine.TestCase
TestHomesPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
TestStripedPool = StripedPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestStripedPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def test_what_two_ranks_hold_is_reported_until_neither_does() -> None:
    """Data-parallel ranks each compute a prefix once; routers hear of it as of one."""
    pool, name = BlockPool(4, num_homes=2), b"a" * 16
    for home in range(2):
        (block,) = pool.allocate(1, home=home)
        pool.publish(block, name)
        pool.release([block])
    assert pool.journal.take() == ({name}, set())
    assert [pool.match([name], home=home) for home in range(2)] == [[0], [1]]
    assert pool.new_journal().take() == ({name}, set())
    pool.allocate(2, home=0)
    assert pool.journal.take() == (set(), set()), "the other rank still holds it"
    pool.allocate(2, home=1)
    assert pool.journal.take() == (set(), {name})
    pool.check_integrity()


def test_free_blocks_go_before_cached_ones_and_the_tail_of_a_prefix_before_its_head() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.publish(block, bytes([index]) * 16)
    pool.release(blocks)
    assert pool.allocate(1) == [3], "the one block without content comes first"
    pool.allocate(1)
    assert pool.match([b"\0" * 16, b"\1" * 16, b"\2" * 16]) == blocks[:2]
