"""Which node holds which block: what routing by prefix looks at. Pure: no I/O; the clock is an argument.

Runs on the router's event loop. Fed by `router.index.kv_event_subscriber` with what nodes publish, and by the router's own decisions.

A holder is an incarnation and the tier of its memory that the block is in. Every holder has a *slot*, a bit; a set of
holders is a mask of slots, and every mask in use has a number. Tables from 64 bits of a block's hash to such numbers
hold all that is known (two blocks that share those bits are taken for one: a wrong estimate once in many years, which
the node itself corrects): one of what nodes published, two of what this router expects. A dropped incarnation loses its
bits in the mask of the living at once; `tidy` cleans the tables piece by piece, and only then its slots are used again.
The same round frees the numbers of masks that no block has any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from common.base.clock import Clock, monotonic
from common.base.hashing import HASH_BYTES, BlockHash
from common.control.messages import Tier
from router.index.block_table import SEGMENT, BlockTable, KeyArray, Values
from router.index.prefix_hits import PrefixHits

Hashes = Sequence[BlockHash] | bytes | KeyArray
"""Block hashes, as a sequence, joined into one blob, or what `keys` made of them."""

EXPECTATION_S = 4.0
"""A block that this router only expects a node to hold is believed for so long, at most twice."""
_EXPECTED_BLOCKS = 1_000_000
"""So many are expected at most in that time."""
_SPREAD = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: the segment is picked by the upper bits of a product with it."""
_FEW_MASKS = 16_384
"""Up to so many masks no round is made for their numbers alone, nor before there are twice as many as the last one left."""
_CLEANED_AT_ONCE = 32 * SEGMENT
_RELEASED_AT_ONCE = 8192
_LAST_USE = 2**32 - 1
"""Stamps have 32 bits; a router that runs for months gets there."""


