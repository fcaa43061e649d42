"""Which node holds which block: what routing by prefix looks at. Pure: no I/O; the clock is an argument.

Runs on the router's event loop. Fed by `router.follower` with what nodes publish, and by the router's own decisions.

Every incarnation has a *slot*, a bit. A block's hash maps to a mask of slots; equal masks are one object, so that a
run of blocks with the same holders costs a walk nothing but the look-up. A dropped incarnation loses its bit in the
mask of the living at once; its entries are cleaned up little by little by `tidy`, and only then its slot is used again.
The map is split into shards, so that no growth and no clean-up ever takes long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np

from common.clock import Clock, monotonic
from common.hashing import HASH_BYTES, BlockHash

Hashes = Sequence[BlockHash] | bytes
"""Block hashes, as a sequence or joined into one blob."""

EXPECTATION_S = 4.0
"""A block that this router only expects a node to hold is believed for so long, at most twice."""
_FAN_OUT = 256
_SMALL_SHARD = 1024
"""Below so many blocks a shard is not split further."""
_TIDY_BLOCKS = 5000
_FEW_BITS = 32
"""Above so many, NumPy finds them faster."""
_MAX_KNOWN_MASKS = 100_000


def split_blob(blob: bytes) -> list[BlockHash]:
    """The hashes in a blob. Raises: ValueError if its length is not a multiple of `HASH_BYTES`."""
    return np.frombuffer(blob, dtype=f"V{HASH_BYTES}").tolist()


class PrefixIndex:
    """Block hash -> the incarnations that hold it.

    Invariants: at most `max_blocks` blocks, the least recently stored or (once the room gets tight) matched are
    given up first; what `match` says of an incarnation follows from what was said of that incarnation only.
    """

    def __init__(self, max_blocks: int = 10_000_000, *, clock: Clock = monotonic) -> None:
        self.max_blocks = max_blocks
        self.evicted = 0
        """Blocks given up for lack of room, ever."""
        count = 1
        while count < _FAN_OUT and max_blocks // (count * 2) >= _SMALL_SHARD:
            count *= 2
        self._shards: list[dict[BlockHash, int]] = [{} for _ in range(count)]
        self._shard_limit = max_blocks // count
        self._tight = self._shard_limit - self._shard_limit // 8
        self._by_first_byte = [self._shards[byte % count] for byte in range(_FAN_OUT)]
        self._clock = clock
        self._fresh: dict[BlockHash, int] = {}
        """What is expected since `_turned_s`."""
        self._fading: dict[BlockHash, int] = {}
        """What was expected before that."""
        self._turned_s = clock()
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._held: list[int] = []
        """Blocks of each slot."""
        self._free: list[int] = []
        self._living = 0
        """The mask of the slots in `_slots`."""
        self._dead = 0
        """The mask of slots that blocks may still name, though they are nobody's any more."""
        self._sweeping = 0
        """Of these, the ones that the present round of cleaning removes."""
        self._unswept: list[int] = []
        """Shards that the present round has not been through."""
        self._stale: list[BlockHash] = []
        """Blocks of the last one that are to be cleaned."""
        self._matched: set[BlockHash] = set()
        """What was matched lately; kept only while room is tight."""
        self._masks: dict[int, int] = {}

    # -- what nodes say

    def stored(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` holds these blocks now. O(1) each."""
        slot = self._slot(incarnation)
        bit, new = self._one(1 << slot), 0
        by_first_byte, limit = self._by_first_byte, self._shard_limit
        for block in _as_list(hashes):
            shard = by_first_byte[block[0]]
            mask = shard.get(block)
            if mask is None:
                shard[block] = bit
                new += 1
                if len(shard) > limit:
                    self._evict(shard)
            elif mask is not bit and not mask & bit:
                shard[block] = self._one(mask | bit)
                new += 1
        self._held[slot] += new

    def removed(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` holds these blocks no more. Unknown ones are ignored."""
        slot = self._slots.get(incarnation)
        if slot is None:
            return
        bit, gone = self._one(1 << slot), 0
        by_first_byte = self._by_first_byte
        blocks = _as_list(hashes)
        for block in blocks:
            shard = by_first_byte[block[0]]
            mask = shard.get(block)
            if mask is bit:
                del shard[block]
                gone += 1
            elif mask is not None and mask & bit:
                if mask == bit:
                    del shard[block]
                else:
                    shard[block] = self._one(mask ^ bit)
                gone += 1
        self._held[slot] -= gone
        for expected in (self._fresh, self._fading):
            if expected:
                for block in blocks:
                    mask = expected.get(block, 0)
                    if mask & bit:
                        expected[block] = mask ^ bit

    def replace(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` holds these blocks and no others; `stored` may go on with the rest of a long list."""
        self.drop(incarnation)
        self.stored(incarnation, hashes)

    def drop(self, incarnation: str) -> None:
        """`incarnation` holds nothing more. O(1); `tidy` cleans up."""
        slot = self._slots.pop(incarnation, None)
        if slot is not None:
            self._living ^= 1 << slot
            self._dead |= 1 << slot
            self._held[slot] = 0

    # -- what this router does and asks

    def expect(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` was just given work that will leave it with these blocks: believe so for some seconds."""
        self._turn()
        bit = self._one(1 << self._slot(incarnation))
        fresh = self._fresh
        blocks = _as_list(hashes)
        if len(fresh) + len(blocks) > self.max_blocks:
            return
        for block in blocks:
            mask = fresh.setdefault(block, bit)
            if mask is not bit and not mask & bit:
                fresh[block] = self._one(mask | bit)

    def match(self, hashes: Hashes) -> dict[str, int]:
        """How many leading blocks each incarnation holds, of those that hold the first."""
        self._turn()
        by_first_byte = self._by_first_byte
        names, fresh, fading = self._names, self._fresh, self._fading
        expecting = bool(fresh or fading)
        blocks = _as_list(hashes)
        found: dict[str, int] = {}
        alive, covering, depth = self._living, None, 0
        for block in blocks:
            mask = by_first_byte[block[0]].get(block, 0)
            if mask is not covering:
                if mask & alive == alive:
                    covering = mask
                else:  # what is expected can only matter here
                    if expecting:
                        mask |= fresh.get(block, 0) | fading.get(block, 0)
                    still = alive & mask
                    if depth and still != alive:
                        found.update(dict.fromkeys(map(names.__getitem__, _bits(alive ^ still)), depth))
                    alive = still
                    if not alive:
                        break
            depth += 1
        if depth:
            found.update(dict.fromkeys(map(names.__getitem__, _bits(alive)), depth))
        if len(self._shards[0]) >= self._tight:  # as full as all the others
            self._remember(blocks[:depth])
        return found

    def tidy(self) -> bool:
        """Clean up after drops, for some milliseconds at most. Returns whether more is to be done."""
        if not self._sweeping:
            self._sweeping, self._unswept = self._dead, list(range(len(self._shards)))
            if len(self._masks) > _MAX_KNOWN_MASKS:
                self._masks = {}
        if self._stale:
            self._clean(self._stale[-_TIDY_BLOCKS:])
            del self._stale[-_TIDY_BLOCKS:]
        elif self._sweeping and self._unswept:
            dying, shard = self._sweeping, self._shards[self._unswept.pop()]
            # Nothing that is stored from here on carries a dying bit that is not in this list.
            self._stale = [block for block, mask in shard.items() if mask & dying]
        elif self._sweeping:
            self._release_swept()
        return bool(self._dead)

    # -- figures

    def __len__(self) -> int:
        """Blocks known, those of dropped incarnations included until `tidy` has come by."""
        return sum(map(len, self._shards))

    def held(self, incarnation: str) -> int:
        """Blocks that `incarnation` is known to hold."""
        slot = self._slots.get(incarnation)
        return 0 if slot is None else self._held[slot]

    @property
    def incarnations(self) -> list[str]:
        """All that something was said of and that were not dropped."""
        return list(self._slots)

    # -- inside

    def _one(self, mask: int) -> int:
        """The one object for this mask."""
        return self._masks.setdefault(mask, mask)

    def _slot(self, incarnation: str) -> int:
        slot = self._slots.get(incarnation)
        if slot is None:
            if self._free:
                slot = self._free.pop()
                self._names[slot] = incarnation
            else:
                slot = len(self._names)
                self._names.append(incarnation)
                self._held.append(0)
            self._slots[incarnation] = slot
            self._living |= 1 << slot
        return slot

    def _turn(self) -> None:
        now = self._clock()
        if now - self._turned_s >= EXPECTATION_S:
            self._fading = {} if now - self._turned_s >= 2 * EXPECTATION_S else self._fresh
            self._fresh = {}
            self._turned_s = now

    def _remember(self, blocks: Sequence[BlockHash]) -> None:
        """Spare these once when the oldest are given up."""
        if len(self._matched) > self.max_blocks // 64:
            self._matched.clear()
        self._matched.update(blocks)

    def _evict(self, shard: dict[BlockHash, int]) -> None:
        for block in list(islice(shard, max(1, self._shard_limit // 32))):
            mask = shard.pop(block)
            if block in self._matched and len(shard) < self._shard_limit:
                self._matched.discard(block)
                shard[block] = mask
                continue
            self.evicted += 1
            for slot in _bits(mask & self._living):
                self._held[slot] -= 1

    def _clean(self, blocks: Iterable[BlockHash]) -> None:
        for block in blocks:
            shard = self._by_first_byte[block[0]]
            mask = shard.get(block, 0)
            left = mask & ~self._sweeping
            if left:
                shard[block] = self._one(left)
            elif mask:
                del shard[block]

    def _release_swept(self) -> None:
        for expected in (self._fresh, self._fading):
            _clear(expected, self._sweeping)
        self._dead &= ~self._sweeping
        self._free += _bits(self._sweeping)
        self._sweeping = 0


def _bits(mask: int) -> list[int]:
    """The positions of the set bits, lowest first."""
    if mask.bit_count() > _FEW_BITS:
        packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
    found: list[int] = []
    while mask:
        lowest = mask & -mask
        found.append(lowest.bit_length() - 1)
        mask ^= lowest
    return found


def _as_list(hashes: Hashes) -> Sequence[BlockHash]:
    return split_blob(hashes) if isinstance(hashes, bytes) else hashes


def _clear(expected: dict[BlockHash, int], dying: int) -> None:
    for block, mask in expected.items():
        if mask & dying:
            expected[block] = mask & ~dying


def joined(hashes: Iterable[BlockHash]) -> bytes:
    """The blob of these hashes."""
    return b"".join(hashes)
