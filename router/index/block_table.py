"""A hash table from 64-bit keys to small numbers, in NumPy arrays: 16 bytes per slot, many keys looked up at once.

Pure; owned by `router.index.prefix_index`. The slots of a long prompt are in no CPU cache: one sweep over all keys overlaps
the memory latencies, which a dict cannot do. Small batches are handled key by key, which is faster for them.

Extendible hashing: the upper bits of a key select an entry of the directory, which names a segment; inside a segment,
open addressing with linear probing. Segments are split one at a time and fill up at different times, so growth never
causes a long pause. The arrays are allocated at their maximum size: the operating system backs only written pages with
memory, and segments are used in order. Key 0 marks an empty slot. A key with value 0 was removed; it keeps its slot
until its segment is rewritten. Every entry has the stamp of its last use.

    Source: R. Fagin, J. Nievergelt, N. Pippenger, H. R. Strong, Extendible Hashing, 1979.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

KeyArray = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]
Places = npt.NDArray[np.intp]
Becomes = Callable[[int], int]
"""Maps an entry's value to its new value; 0 is the value of a missing key."""

_BITS = 12
SEGMENT = 1 << _BITS
"""Slots per segment."""
_INSIDE = SEGMENT - 1
_LEAST_FULL, _FULL_SPREAD = 0.35, 0.3
"""A segment is full when this share of its slots has a key; the second number is the most that `_full` adds to it."""
_SPLIT = 0.8
"""A full segment is split if at least this share of it is live; otherwise only removed entries are cleared."""
_EMPTIEST = 0.2
"""The maximum number of segments assumes this average fill; when it is reached, entries are evicted."""
_EVICTED_AT_ONCE = 8
"""One in this many of a segment's entries is evicted at a time, the oldest ones."""
_SPARE_BITS = 6
"""How many more upper bits the keys of one segment may share than if all segments were split alike. Real hashes are spread
evenly, forged ones may not be; each further bit doubles the directory."""
_AT_ONCE = 1024
"""Maximum keys stored in one sweep."""


