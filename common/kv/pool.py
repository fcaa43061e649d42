"""The block pool: how often each KV block is referenced, and which unused ones still hold known content.

A block belongs to one block table of a sequence, so that the content of a hash is a block for each table. The journal gets
a hash while blocks for all tables are there.

A block also belongs to one of the node's context-parallel ranks, which hold the positions of a sequence in turn
(`common.kv.stripes`): a sequence's block at position i has a number b with b % num_stripes == i % num_stripes. Or it belongs to one
of the data-parallel ranks, the *home* of a sequence, which holds all its blocks: b % num_homes == home. What is cached is
found at each home by itself.

Pure bookkeeping, no memory and no torch. Owned by the engine's thread; never shared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from common.base.errors import KvRelayError
from common.base.hashing import BlockHash
from common.kv.journal import BlockJournal


class NoFreeBlocks(KvRelayError):
    """Fewer blocks are free than were asked for; the scheduler waits or preempts, no client sees this."""


class BlockPool:
    """Reference-counted blocks with a prefix cache over the unreferenced ones.

    A block is *used* (referenced), *cached* (unreferenced, content known by hash) or *free* (neither).
    Invariant: used + cached + free = all. Cached blocks are evicted least recently used first, and
    only when no free one is left. Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int, num_tables: int = 1, num_stripes: int = 1, num_homes: int = 1) -> None:
        """`num_blocks`: of all ranks together, a multiple of `num_stripes` or `num_homes`; one of these is 1."""
        assert num_stripes == 1 or num_homes == 1
        num_parts = num_stripes * num_homes
        assert num_blocks % num_parts == 0
        self.num_blocks = num_blocks
        self.num_tables = num_tables
        self.num_stripes = num_stripes
        self.num_homes = num_homes
        self.journal = BlockJournal()
        """Changes of the hashes that `match` finds for all tables, for KV events."""
        self._refs = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._table_of = [0] * num_blocks
        """[num_blocks]: the block table of a cached block's content; without meaning where `_hash_of` is None."""
        self._by_hash: list[list[dict[BlockHash, int]]] = [[{} for _ in range(num_tables)] for _ in range(num_homes)]
        """[homes][tables]"""
        self._idle = [OrderedDict[int, None].fromkeys(range(i, num_blocks, num_parts)) for i in range(num_parts)]
        """For each stripe or home, unreferenced blocks in order of reuse: free ones in front, then cached ones, oldest first."""
        self._cached_in = [0] * num_parts
        """For each stripe or home, the cached blocks among these."""

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks whose content is known."""
        return sum(self._cached_in)

    def free_at(self, home: int) -> int:
        """Blocks of a home that hold nothing."""
        return len(self._idle[home]) - self._cached_in[home]

    @property
    def num_idle(self) -> int:
        """Blocks that `allocate` can hand out, free and cached."""
        return sum(map(len, self._idle))

    def idle_in(self, position: int, home: int = 0) -> int:
        """Blocks that `allocate` can hand out for a position of a sequence, and for others of its stripe or home."""
        return len(self._idle[self.part_of(position, home)])

    def part_of(self, position: int, home: int) -> int:
        """The stripe of a position of a sequence, or the home, whichever there is more than one of."""
        return home if self.num_homes > 1 else position % self.num_stripes

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_idle

    def is_idle(self, block: int) -> bool:
        """Whether nothing references `block`."""
        return self._refs[block] == 0

    def match(self, hashes: Sequence[BlockHash], table: int = 0, home: int = 0) -> list[int]:
        """The blocks that hold the longest leading run of `hashes` for a table. Takes no reference."""
        known = self._by_hash[home][table]
        blocks: list[int] = []
        for block_hash in hashes:
            block = known.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def holds(self, block_hash: BlockHash, table: int = 0, home: int = 0) -> bool:
        """Whether `match` finds a block with this content for a table."""
        return block_hash in self._by_hash[home][table]

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of `blocks`, which `match` returned."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block % len(self._idle)][block]
                self._cached_in[block % len(self._idle)] -= 1
            self._refs[block] += 1

    def allocate(self, count: int, first: int = 0, home: int = 0) -> list[int]:
        """Take blocks of unknown content, each referenced once, for `count` positions of a sequence from `first` on.

        Raises: NoFreeBlocks, with nothing changed.
        """
        positions = range(first, first + count)
        if any(
            len(positions[i :: self.num_stripes]) > self.idle_in(first + i, home)
            for i in range(min(count, self.num_stripes))
        ):
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_idle} free")
        blocks: list[int] = []
        for position in positions:
            part = self.part_of(position, home)
            block, _ = self._idle[part].popitem(last=False)
            if self._hash_of[block] is not None:
                self._cached_in[part] -= 1
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's `blocks`, given in sequence order.

        Where they become unreferenced, the tail is evicted before the head, which more prompts share.
        """
        for block in reversed(blocks):
            assert self._refs[block] > 0, f"block {block} released twice"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                part = block % len(self._idle)
                idle = self._idle[part]
                idle[block] = None
                if self._hash_of[block] is None:
                    idle.move_to_end(block, last=False)
                else:
                    self._cached_in[part] += 1

    def publish(self, block: int, block_hash: BlockHash, table: int = 0) -> None:
        """From now on `match` finds the content of the used `block` by `block_hash`.

        If another block at the same home holds the same content already, the existing block stays canonical.
        """
        assert self._refs[block] > 0, f"block {block} published while unused"
        known = self._by_hash[block % self.num_homes]
        if block_hash not in known[table]:
            self._forget(block)
            known[table][block_hash] = block
            self._hash_of[block] = block_hash
            self._table_of[block] = table
            if self._num_complete(block_hash) == 1 and _is_complete(block_hash, known):
                self.journal.stored(block_hash)

    def new_journal(self) -> BlockJournal:
        """Replace the journal by one that begins with all that is held, for a reader that knows nothing yet."""
        self.journal = BlockJournal()
        for known in self._by_hash:
            for block_hash in known[0]:
                if _is_complete(block_hash, known):
                    self.journal.stored(block_hash)
        return self.journal

    def check_integrity(self) -> None:
        """Assert the invariants above, at the end of tests."""
        for block, refs in enumerate(self._refs):
            is_idle = block in self._idle[block % len(self._idle)]
            assert (refs == 0) == is_idle, f"block {block}: {refs} references, idle {is_idle}"
        places = [(home, table) for home in range(self.num_homes) for table in range(self.num_tables)]
        for home, table in places:
            for block_hash, block in self._by_hash[home][table].items():
                recorded = self._hash_of[block], self._table_of[block], block % self.num_homes
                assert recorded == (block_hash, table, home), f"block {block} is found by a hash that it does not have"
        num_known = sum(len(self._by_hash[home][table]) for home, table in places)
        assert num_known == sum(block_hash is not None for block_hash in self._hash_of)
        idle_cached = [[self._hash_of[block] is not None for block in idle] for idle in self._idle]
        assert [*map(sum, idle_cached)] == self._cached_in, "cached blocks are miscounted"
        assert idle_cached == [*map(sorted, idle_cached)], "a cached block would be evicted before a free one"

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            known = self._by_hash[block % self.num_homes]
            if self._num_complete(block_hash) == 1 and _is_complete(block_hash, known):
                self.journal.removed(block_hash)
            del known[self._table_of[block]][block_hash]
            self._hash_of[block] = None

    def _num_complete(self, block_hash: BlockHash) -> int:
        """The homes at which `match` finds a hash for all tables."""
        return sum(_is_complete(block_hash, known) for known in self._by_hash)


def _is_complete(block_hash: BlockHash, known: Sequence[dict[BlockHash, int]]) -> bool:
    return all(block_hash in of_table for of_table in known)
