"""Which node holds which block: the data of prefix-aware routing. Pure: no I/O; the clock is an argument.

Runs on the router's event loop. Its inputs are the KV events that nodes publish (`router.index.kv_event_subscriber`) and the
router's own decisions.

Every incarnation has a *slot*, one bit; a set of holders of a block is a mask of slots, and every mask in use has a number.
Tables map 64 bits of a block's hash to such a number: one table for published blocks, two for blocks that this router expects.
(Two blocks that share these 64 bits are confused: one wrong estimate in many years, which the node itself corrects.) When an
incarnation is dropped, its bit is removed from the mask of live slots at once; `tidy` cleans the tables in small steps, and
only then is its slot reused. The same round frees the numbers of masks that no block has any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from common.base.clock import Clock, monotonic
from common.base.errors import ConfigError
from common.base.hashing import HASH_BYTES, BlockHash
from router.index.block_table import SEGMENT, BlockTable, KeyArray, Values
from router.index.prefix_hits import PrefixHits

Hashes = Sequence[BlockHash] | bytes | KeyArray
"""Block hashes as a sequence, as one joined blob, or as the result of `block_keys`."""

EXPECTATION_S = 4.0
"""How long a block that a node is only expected to hold counts as held: at least this long, at most twice as long."""
_EXPECTED_BLOCKS = 1_000_000
"""Maximum number of blocks expected in that time."""
_FEW_MASKS = 16_384
"""A round only to free mask numbers starts above this many masks, and above twice the number that the last round left."""
_CLEANED_AT_ONCE = 32 * SEGMENT
_RELEASED_AT_ONCE = 8192
_COUNTED_SLOTS = 2**20
_LAST_USE = 2**32 - 1
"""Largest 32-bit stamp; a router reaches it after some months."""


def block_keys(hashes: Hashes) -> KeyArray:
    """64 bits of each hash, never 0. Raises: ValueError for hashes of another length."""
    if isinstance(hashes, np.ndarray):
        return hashes
    blob = hashes if isinstance(hashes, bytes) else b"".join(hashes)
    if len(blob) % HASH_BYTES:
        raise ValueError(f"{len(blob)} bytes are not hashes of {HASH_BYTES} each")
    return np.maximum(np.frombuffer(blob, dtype="<u8")[1::2], 1)


class PrefixIndex:
    """Block hash -> holders.

    Invariants: at most `max_blocks` published blocks, evicted least recently stored or matched first; the result of `match`
    for an incarnation depends only on calls about that incarnation.
    """

    def __init__(self, max_blocks: int = 10_000_000, *, clock: Clock = monotonic, few: int = 64) -> None:
        """Raises: ConfigError if there is no memory for it."""
        self.max_blocks = max_blocks
        self._few = few
        """Up to this many blocks are handled one by one, which is faster for few."""
        self.evicted = 0
        """Blocks evicted for lack of room since the start."""
        try:
            self._table = BlockTable(max(1, max_blocks), self._on_evict, few)
            """Blocks that nodes published."""
        except (MemoryError, ValueError):  # ValueError: more than any array can have
            raise ConfigError(f"no memory for a prefix index of {max_blocks} blocks: lower --index-blocks") from None
        self._clock = clock
        self._use = 0
        """Counts calls; it is the stamp of the blocks that a call uses."""
        self._masks = [0]
        self._numbers = {0: 0}
        self._free_numbers: list[int] = []
        self._fresh = self._expectations()
        """Blocks expected since `_turned_s`."""
        self._fading = self._expectations()
        """Blocks expected before that."""
        self._turned_s = clock()
        self._slots: dict[str, int] = {}
        """Slot of each known incarnation. The dict is replaced, never changed in place."""
        self._names: list[str] = []
        self._held: list[int] = []
        """Blocks of each slot."""
        self._free_slots: list[int] = []
        self._living = 0
        """Mask of the slots in use."""
        self._dead = 0
        """Mask of dropped slots that masks of blocks may still contain."""
        self._sweeping = 0
        """The dropped slots that the current cleaning round removes."""
        self._unswept: list[tuple[BlockTable, int]] = []
        """In a round: the tables still to be cleaned, each with its first slot that is not clean."""
        self._seen: set[int] | None = None
        """In a round: mask numbers found in the tables so far, or assigned since it began; None between rounds."""
        self._released = 0
        """In a round, once the tables are clean: mask numbers below this one have been checked and freed if unused."""
        self._many_masks = _FEW_MASKS

    def _expectations(self) -> BlockTable:
        return BlockTable(max(1, min(self.max_blocks, _EXPECTED_BLOCKS)), lambda _: None, self._few)

    # -- published by nodes

    def stored(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` now holds these blocks."""
        slot = self._slot(incarnation)
        if not len(hashes):
            return
        keys = block_keys(hashes)
        self._count_use()
        news = self._table.put(keys, self._with(1 << slot), self._use)  # may evict, which changes `_held`
        self._held[slot] += news

    def removed(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` no longer holds these blocks. Unknown blocks are ignored."""
        slot = self._slots.get(incarnation)
        if slot is None or not len(hashes):
            return
        keys, less = block_keys(hashes), self._without(1 << slot)
        self._held[slot] -= self._table.cut(keys, less)
        for expected in (self._fresh, self._fading):
            if expected.live:
                expected.cut(keys, less)

    def replace(self, incarnation: str, hashes: Hashes) -> None:
        """`incarnation` holds these blocks and no others; calls of `stored` may follow with the rest of a long list."""
        self.drop(incarnation)
        self.stored(incarnation, hashes)

    def drop(self, incarnation: str) -> None:
        """`incarnation` no longer holds anything. The cost does not depend on its number of blocks; `tidy` cleans up."""
        slot = self._slots.get(incarnation)
        if slot is None:
            return
        self._living ^= 1 << slot
        self._dead |= 1 << slot
        self._held[slot] = 0
        self._slots = {name: slot for name, slot in self._slots.items() if name != incarnation}

    # -- used by this router

    def expect(self, incarnation: str, hashes: Hashes, *others: str) -> None:
        """These incarnations just got work after which they will hold these blocks: count them as held for some seconds."""
        self._turn()
        mask = 1 << self._slot(incarnation)
        for other in others:
            mask |= 1 << self._slot(other)
        self._fresh.put(block_keys(hashes), self._with(mask), self._use)

    def match(self, hashes: Hashes, *, touch: bool = True) -> PrefixHits:
        """How many leading blocks each incarnation holds. Without `touch` the look-up does not count as a use of the blocks."""
        self._turn()
        if touch:
            self._count_use()
        keys = block_keys(hashes)
        tables = [table for table in (self._table, self._fresh, self._fading) if table.live]
        alive = self._living if tables else 0
        found: list[tuple[int, int]] = []
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
        """(first block, mask of its holders) wherever the holders change; ends at the first block without a holder."""
        masks, last = self._masks, -1
        runs: list[tuple[int, int]] = []
        for start, key in enumerate(keys.tolist()):
            mask = 0
            for table in tables:
                mask |= masks[table.look(key, use)]
            if mask != last:
                last = mask
                runs.append((start, mask))
                if not mask:
                    break
        return runs

    def _runs(self, keys: KeyArray, tables: list[BlockTable], use: int | None) -> Iterator[tuple[int, int]]:
        """(first block, mask of its holders) wherever the holders change, with all blocks looked up at once."""
        numbers = np.array([table.find(keys, use) for table in tables])
        changes = (np.flatnonzero((numbers[:, 1:] != numbers[:, :-1]).any(axis=0)) + 1).tolist()
        for start in [0, *changes]:
            mask = 0
            for row in numbers:
                mask |= self._masks[int(row[start])]
            yield start, mask

    def tidy(self) -> bool:
        """Clean up after drops, or many masks, for a few milliseconds at most. Returns whether more work is left."""
        if self._seen is None and (self._dead or len(self._numbers) > self._many_masks):
            tables = (self._table, self._fresh, self._fading)
            self._sweeping, self._unswept, self._seen = self._dead, [(table, 0) for table in tables], set()
        if self._seen is not None and self._unswept:
            table, start = self._unswept.pop()
            self._clean(table, slice(start, start + _CLEANED_AT_ONCE))
            if start + _CLEANED_AT_ONCE < table.segments * SEGMENT:  # a split appends its new segment at the end
                self._unswept.append((table, start + _CLEANED_AT_ONCE))
        elif self._seen is not None:
            self._release(self._seen)
        return bool(self._dead) or self._seen is not None

    # -- figures

    def __len__(self) -> int:
        """Number of known blocks. Blocks of dropped incarnations are included until `tidy` has removed them."""
        return self._table.live

    def num_blocks(self, incarnation: str) -> int:
        """Number of blocks that `incarnation` is known to hold."""
        slot = self._slots.get(incarnation)
        return 0 if slot is None else self._held[slot]

    def groups(self, most: int) -> list[tuple[int, list[str]]]:
        """The `most` largest sets of published blocks with equal holders: (blocks, holders). Large tables are sampled."""
        used = self._table.segments * SEGMENT
        counted = min(used, _COUNTED_SLOTS)
        keys, values = self._table.keys[:counted], self._table.values[:counted]
        numbers = np.bincount(values[keys != 0], minlength=1)
        by_mask: dict[int, int] = {}
        for number in np.flatnonzero(numbers).tolist():
            mask = self._masks[number] & self._living
            if mask:
                by_mask[mask] = by_mask.get(mask, 0) + int(numbers[number])
        largest = sorted(by_mask.items(), key=lambda item: -item[1])[:most]
        return [(blocks * used // counted, [self._names[slot] for slot in _bits(mask)]) for mask, blocks in largest]

    @property
    def incarnations(self) -> list[str]:
        """All known incarnations that were not dropped."""
        return list(self._slots)

    # -- the numbers of masks

    def _count_use(self) -> None:
        if self._use >= _LAST_USE:
            self._use //= 2
            for table in (self._table, self._fresh, self._fading):
                table.halve_stamps()
        self._use += 1

    def _with(self, bits: int) -> Callable[[int], int]:
        """A function from a mask's number to the number of that mask with `bits` set."""
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

    def _slot(self, incarnation: str) -> int:
        slot = self._slots.get(incarnation)
        if slot is not None:
            return slot
        if self._free_slots:
            slot = self._free_slots.pop()
            self._names[slot] = incarnation
        else:
            slot = len(self._names)
            self._names.append(incarnation)
            self._held.append(0)
        self._living |= 1 << slot
        self._slots = {**self._slots, incarnation: slot}
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
        """Free the mask numbers that no block has, some at a time; ends the round after the last one."""
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