class BlockTable:
    """At most `limit` entries, evicted least recently used first within one segment after the other.

    `on_evict` gets the values of evicted entries. `few`: up to this many keys are handled one by one.
    """

    def __init__(self, limit: int, on_evict: Callable[[Values], None], few: int) -> None:
        self.limit = limit
        self._few = few
        self._on_evict = on_evict
        self._most_segments = 1 + int(limit / _EMPTIEST) // SEGMENT
        self._most_bits = self._most_segments.bit_length() + _SPARE_BITS
        slots = self._most_segments * SEGMENT
        self.keys: KeyArray = np.zeros(slots, np.uint64)
        self.values: Values = np.zeros(slots, np.uint32)
        self.stamps: Values = np.zeros(slots, np.uint32)
        self._room = np.zeros(self._most_segments, np.int64)
        """For each segment: how many more keys it takes."""
        # The same memory for access to single entries, where NumPy is slow.
        self.key_at, self.value_at, self.stamp_at, self._room_at = (
            array.data for array in (self.keys, self.values, self.stamps, self._room)
        )
        self._begin()

    def clear(self) -> None:
        """Remove everything. Only used segments are written; new arrays would have to be written as a whole."""
        used = slice(0, self.segments << _BITS)
        self.keys[used] = 0
        self.values[used] = 0
        self._room[: self.segments] = 0
        self._begin()

    def _begin(self) -> None:
        self.live = 0
        """Entries with a value."""
        self.segments = 1
        """Number of segments in use, which are the first ones."""
        self._shift = 63
        self._directory: Places = np.zeros(2, np.intp)
        """First slot of each key's segment, by the key's upper bits."""
        self._begin_at = self._directory.data
        self._prefixes = [(0, 0)]
        """For each segment: how many upper bits its keys share, and the value of these bits."""
        self._hand = 0
        """The segment from which entries are evicted next."""
        self._room_at[0] = _full(0)

    # -- looking up

    def look(self, key: int, stamp: int | None) -> int:
        """The value of `key`, 0 if it is missing; sets its stamp unless `stamp` is None."""
        at, key_at = self._begin_at[key >> self._shift] | key & _INSIDE, self.key_at
        while (found := key_at[at]) != key:
            if not found:
                return 0
            at = at & ~_INSIDE | at + 1 & _INSIDE
        if stamp is not None:
            self.stamp_at[at] = stamp
        return self.value_at[at]

    def place(self, key: int) -> int:
        """The slot where `key` is, or would be."""
        at, key_at = self._begin_at[key >> self._shift] | key & _INSIDE, self.key_at
        while (found := key_at[at]) and found != key:
            at = at & ~_INSIDE | at + 1 & _INSIDE
        return at

    def places(self, keys: KeyArray) -> Places:
        """The slot where each of `keys` is, or would be if it were stored alone."""
        table = self.keys
        at: Places = self._directory[keys >> np.uint64(self._shift)]
        at |= (keys & np.uint64(_INSIDE)).astype(np.intp)
        found = table[at]
        left = np.flatnonzero((found != keys) & (found != 0))
        while left.size:
            moved = at[left] = _next(at[left])
            found = table[moved]
            left = left[(found != keys[left]) & (found != 0)]
        return at

    def find(self, keys: KeyArray, stamp: int | None) -> Values:
        """The value of each of `keys`, 0 if missing; sets their stamps unless `stamp` is None."""
        at = self.places(keys)
        if stamp is not None:
            self.stamps[at] = stamp
        return self.values[at]

    # -- changing

    def put(self, keys: KeyArray, becomes: Becomes, stamp: int) -> int:
        """Replace the value of each key by `becomes(value)`, which must not be 0. Returns how many values changed."""
        if len(keys) <= self._few:
            return self._put_few(keys.tolist(), becomes, stamp)
        distinct, news = _distinct(keys), 0
        for start in range(0, len(distinct), step := min(_AT_ONCE, self.limit)):
            at = self._claim(distinct[start : start + step])
            self.stamps[at] = stamp
            news += self._replace(at, becomes)
        return news

    def cut(self, keys: KeyArray, becomes: Becomes) -> int:
        """Replace the values of present keys; a new value of 0 removes the key. Returns how many values changed."""
        if len(keys) <= self._few:
            return self._cut_few(keys.tolist(), becomes)
        at = self.places(keys)
        return self._replace(_distinct(at[self.values[at] != 0]), becomes)

    def _cut_few(self, keys: list[int], becomes: Becomes) -> int:
        """`cut` one by one."""
        next_of: dict[int, int] = {}
        changed = 0
        value_at = self.value_at
        for key in keys:
            at = self.place(key)
            if not (old := value_at[at]):
                continue
            new = next_of.get(old)
            if new is None:
                new = next_of[old] = becomes(old)
            if new != old:
                value_at[at] = new
                changed += 1
                self.live -= not new
        return changed

    def _put_few(self, keys: list[int], becomes: Becomes, stamp: int) -> int:
        """`put` one by one."""
        next_of: dict[int, int] = {}
        news = 0
        key_at, value_at, stamp_at, room_at = self.key_at, self.value_at, self.stamp_at, self._room_at
        for key in keys:
            at = self._begin_at[key >> self._shift] | key & _INSIDE  # `place`, without a call
            while (found := key_at[at]) and found != key:
                at = at & ~_INSIDE | at + 1 & _INSIDE
            old = value_at[at]
            new = next_of.get(old)
            if new is None:
                new = next_of[old] = becomes(old)
            if not old:
                if self.live >= self.limit:
                    self._evict(1)
                if not found:
                    if room_at[at >> _BITS] <= 0:
                        self._renew(at >> _BITS, 1)
                        at = self.place(key)
                    key_at[at] = key
                    room_at[at >> _BITS] -= 1
                self.live += 1
            stamp_at[at] = stamp
            if new != old:
                value_at[at] = new
                news += 1
        return news

    def _replace(self, at: Places, becomes: Becomes) -> int:
        before = self.values[at]
        first = int(before[0]) if before.size else 0
        if (before == first).all():  # usual: a new prompt, or one that a single node has
            after = becomes(first) if before.size else 0
            self.values[at] = after
            self.live += at.size * ((after > 0) - (first > 0))
            return at.size * (after != first)
        old, inverse = np.unique(before, return_inverse=True)
        new = np.array([becomes(value) for value in old.tolist()], np.uint32)
        self.values[at] = new[inverse]
        self.live += int(np.count_nonzero(new[inverse])) - int(np.count_nonzero(old[inverse]))
        return int(np.count_nonzero((old != new)[inverse]))

    def _claim(self, keys: KeyArray) -> Places:
        """The slot of each of the distinct `keys`, after adding missing ones with value 0."""
        if self.live + len(keys) > self.limit:
            self._evict(len(keys))
        while True:
            at = self.places(keys)
            segments = at[self.keys[at] == 0] >> _BITS
            np.subtract.at(self._room, segments, 1)
            short = self._room[segments] < 0
            if not short.any():
                return self._occupy(keys, at)
            np.add.at(self._room, segments, 1)
            for segment, needed in zip(*np.unique(segments[short], return_counts=True), strict=True):
                self._renew(int(segment), int(needed))

    def _occupy(self, keys: KeyArray, at: Places) -> Places:
        """Write distinct keys into the slots `at` or, after a collision, into the next free ones. Returns their slots."""
        table = self.keys
        left = np.flatnonzero(table[at] == 0)
        while left.size:
            wanted = at[left]
            free = table[wanted] == 0
            table[wanted[free]] = keys[left[free]]
            left = left[table[wanted] != keys[left]]
            at[left] = _next(at[left])
        return at

    # -- room

    def _renew(self, segment: int, count: int) -> None:
        """Make room for `count` more keys, at most `_AT_ONCE`, in a segment: clear removed entries, split it, or evict."""
        begin = segment << _BITS
        here = slice(begin, begin + SEGMENT)
        taken = begin + np.flatnonzero(self.values[here])
        if taken.size + count > _SPLIT * _full(segment):
            if self.segments < self._most_segments and self._prefixes[segment][0] < self._most_bits:
                self._split(segment)
            else:
                self._drop_oldest(taken, int(taken.size + count - _SPLIT * _full(segment)) + 1)
                taken = taken[self.values[taken] != 0]
        keys, values, stamps = self.keys[taken], self.values[taken], self.stamps[taken]
        self.keys[here] = 0
        self.values[here] = 0
        at = self._directory[keys >> np.uint64(self._shift)] | (keys & np.uint64(_INSIDE)).astype(np.intp)
        at = self._occupy(keys, at)
        self.values[at], self.stamps[at] = values, stamps
        for one in {segment, *(at >> _BITS).tolist()}:
            taken = int(np.count_nonzero(self.keys[one << _BITS : (one + 1) << _BITS]))
            self._room_at[one] = _full(one) - taken

    def _split(self, segment: int) -> None:
        """Add a segment for half of this one's keys. The keys themselves are not moved yet."""
        new, (bits, prefix) = self.segments, self._prefixes[segment]
        self.segments += 1
        self._room_at[new] = _full(new)
        self._prefixes[segment] = bits + 1, 2 * prefix
        self._prefixes.append((bits + 1, 2 * prefix + 1))
        if bits == 64 - self._shift:
            self._directory = np.repeat(self._directory, 2)
            self._begin_at = self._directory.data
            self._shift -= 1
        spare = 64 - self._shift - bits - 1
        self._directory[(2 * prefix + 1) << spare : (2 * prefix + 2) << spare] = new << _BITS

    def _evict(self, count: int) -> None:
        """Evict until at least `count` more entries fit below `limit`."""
        while (excess := self.live + count - self.limit) > 0:
            begin = self._hand << _BITS
            self._hand = (self._hand + 1) % self.segments
            taken = begin + np.flatnonzero(self.values[begin : begin + SEGMENT])
            self._drop_oldest(taken, max(len(taken) // _EVICTED_AT_ONCE, -(-excess // self.segments)))

    def _drop_oldest(self, taken: Places, count: int) -> None:
        if count < taken.size:
            taken = taken[np.argpartition(self.stamps[taken], count)[:count]]
        gone = self.values[taken]
        self.values[taken] = 0
        self.live -= gone.size
        self._on_evict(gone)

    def halve_stamps(self) -> None:
        """Halve all stamps before they overflow; their order is kept."""
        self.stamps[: self.segments << _BITS] >>= 1

    def renumber(self, numbers: Values, here: slice) -> None:
        """Replace every value v of these slots by numbers[v]."""
        old = self.values[here]
        self.live -= int(np.count_nonzero(old))
        self.values[here] = numbers[old]
        self.live += int(np.count_nonzero(self.values[here]))


def _full(segment: int) -> int:
    """How many keys fill a segment. The number differs between segments, so that they are not all split at once."""
    return int(SEGMENT * (_LEAST_FULL + _FULL_SPREAD * (segment * 0.6180339887 % 1)))


def _distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The distinct values, sorted. `np.unique` would import much at its first call, in the middle of serving."""
    ordered = np.sort(values)
    doubled = ordered[1:] == ordered[:-1]
    return ordered[np.append(True, ~doubled)] if doubled.any() else ordered


def _next(at: Places) -> Places:
    """The next slot after each of these, within its segment."""
    return at & ~_INSIDE | at + 1 & _INSIDE
