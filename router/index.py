"""Which node holds which block: what routing by prefix looks at. Pure: no I/O; the clock is an argument.

Runs on the router's event loop. Fed by `router.follower` with what nodes publish, and by the router's own decisions.

Every incarnation has a *slot*, a bit; a set of holders is a mask of slots, and every mask in use has a number. Tables
from 64 bits of a block's hash to such numbers hold all that is known (two blocks that share those bits are taken for
one: a wrong estimate once in many years, which the node itself corrects). A dropped incarnation loses its bit
in the mask of the living at once; `tidy` cleans the tables one by one, and only then its slot is used again. The same round
frees the numbers of masks that no block has any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from common.clock import Clock, monotonic
from common.hashing import HASH_BYTES, BlockHash
from router.block_table import BlockTable, Keys, Values

Hashes = Sequence[BlockHash] | bytes
"""Block hashes, as a sequence or joined into one blob."""

EXPECTATION_S = 4.0
"""A block that this router only expects a node to hold is believed for so long, at most twice."""
_MAX_TABLES = 32
_SMALL_TABLE = 16384
"""With fewer blocks a table is not split further."""
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, odd: the table is picked by the upper bits of a product with it."""
_FEW_MASKS = 16_384
"""Up to so many masks no round is made for their numbers alone, nor before there are twice as many as the last one left."""
_LAST_USE = 2**32 - 1
"""Stamps have 32 bits; a router that runs for months gets there."""
_FEW_BITS = 32
"""Above so many, NumPy finds them faster."""