def block_keys(hashes: Hashes) -> KeyArray:
    """64 bits of each hash, well spread, never 0. Raises: ValueError for hashes of another length."""
    if isinstance(hashes, np.ndarray):
        return hashes
    blob = hashes if isinstance(hashes, bytes) else b"".join(hashes)
    if len(blob) % HASH_BYTES:
        raise ValueError(f"{len(blob)} bytes are not hashes of {HASH_BYTES} each")
    words = np.frombuffer(blob, dtype="<u8").reshape(-1, HASH_BYTES // 8)
    return np.maximum((words[:, 0] ^ words[:, 1]) * np.uint64(_SPREAD), np.uint64(1))


class PrefixIndex:
    """Block hash -> the holders.

    Invariants: at most `max_blocks` blocks, those that were not stored or matched for longest are given up first; what
    `match` says of an incarnation follows from what was said of that incarnation only.
    """

    def __init__(self, max_blocks: int = 10_000_000, *, clock: Clock = monotonic, few: int = 64) -> None:
        self.max_blocks = max_blocks
        self._few = few
        """So many blocks are handled one by one, which is quicker then."""
        self.evicted = 0
        """Blocks given up for lack of room, ever."""
        self._table = BlockTable(max(1, max_blocks), self._on_evict, few)
        """What nodes published."""
        self._clock = clock
        self._use = 0
        """Counts calls; the stamp of what they use."""
        self._masks = [0]
        self._numbers = {0: 0}
        self._free_numbers: list[int] = []
        self._fresh = self._expectations()
        """What is expected since `_turned_s`."""
        self._fading = self._expectations()
        """What was expected before that."""
        self._turned_s = clock()
        self._slots: dict[str, int] = {}
        """Of the incarnations that something was said of, the slot of their first tier; replaced, never changed."""
        self._lower: dict[tuple[str, Tier], int] = {}
        """The slots of other tiers."""
        self._names: list[str] = []
        self._held: list[int] = []
        """Blocks of each slot."""
        self._free_slots: list[int] = []
        self._living = 0
        """The mask of the slots in use."""
        self._dead = 0
        """The mask of slots that blocks may still name, though they are nobody's any more."""
        self._sweeping = 0
        """Of these, the ones that the present round of cleaning removes."""
        self._unswept: list[tuple[BlockTable, int]] = []
        """In such a round: tables, and up to which of their slots each is clean."""
        self._seen: set[int] | None = None
        """In such a round: numbers that blocks have, as far as it has come, or that were given out since it began."""
        self._released = 0
        """In such a round, after the tables: up to which number those that nothing has are free."""
        self._many_masks = _FEW_MASKS

    def _expectations(self) -> BlockTable:
        return BlockTable(max(1, min(self.max_blocks, _EXPECTED_BLOCKS)), lambda _: None, self._few)

    # -- what nodes say

    def stored(self, incarnation: str, hashes: Hashes, tier: Tier = "device") -> None:
        """`incarnation` holds these blocks now."""
        slot = self._slot(incarnation, tier)
        if not len(hashes):
            return
        keys = block_keys(hashes)
        self._count_use()
        news = self._table.put(keys, self._with(1 << slot), self._use)  # it may evict, and count that
        self._held[slot] += news

    def removed(self, incarnation: str, hashes: Hashes, tier: Tier = "device") -> None:
        """`incarnation` holds these blocks no more. Unknown ones are ignored."""
        slot = self._slots.get(incarnation) if tier == "device" else self._lower.get((incarnation, tier))
        if slot is None or not len(hashes):
            return
        keys, less = block_keys(hashes), self._without(1 << slot)
        self._held[slot] -= self._table.cut(keys, less)
        for expected in (self._fresh, self._fading):
            if expected.live:
                expected.cut(keys, less)

    def replace(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` holds these blocks and no others; `stored` may go on with the rest of a long list."""
        self.drop(incarnation)
        self.stored(incarnation, hashes)

    def drop(self, incarnation: str) -> None:
        """`incarnation` holds nothing more. Without a step per block; `tidy` cleans up."""
        if incarnation not in self._slots:
            return
        lower = [holder for holder in self._lower if holder[0] == incarnation]
        for slot in [self._slots[incarnation], *(self._lower.pop(holder) for holder in lower)]:
            self._living ^= 1 << slot
            self._dead |= 1 << slot
            self._held[slot] = 0
        self._slots = {name: slot for name, slot in self._slots.items() if name != incarnation}

    # -- what this router does and asks

    def expect(self, incarnation: str, hashes: Hashes, *others: str) -> None:
        """These incarnations were just given work that will leave them with these blocks: believe so for some seconds."""
        self._turn()
        mask = 1 << self._slot(incarnation, "device")
        for other in others:
            mask |= 1 << self._slot(other, "device")
        self._fresh.put(block_keys(hashes), self._with(mask), self._use)

    def match(self, hashes: Hashes, *, touch: bool = True) -> PrefixHits:
        """How many leading blocks each incarnation holds, in whatever tier, of those that hold the first. Without `touch`
        they do not count as used by that.
        """
        self._turn()
        if touch:
            self._count_use()
        keys = block_keys(hashes)
        tables = [table for table in (self._table, self._fresh, self._fading) if table.live]
        alive = self._living if tables else 0
        found: list[tuple[int, int]] = []
        for slot in self._lower.values():
            alive &= ~(1 << slot)
        runs = self._few_runs if len(keys) <= self._few else self._runs
        for start, mask in runs(keys, tables, self._use if touch else None) if alive else ():
            lost = alive & ~mask
            if lost:
                if start:
                    found.append((lost, start))
                alive &= mask
                if not alive:
                    break
        if alive and len(keys):
            found.append((alive, len(keys)))
        return PrefixHits(self._slots, len(self._names), found)

    def _few_runs(self, keys: KeyArray, tables: list[BlockTable], use: int | None) -> list[tuple[int, int]]:
        """(first block, mask of its holders) wherever the holders change; ends where nobody's prefix goes on."""
        masks, last = self._masks, -1
        runs: list[tuple[int, int]] = []
        for start, key in enumerate(keys.tolist()):
            mask = 0
            for table in tables:
                mask |= masks[table.look(key, use)]
            if mask != last:
                last = mask
                runs.append((start, self._any_tier(mask) if self._lower else mask))
                if not mask:
                    break
        return runs

    def _runs(self, keys: KeyArray, tables: list[BlockTable], use: int | None) -> Iterator[tuple[int, int]]:
        """As `_few_runs`, all blocks at once."""
        numbers = np.array([table.find(keys, use) for table in tables])
        changes = (np.flatnonzero((numbers[:, 1:] != numbers[:, :-1]).any(axis=0)) + 1).tolist()
        for start in [0, *changes]:
            mask = 0
            for row in numbers:
                mask |= self._masks[int(row[start])]
            yield start, self._any_tier(mask)

    def _any_tier(self, mask: int) -> int:
        """`mask` with the first slot of each incarnation of which it has another."""
        for (incarnation, _), slot in self._lower.items():
            if mask >> slot & 1:
                mask |= 1 << self._slots[incarnation]
        return mask

    def tidy(self) -> bool:
        """Clean up after drops, and when masks have become many, for some milliseconds at most. Returns whether more is
        to be done.
        """
        if self._seen is None and (self._dead or len(self._numbers) > self._many_masks):
            tables = (self._table, self._fresh, self._fading)
            self._sweeping, self._unswept, self._seen = self._dead, [(table, 0) for table in tables], set()
        if self._seen is not None and self._unswept:
            table, start = self._unswept.pop()
            self._clean(table, slice(start, start + _CLEANED_AT_ONCE))
            if start + _CLEANED_AT_ONCE < table.segments * SEGMENT:  # what is split meanwhile goes to the end
                self._unswept.append((table, start + _CLEANED_AT_ONCE))
        elif self._seen is not None:
            self._release(self._seen)
        return bool(self._dead) or self._seen is not None

    # -- figures

    def __len__(self) -> int:
        """Blocks known, those of dropped incarnations included until `tidy` has come by."""
        return self._table.live

    def held(self, incarnation: str, tier: Tier = "device") -> int:
        """Blocks that `incarnation` is known to hold in this tier."""
        slot = self._slots.get(incarnation) if tier == "device" else self._lower.get((incarnation, tier))
        return 0 if slot is None else self._held[slot]

    def tiers(self, incarnation: str) -> dict[Tier, int]:
        """Blocks that `incarnation` is known to hold, by tier."""
        found: dict[Tier, int] = {"device": self.held(incarnation)}
        found.update({tier: self._held[slot] for (name, tier), slot in self._lower.items() if name == incarnation})
        return found

    @property
    def incarnations(self) -> list[str]:
        """All that something was said of and that were not dropped."""
        return list(self._slots)

    # -- the numbers of masks

    def _count_use(self) -> None:
        if self._use >= _LAST_USE:
            self._use //= 2
            for table in (self._table, self._fresh, self._fading):
                table.halve_stamps()
        self._use += 1

    def _with(self, bits: int) -> Callable[[int], int]:
        """From the number of a mask to that of the mask with `bits`."""
        return lambda number: self._number(self._masks[number] | bits)

    def _without(self, bits: int) -> Callable[[int], int]:
        return lambda number: self._number(self._masks[number] & ~bits)

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

    def _on_evict(self, gone: Values) -> None:
        self.evicted += len(gone)
        distinct, often = np.unique(gone, return_counts=True)
        counts: list[tuple[int, int]] = list(zip(distinct.tolist(), often.tolist(), strict=True))
        for number, times in counts:
            for slot in _bits(self._masks[number] & self._living):
                self._held[slot] -= times

    # -- slots

    def _slot(self, incarnation: str, tier: Tier) -> int:
        slot = self._slots.get(incarnation)
        if slot is None:
            slot = self._new_slot(incarnation)
            self._slots = {**self._slots, incarnation: slot}
        if tier == "device":
            return slot
        if (incarnation, tier) not in self._lower:
            self._lower[incarnation, tier] = self._new_slot(incarnation)
        return self._lower[incarnation, tier]

    def _new_slot(self, incarnation: str) -> int:
        if self._free_slots:
            slot = self._free_slots.pop()
            self._names[slot] = incarnation
        else:
            slot = len(self._names)
            self._names.append(incarnation)
            self._held.append(0)
        self._living |= 1 << slot
        return slot

    def _turn(self) -> None:
        now = self._clock()
        if now - self._turned_s >= EXPECTATION_S:
            self._fading.clear()
            if now - self._turned_s >= 2 * EXPECTATION_S:
                self._fresh.clear()
            self._fresh, self._fading = self._fading, self._fresh
            self._turned_s = now

    def _clean(self, table: BlockTable, here: slice) -> None:
        used = np.zeros(len(self._masks), np.bool_)
        used[table.values[here]] = True
        if not self._sweeping:
            assert self._seen is not None
            self._seen.update(np.flatnonzero(used).tolist())
            return
        numbers = np.arange(len(self._masks), dtype=np.uint32)
        for number in np.flatnonzero(used).tolist():
            numbers[number] = self._number(self._masks[number] & ~self._sweeping)
        table.renumber(numbers, here)

    def _release(self, seen: set[int]) -> None:
        """Free numbers that no block has, some at a time; at the end the round is over."""
        end = min(self._released + _RELEASED_AT_ONCE, len(self._masks))
        for number in range(self._released, end):
            mask = self._masks[number]
            if mask and number not in seen:
                del self._numbers[mask]
                self._masks[number] = 0
                self._free_numbers.append(number)
        self._released = end
        if end < len(self._masks):
            return
        self._released = 0
        self._dead &= ~self._sweeping
        self._free_slots += _bits(self._sweeping)
        self._sweeping, self._seen = 0, None
        self._many_masks = max(_FEW_MASKS, 2 * len(self._numbers))


def _bits(mask: int) -> list[int]:
    """The positions of the set bits, lowest first."""
    packed = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
