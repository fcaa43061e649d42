"""The simulator's cache against the block pool that the nodes really use: the same hits, the same names held."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.kv.pool import BlockPool
from router.simulator.cache import BlockCache

CAPACITY = 12
Prompt = tuple[int, ...]


class Pool:
    """A sequence's life as the scheduler makes it: match, acquire, allocate, publish, release."""

    def __init__(self) -> None:
        self.pool = BlockPool(CAPACITY)

    def take(self, names: list[bytes]) -> tuple[int, list[int]] | None:
        found = self.pool.match(names)
        reused_idle = sum(self.pool.is_idle(block) for block in found)
        if len(names) - len(found) > self.pool.num_idle - reused_idle:
            return None
        self.pool.acquire(found)
        blocks = found + self.pool.allocate(len(names) - len(found))
        for block, name in zip(blocks, names, strict=True):
            self.pool.publish(block, name)
        return len(found), blocks


def names_of(path: Prompt) -> list[bytes]:
    """Chained names: equal exactly where the prefix is."""
    return [repr(path[: i + 1]).encode() for i in range(len(path))]


paths = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(paths, st.integers(0, 5)), max_size=60))
def test_it_holds_what_the_block_pool_holds(actions: list[Prompt | int]) -> None:
    """A path takes blocks; a number releases those of one of the open sequences.

    A prefix that is partly evicted is where the two may differ: the pool keeps blocks behind the gap that it cannot
    match, under their names, in other blocks. Releasing from the tail makes a gap impossible, which this checks too.
    """
    cache, real = BlockCache(CAPACITY), Pool()
    known: dict[bytes, bool] = {}
    open_sequences: list[tuple[list[bytes], list[int]]] = []
    for action in actions:
        if isinstance(action, int):
            if open_sequences:
                names, blocks = open_sequences.pop(action % len(open_sequences))
                cache.release(names)
                real.pool.release(blocks)
        else:
            names = names_of(action)
            taken = real.take(names)
            assert cache.take(names) == (None if taken is None else taken[0])
            if taken is not None:
                open_sequences.append((names, taken[1]))
        cache.check_integrity()
        known |= cache.journal
        cache.journal.clear()
        holds = {name for name, held in known.items() if held}
        assert holds == set(real.pool._by_hash[0][0])
        assert len(cache._used) + len(cache._cached) == len(holds)
        assert cache.room == real.pool.num_idle