class PrefixIndex:
    """Block hash -> the incarnations that hold it.

    Invariants: at most `max_blocks` blocks, those that were not stored or matched for longest are given up first; what
    `match` says of an incarnation follows from what was said of that incarnation only.
    """

    def __init__(self, max_blocks: int = 10_000_000, *, clock: Clock = monotonic, few: int = 1024) -> None:
        self.max_blocks = max_blocks
        self._few = few
        """So many blocks are handled one by one, which is quicker then."""
        self.evicted = 0
        """Blocks given up for lack of room, ever."""
        bits = 0
        while 1 << bits < _MAX_TABLES and max_blocks >> (bits + 1) >= _SMALL_TABLE:
            bits += 1
        self._tables = [BlockTable(max(1, max_blocks >> bits)) for _ in range(1 << bits)]
        self._shift = 64 - bits
        self._clock = clock
        self._use = 0
        """Counts calls; the stamp of what they use."""
        self._masks = [0]
        self._numbers = {0: 0}
        self._free_numbers: list[int] = []
        self._fresh: dict[int, int] = {}
        """What is expected since `_turned_s`: masks by key."""
        self._fading: dict[int, int] = {}
        """What was expected before that."""
        self._turned_s = clock()
        self._slots: dict[str, int] = {}
        self._names: list[str] = []
        self._held: list[int] = []
        """Blocks of each slot."""
        self._free_slots: list[int] = []
        self._living = 0
        """The mask of the slots in `_slots`."""
        self._dead = 0
        """The mask of slots that blocks may still name, though they are nobody's any more."""
        self._sweeping = 0
        """Of these, the ones that the present round of cleaning removes."""
        self._unswept: list[BlockTable] = []
        self._seen: set[int] | None = None
        """In such a round: numbers that blocks have, as far as it has come, or that were given out since it began."""
        self._many_masks = _FEW_MASKS

    # -- what nodes say

    def stored(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` holds these blocks now."""
        slot, keys = self._slot(incarnation), _keys(hashes)
        news = self._change(keys, 1 << slot, stored=True)  # it may evict, and count that
        self._held[slot] += news

    def removed(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` holds these blocks no more. Unknown ones are ignored."""
        slot = self._slots.get(incarnation)
        if slot is None:
            return
        bit, keys = 1 << slot, _keys(hashes)
        self._held[slot] -= self._change(keys, bit, stored=False)
        for expected in (self._fresh, self._fading):
            if expected:
                for key in keys.tolist():
                    if expected.get(key, 0) & bit:
                        expected[key] ^= bit

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
        bit, fresh = 1 << self._slot(incarnation), self._fresh
        keys: list[int] = _keys(hashes).tolist()
        if len(fresh) + len(keys) <= self.max_blocks:
            for key in keys:
                fresh[key] = fresh.get(key, 0) | bit

    def match(self, hashes: Hashes) -> dict[str, int]:
        """How many leading blocks each incarnation holds, of those that hold the first."""
        self._turn()
        self._count_use()
        keys = _keys(hashes)
        numbers = self._look_up(keys)
        expected = [kind for kind in (self._fresh, self._fading) if kind]
        names, found, alive = self._names, dict[str, int](), self._living
        # Blocks in a row with the same holders are one step.
        starts: list[int] = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for start, end in pairwise(starts):
            mask = self._masks[int(numbers[start])] if start < end else 0
            if mask & alive == alive:
                continue
            # What is expected can only matter here.
            block_keys: list[int] = keys[start:end].tolist() if expected else [0]
            for depth, key in enumerate(block_keys, start):
                more = mask
                for kind in expected:
                    more |= kind.get(key, 0)
                if alive & ~more:
                    if depth:
                        found.update(dict.fromkeys([names[slot] for slot in _bits(alive & ~more)], depth))
                    alive &= more
            if not alive:
                return found
        if len(keys):
            found.update(dict.fromkeys([names[slot] for slot in _bits(alive)], len(keys)))
        return found

    def tidy(self) -> bool:
        """Clean up after drops, and when masks have become many, for some milliseconds at most. Returns whether more is
        to be done.
        """
        if self._seen is None and (self._dead or len(self._numbers) > self._many_masks):
            self._sweeping, self._unswept, self._seen = self._dead, list(self._tables), set()
        if self._seen is not None and self._unswept:
            self._clean(self._unswept.pop())
        elif self._seen is not None:
            self._release_swept(self._seen)
        return bool(self._dead) or self._seen is not None

    # -- figures

    def __len__(self) -> int:
        """Blocks known, those of dropped incarnations included until `tidy` has come by."""
        return sum(table.live for table in self._tables)

    def held(self, incarnation: str) -> int:
        """Blocks that `incarnation` is known to hold."""
        slot = self._slots.get(incarnation)
        return 0 if slot is None else self._held[slot]

    @property
    def incarnations(self) -> list[str]:
        """All that something was said of and that were not dropped."""
        return list(self._slots)

    # -- the tables

    def _look_up(self, keys: Keys) -> Values:
        """The number of each block's holders; marks them as used."""
        numbers: Values = np.zeros(len(keys), np.uint32)
        if len(keys) <= self._few:
            few: list[int] = keys.tolist()
            for index, key in enumerate(few):
                table = self._tables[key >> self._shift]
                at = table.place(key)
                number = table.value_at[at]
                if number:
                    numbers[index] = number
                    table.stamp_at[at] = self._use
                elif key not in self._fresh and key not in self._fading:
                    break  # nobody's prefix goes on
            return numbers
        order = np.argsort(keys)
        for table, start, end in self._parts(ordered := keys[order]):
            wanted = ordered[start:end]
            at = table.places(wanted)
            numbers[order[start:end]] = table.values[at]
            table.stamps[at] = self._use
        return numbers

    def _count_use(self) -> None:
        if self._use >= _LAST_USE:
            self._use //= 2
            for table in self._tables:
                table.halve_stamps()
        self._use += 1

    def _parts(self, ordered: Keys) -> list[tuple[BlockTable, int, int]]:
        """Which table has which part of sorted keys."""
        if len(self._tables) == 1:
            return [(self._tables[0], 0, len(ordered))]
        bounds = np.searchsorted(ordered >> np.uint64(self._shift), np.arange(len(self._tables) + 1)).tolist()
        return [(t, a, b) for t, a, b in zip(self._tables, bounds, bounds[1:], strict=False) if a < b]

    def _change(self, keys: Keys, bit: int, *, stored: bool) -> int:
        """Set or clear `bit` in the holders of these blocks; returns for how many that was news."""
        self._count_use()
        if len(keys) <= self._few:
            return self._change_few(keys.tolist(), bit, stored)
        news = 0
        for table, start, end in self._parts(ordered := np.unique(keys)):
            part = ordered[start:end]
            if stored:
                self.evicted += max(0, len(part) - table.limit)
                part = part[: table.limit]
                self._make_room(table, len(part))
                at = table.claim_all(part)
                table.stamps[at] = self._use
            else:
                at = table.places(part)
                at = at[table.keys[at] == part]
            old, inverse = np.unique(table.values[at], return_inverse=True)
            new = np.array([self._changed(number, bit, stored) for number in old.tolist()], np.uint32)
            table.values[at] = new[inverse]
            news += int(np.count_nonzero((old != new)[inverse]))
            table.live += int(np.count_nonzero(new[inverse])) - int(np.count_nonzero(old[inverse]))
            table.measure()
        return news

    def _change_few(self, keys: list[int], bit: int, stored: bool) -> int:
        """`_change` in one loop without calls: most batches are small, and this is where they spend their time."""
        tables, shift, use, news = self._tables, self._shift, self._use, 0
        changed: dict[int, int] = {}
        for key in keys:
            table = tables[key >> shift]
            at = table.place(key)
            old = table.value_at[at]
            new = changed.get(old)
            if new is None:
                new = changed[old] = self._changed(old, bit, stored)
            if stored:
                if not old:
                    if table.room <= 0:
                        self._make_room(table, 1)
                        at = table.place(key)
                    table.claim(at, key)
                table.stamp_at[at] = use
            if new != old:
                table.value_at[at] = new
                news += 1
                if not new:
                    table.live -= 1
        return news

    def _changed(self, number: int, bit: int, stored: bool) -> int:
        """The number of these holders with or without one."""
        mask = self._masks[number]
        return self._number(mask | bit if stored else mask & ~bit)

    def _number(self, mask: int) -> int:
        number = self._numbers.get(mask)
        if number is None:
            if self._free_numbers:
                number = self._free_numbers.pop()
                self._masks[number] = mask
            else:
                number = len(self._masks)
                self._masks.append(mask)
            self._numbers[mask] = number
        if self._seen is not None:
            self._seen.add(number)
        return number

    def _make_room(self, table: BlockTable, count: int) -> None:
        evicted = table.make_room(count)
        if evicted is not None:
            self.evicted += len(evicted)
            distinct, often = np.unique(evicted, return_counts=True)
            counts: list[tuple[int, int]] = list(zip(distinct.tolist(), often.tolist(), strict=True))
            for number, times in counts:
                for slot in _bits(self._masks[number] & self._living):
                    self._held[slot] -= times

    # -- slots

    def _slot(self, incarnation: str) -> int:
        slot = self._slots.get(incarnation)
        if slot is None:
            if self._free_slots:
                slot = self._free_slots.pop()
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

    def _clean(self, table: BlockTable) -> None:
        used = np.zeros(len(self._masks), np.bool_)
        used[table.values] = True
        numbers = np.arange(len(self._masks), dtype=np.uint32)
        for number in np.flatnonzero(used).tolist():
            numbers[number] = self._number(self._masks[number] & ~self._sweeping)
        if self._sweeping:
            table.renumber(numbers)

    def _release_swept(self, seen: set[int]) -> None:
        for number, mask in enumerate(self._masks):
            if mask and number not in seen:
                del self._numbers[mask]
                self._masks[number] = 0
                self._free_numbers.append(number)
        for expected in (self._fresh, self._fading):
            for key, mask in expected.items():
                if mask & self._sweeping:
                    expected[key] = mask & ~self._sweeping
        self._dead &= ~self._sweeping
        self._free_slots += _bits(self._sweeping)
        self._sweeping, self._seen = 0, None
        self._many_masks = max(_FEW_MASKS, 2 * len(self._numbers))


def _keys(hashes: Hashes) -> Keys:
    """64 bits of each hash, well spread, never 0. Raises: ValueError for hashes of another length."""
    blob = hashes if isinstance(hashes, bytes) else b"".join(hashes)
    words = np.frombuffer(blob, dtype="<u8").reshape(-1, HASH_BYTES // 8)
    return np.maximum((words[:, 0] ^ words[:, 1]) * _SPREAD, np.uint64(1))


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
