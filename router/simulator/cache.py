"""A node's KV blocks by name: used ones, and cached ones that are evicted least recently used first. Pure.

It behaves like `common.kv.pool.BlockPool`, without block numbers, because a run may have a million requests. A name
counts as cached as soon as its block is taken, a little before its KV is computed or has arrived.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from common.base.hashing import BlockHash


class BlockCache:
    """Invariant: used + private + cached <= capacity; a name is used or cached, never both.

    *Private* blocks have no name: those of generated tokens, and copies of a name that is already present.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used: dict[BlockHash, int] = {}
        """Name -> references."""
        self._cached: OrderedDict[BlockHash, None] = OrderedDict()
        self._private = 0
        self.journal: dict[BlockHash, bool] = {}
        """Names whose state changed since the journal was last taken -> whether the node has them now."""

    @property
    def room(self) -> int:
        """Blocks that no running sequence uses."""
        return self.capacity - len(self._used) - self._private

    def prefix_hits(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that are here."""
        used, cached = self._used, self._cached
        count = 0
        for block in hashes:
            if block not in used and block not in cached:
                break
            count += 1
        return count

    def take(self, hashes: Sequence[BlockHash], private: int = 0) -> int | None:
        """Use a sequence's blocks and `private` more. Returns how many leading ones were here.

        If there is no room, nothing changes and None is returned.
        """
        used, cached = self._used, self._cached
        new = private + len(hashes) - sum(map(used.__contains__, hashes))
        if new > self.capacity - len(used) - self._private:
            return None
        hits = self.prefix_hits(hashes)
        self._private += private
        journal = self.journal
        for block in hashes:
            references = used.get(block)
            if references is not None:
                used[block] = references + 1
                continue
            used[block] = 1
            if block in cached:
                del cached[block]
            else:
                journal[block] = True
        self._evict()
        return hits

    def release(self, hashes: Sequence[BlockHash], private: int = 0) -> None:
        """Release a sequence's blocks. The tail is evicted before the head, which more prompts share."""
        used, cached = self._used, self._cached
        for block in reversed(hashes):
            references = used[block] - 1
            if references:
                used[block] = references
            else:
                del used[block]
                cached[block] = None
        self._private -= private

    def _evict(self) -> None:
        cached, journal = self._cached, self.journal
        for _ in range(len(self._used) + self._private + len(cached) - self.capacity):
            journal[cached.popitem(last=False)[0]] = False

    def check_integrity(self) -> None:
        """Assert the invariant."""
        assert not self._used.keys() & self._cached.keys(), "a block is used and cached"
        assert len(self._used) + self._private + len(self._cached) <= self.capacity, "more blocks than the capacity"
        assert self._private >= 0
