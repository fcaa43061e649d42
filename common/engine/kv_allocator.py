"""Gives sequences their KV blocks and takes them back. Pure; owned by the engine's thread.

A sequence has a block table for each window of the model (`KVSpec.windows`), all of the same length: entry i is the block of
tokens [16 i, 16 (i + 1)). Of a table with a sliding window it holds only what its next row sees, and what another sequence with the
same full blocks needs (`first_kept`); earlier entries name any block and are never read. Released blocks stay in the prefix cache
until they are evicted.

Two rules keep prefixes right where blocks behind the window are missing. A block is published by itself: its hash promises
its own content and no other block. And a prefix of h blocks is a hit if every block is there that the row after it sees:
all h of a table without a window, otherwise those within the window. A shorter prompt that needs an evicted block is therefore
no hit, and computes its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from common.base.hashing import BLOCK_SIZE, BlockHash
from common.engine.sequence import Sequence
from common.engine.shares import Shares
from common.engine.step import BlockCopy
from common.kv.pool import BlockPool
from common.kv.rank_layout import blocks_for
from common.kv.stripes import Stripe

_HIT_WORTH = 4
"""Blocks that one data-parallel rank may have in use more than another one for each cached block that saves computing or
sending it: with few, prompts with the same beginning would be computed on every rank; with many, all would be on one."""


def first_seen(num_tokens: int, window: int | None) -> int:
    """The first block that the row after `num_tokens` tokens sees through `window`, or a later row."""
    return 0 if window is None else max(0, num_tokens - window + 1) // BLOCK_SIZE


def first_kept(num_tokens: int, window: int | None) -> int:
    """The first block to keep of a sequence of `num_tokens` tokens, the one that `first_seen` names or one before it.

    Another sample of the same prompt has all its full blocks from the prefix cache, and computes at least the last token: its
    first row is in the last block.
    """
    return first_seen((num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE, window)


class _Cached(NamedTuple):
    """The blocks of a sequence that one home has in its prefix cache."""

    home: int
    hit: int
    """Blocks after which it can continue there."""
    first: list[int]
    """[tables]: the first block to hold."""
    found: list[list[int]]
    """[tables]: the cached blocks from there on."""


class KVAllocator:
    """The blocks of all sequences. Invariant: a sequence holds no table, or in each table t one reference to every entry
    from `BlocksHeld.first[t]` on."""

    def __init__(self, pool: BlockPool, windows: Seq[int | None], num_seqs: int) -> None:
        """`num_seqs`: sequences that may run at once, which tenants share."""
        assert len(windows) == pool.num_tables
        self.pool = pool
        self.shares = Shares(num_seqs, pool.num_blocks // pool.num_tables)
        self.windows = tuple(windows)
        self._unlimited = [table for table, window in enumerate(windows) if window is None]
        self._limited = [(table, window) for table, window in enumerate(windows) if window is not None]

    @property
    def room(self) -> int:
        """Blocks that can be added to each table, for all sequences together."""
        return self.pool.num_idle // self.pool.num_tables

    @property
    def longest(self) -> int:
        """Blocks in each table of the longest sequence that fits when it is alone."""
        pool = self.pool
        return pool.num_blocks // pool.num_stripes // pool.num_homes // pool.num_tables * pool.num_stripes

    def room_of(self, seq: Sequence) -> int:
        """Blocks that can be added to each table of one sequence: those of the stripes take turns."""
        pool, end, home = self.pool, len(seq.blocks.tables[0]), seq.blocks.home
        return min(
            ahead + pool.idle_in(end + ahead, home) // pool.num_tables * pool.num_stripes
            for ahead in range(pool.num_stripes)
        )

    def hit_blocks(self, hashes: Seq[BlockHash]) -> int:
        """The longest leading part of `hashes`, in blocks, after which a sequence can continue from the prefix cache of any home."""
        return max(self._hit_at(home, hashes) for home in range(self.pool.num_homes))

    def _hit_at(self, home: int, hashes: Seq[BlockHash]) -> int:
        hit = len(hashes)
        for table in self._unlimited:
            hit = len(self.pool.match(hashes[:hit], table, home))
        agreed = at = 0
        while hit and agreed < len(self._limited):
            table, window = self._limited[at]
            seen = range(hit - 1, first_seen(hit * BLOCK_SIZE, window) - 1, -1)
            hole = next((i for i in seen if not self.pool.holds(hashes[i], table, home)), None)
            hit, agreed = (hit, agreed + 1) if hole is None else (hole, 0)
            at = (at + 1) % len(self._limited)
        return hit

    def take(self, seq: Sequence, hashes: Seq[BlockHash], *, spare_blocks: int) -> bool:
        """Take blocks for all known tokens of a sequence that is computed here, those of `hashes` from the prefix cache as
        far as it reaches. False if that would leave less than `spare_blocks` to each table."""
        taken = next((at for at in self._by_home(hashes) if self._take(seq, at, spare_blocks)), None)
        if taken is None:
            return False
        hit = taken.hit
        seq.progress.num_computed = seq.progress.num_scheduled = hit * BLOCK_SIZE
        seq.blocks.num_published = hit
        return True

    def fits(self, seq: Sequence, *, spare_blocks: int) -> bool:
        """Whether `take` of a sequence that may use the prefix cache would succeed."""
        hashes = seq.usable_hashes(spare_tokens=1)
        return any(self._missing(seq, at, spare_blocks) is not None for at in self._by_home(hashes))

    def _by_home(self, hashes: Seq[BlockHash]) -> Iterable[_Cached]:
        """The cached blocks of a sequence at each home, the best home first."""
        return self._best_first([self._cached_at(home, hashes) for home in range(self.pool.num_homes)])

    def _cached_at(self, home: int, hashes: Seq[BlockHash]) -> _Cached:
        hit = self._hit_at(home, hashes)
        first = [first_seen(hit * BLOCK_SIZE, window) for window in self.windows]
        found = [self.pool.match(hashes[start:hit], table, home) for table, start in enumerate(first)]
        return _Cached(home, hit, first, found)

    def _best_first(self, cached: list[_Cached]) -> Iterable[_Cached]:
        """The homes with fewest blocks in use first, where each cached block makes up for `_HIT_WORTH` in use; of equal ones that
        with the longest hit, then that with fewest cached blocks to evict."""
        if len(cached) == 1:
            return cached
        pool = self.pool

        def worth(at: _Cached) -> tuple[int, int, int]:
            return pool.idle_in(0, at.home) + _HIT_WORTH * sum(map(len, at.found)), at.hit, pool.free_at(at.home)

        return sorted(cached, key=worth, reverse=True)

    def copy_begun_block(self, seq: Sequence, others: Iterable[Sequence], num_usable: int) -> list[BlockCopy]:
        """Have a sequence that has just got its blocks (`take`) continue in a copy of another one's block, where the tokens
        of both agree.

        The prefix cache has full blocks only, and each sample of a prompt writes to the prompt's last block: it gets a copy.
        `num_usable`: leading tokens whose KV may come from others. Returns the copies that the sequence's first step must
        make; their sources are referenced until the caller releases them.
        """
        start, at = seq.progress.num_computed, seq.progress.num_computed // BLOCK_SIZE
        begun = seq.tokens.ids[start : min(start + BLOCK_SIZE, num_usable)]
        end = start + len(begun)
        for other in others if begun else ():
            if (
                other.progress.num_computed >= end
                and other.tokens.ids[start:end] == begun
                and (other.root == seq.root if at == 0 else other.blocks.hashes[at - 1] == seq.blocks.hashes[at - 1])
                and all(first <= at for first in other.blocks.first)
                and other.blocks.home == seq.blocks.home
            ):
                sources = [blocks[at] for blocks in other.blocks.tables]
                self.pool.acquire(sources)
                seq.progress.num_scheduled = end
                return [BlockCopy(t, source, seq.blocks.tables[t][at]) for t, source in enumerate(sources)]
        return []

    def take_for_arrival(self, seq: Sequence, hashes: Seq[BlockHash], *, spare_blocks: int) -> list[int] | None:
        """Take the blocks to keep of all known tokens, for KV that another node sends.

        Returns for each table the first block that must be sent; None if that would leave less than `spare_blocks` to each.
        """
        first = [first_kept(seq.num_tokens, window) for window in self.windows]
        cached = [
            _Cached(home, 0, first, [self.pool.match(hashes[at:], table, home) for table, at in enumerate(first)])
            for home in range(self.pool.num_homes)
        ]
        taken = next((at for at in self._best_first(cached) if self._take(seq, at, spare_blocks)), None)
        if taken is None:
            return None
        missing = [start + len(blocks) for start, blocks in zip(first, taken.found, strict=True)]
        seq.blocks.num_published = min(missing)
        seq.progress.num_computed = seq.progress.num_scheduled = seq.blocks.num_published * BLOCK_SIZE
        return missing

    def _missing(self, seq: Sequence, at: _Cached, spare_blocks: int) -> list[int] | None:
        """[tables]: the blocks to allocate at a home; None if that would leave less than `spare_blocks` to each table."""
        pool, total = self.pool, blocks_for(seq.num_tokens)
        missing = [total - start - len(blocks) for start, blocks in zip(at.first, at.found, strict=True)]
        spare = blocks_for(spare_blocks, pool.num_stripes * pool.num_homes) * pool.num_tables
        idle_hits = Counter(block % pool.num_stripes for blocks in at.found for block in blocks if pool.is_idle(block))
        for stripe in (Stripe(i, pool.num_stripes) for i in range(pool.num_stripes)):
            needed = sum(stripe.count(total) - stripe.count(total - count) for count in missing)
            if needed + spare > pool.idle_in(stripe.first, at.home) - idle_hits[stripe.first]:
                return None
        return missing

    def _take(self, seq: Sequence, at: _Cached, spare_blocks: int) -> bool:
        pool, total, missing = self.pool, blocks_for(seq.num_tokens), self._missing(seq, at, spare_blocks)
        if missing is None:
            return False
        for blocks in at.found:
            pool.acquire(blocks)
        held = seq.blocks
        held.home, held.first, held.num_slots = at.home, list(at.first), total * BLOCK_SIZE
        held.tables = [
            [0] * start + blocks + pool.allocate(count, total - count, at.home)
            for start, blocks, count in zip(at.first, at.found, missing, strict=True)
        ]
        self.shares.add(seq)
        return True

    def grow(self, seq: Sequence) -> None:
        """Add a block to each table of a sequence. Raises: NoFreeBlocks if `room_of` says that there is none."""
        for table in seq.blocks.tables:
            table += self.pool.allocate(1, len(table), seq.blocks.home)
        seq.blocks.num_slots += BLOCK_SIZE
        self.shares.grow(seq)

    def reach(self, seq: Sequence, num_slots: int) -> int:
        """Grow a sequence towards `num_slots` as far as blocks are idle. Returns the tokens that it has room for."""
        while seq.blocks.num_slots < num_slots and self.room_of(seq) > 0:
            self.grow(seq)
        return seq.blocks.num_slots

    def advance(self, seq: Sequence) -> None:
        """Enter the blocks that are full now in the prefix cache, and release those that need not be kept."""
        held, num_computed = seq.blocks, seq.progress.num_computed
        full = num_computed // BLOCK_SIZE
        if full <= held.num_published:
            return
        hashes = seq.full_block_hashes()
        for table, blocks in enumerate(held.tables):
            for index in range(max(held.num_published, held.first[table]), full):
                self.pool.publish(blocks[index], hashes[index], table)
        held.num_published = full
        for table, window in self._limited:
            first = first_kept(num_computed, window)
            if first > held.first[table]:
                self.pool.release(held.tables[table][held.first[table] : first])
                held.first[table] = first

    def free(self, seq: Sequence) -> None:
        """Return all blocks of a sequence to the pool."""
        held = seq.blocks
        if held.tables:
            self.shares.remove(seq)
        for blocks, first in zip(held.tables, held.first, strict=True):
            self.pool.release(blocks[first:])
        held.tables, held.first, held.num_slots = [], [], 0

    def check_integrity(self, seq: Sequence, next_row: int) -> None:
        """Assert that a sequence, whose next row is at position `next_row`, holds what that row sees."""
        held, progress = seq.blocks, seq.progress
        lengths = {len(blocks) * BLOCK_SIZE for blocks in held.tables}
        assert lengths == {held.num_slots}, f"{seq.key} has tables for {lengths} tokens, not {held.num_slots}"
        assert held.num_slots >= progress.num_scheduled >= progress.num_computed, f"{seq.key} ran past its blocks"
        assert held.num_published * BLOCK_SIZE <= progress.num_computed, f"{seq.key} published uncomputed blocks"
        for blocks, first, window in zip(held.tables, held.first, self.windows, strict=True):
            assert first <= first_seen(next_row, window), f"{seq.key} lacks what it will read"
            assert not any(map(self.pool.is_idle, blocks[first:])), f"{seq.key} holds blocks that the pool would reuse"
