"""A hash table from 64-bit keys to small numbers, in NumPy arrays: 16 bytes a slot, many keys looked up at once.

Pure; owned by `router.index`. Look-ups of a long prompt hit memory that no cache holds: done in one sweep their waits
overlap, which a dict's cannot. Few keys are handled one by one, which is quicker then.

Open addressing with linear probing. Key 0 means an empty slot; a key whose value is 0 was removed and keeps its slot
until the next rebuild. Every entry carries the stamp of its last use.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[np.uint32]
Places = npt.NDArray[np.intp]

_FIRST_CAPACITY = 256
_FULLEST = 0.4
"""Share of the slots that may have a key."""
_EVICTED_AT_ONCE = 8
"""Of a table that is full, the oldest of so many entries goes."""


class BlockTable:
    """At most `limit` entries; the ones that were not used for longest go first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.live = 0
        """Entries with a value."""
        self.room = 0
        """So many keys may be claimed before `make_room` must be called; removals do not count."""
        self._taken = 0
        """Slots with a key."""
        self._allocate(_FIRST_CAPACITY)

    def _allocate(self, capacity: int) -> None:
        self.keys: Keys = np.zeros(capacity, np.uint64)
        self.values: Values = np.zeros(capacity, np.uint32)
        self.stamps: Values = np.zeros(capacity, np.uint32)
        self._mask = capacity - 1
        # The same memory for access one by one, where NumPy is slow.
        self.key_at, self.value_at, self.stamp_at = (a.data for a in (self.keys, self.values, self.stamps))

    # -- one by one

    def place(self, key: int) -> int:
        """Where `key` is, or would be."""
        at, mask, key_at = key & self._mask, self._mask, self.key_at
        while (found := key_at[at]) and found != key:
            at = (at + 1) & mask
        return at

    def claim(self, at: int, key: int) -> None:
        """Give `key`, which has no value, its place `at`; the caller sets the value. Needs `room`."""
        if not self.key_at[at]:
            self.key_at[at] = key
            self._taken += 1
        self.live += 1
        self.room -= 1

    # -- many at once

    def places(self, keys: Keys) -> Places:
        """Where each of `keys` is, or would be alone."""
        mask, table = self._mask, self.keys
        at = (keys & np.uint64(mask)).astype(np.intp)
        found = table[at]
        left = np.flatnonzero((found != keys) & (found != 0))
        while left.size:
            moved = at[left] = (at[left] + 1) & mask
            found = table[moved]
            left = left[(found != keys[left]) & (found != 0)]
        return at

    def claim_all(self, keys: Keys) -> Places:
        """Where each of the distinct `keys` is now, as `claim`."""
        at, mask, table = self.places(keys), self._mask, self.keys
        left = np.flatnonzero(table[at] == 0)
        self._taken += left.size
        while left.size:
            wanted = at[left]
            free = table[wanted] == 0
            table[wanted[free]] = keys[left[free]]
            left = left[table[wanted] != keys[left]]
            at[left] = (at[left] + 1) & mask
        return at

    # -- room

    def make_room(self, count: int) -> Values | None:
        """Have room for `count` more keys. Returns the values of the entries that had to go."""
        evicted: Values | None = None
        if self.live + count > self.limit:
            evicted = self._evict(max(count, self.limit // _EVICTED_AT_ONCE))
        if self._taken + count > self._mask * _FULLEST:
            capacity = _FIRST_CAPACITY
            while (self.live + count) * 1.1 > capacity * _FULLEST:
                capacity *= 2
            self._rebuild(max(capacity, (self._mask + 1) // 2))
        self.measure()
        return evicted

    def measure(self) -> None:
        """Find `room` anew."""
        self.room = min(self.limit - self.live, int(self._mask * _FULLEST) - self._taken)

    def _evict(self, count: int) -> Values:
        held = np.flatnonzero(self.values)
        count = min(count, held.size)
        oldest = held[np.argpartition(self.stamps[held], count - 1)[:count]] if count else held
        gone = self.values[oldest]
        self.values[oldest] = 0
        self.live -= count
        return gone

    def _rebuild(self, capacity: int) -> None:
        held = np.flatnonzero(self.values)
        keys, values, stamps = self.keys[held], self.values[held], self.stamps[held]
        self._allocate(capacity)
        self._taken = 0
        at = self.claim_all(keys)
        self.values[at], self.stamps[at] = values, stamps

    def halve_stamps(self) -> None:
        """Make room for later ones; what was used before stays before."""
        self.stamps >>= 1

    def renumber(self, numbers: Values) -> None:
        """Replace every value v by numbers[v]."""
        self.values[:] = numbers[self.values]
        self.live = int(np.count_nonzero(self.values))
