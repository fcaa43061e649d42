"""The prefix index's answer to a query: how many leading blocks of a prompt each incarnation holds. Pure.

Stored as one set of index slots per depth: a thousand nodes that hold a system prompt are one entry. A query for a few
nodes looks into these sets; for a whole fleet they are expanded to one number per slot, without a Python step per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Depths = npt.NDArray[np.float64]


class PrefixHits(Mapping[str, int]):
    """Number of leading blocks by incarnation, for those that hold the first block. Invariant: never changes."""

    def __init__(self, slots: Mapping[str, int], size: int, found: Sequence[tuple[int, int]]) -> None:
        """`slots`: each incarnation's slot, below `size`; never changed. `found`: (mask of slots, their depth), disjoint masks."""
        self.slots = slots
        self._size = size
        self._found = found
        self._depths: Depths | None = None
        """Depth by slot, computed by the first call of `column`; the last element is 0."""

    def column(self, places: npt.NDArray[np.intp]) -> Depths:
        """The depths at these places; place -1 stands for an incarnation that the index does not know."""
        if self._depths is None:
            self._depths = self._spread()
        return self._depths[places]

    def _spread(self) -> Depths:
        depths = np.zeros(self._size + 1)
        width = self._size // 8 + 1
        for mask, depth in self._found:
            if mask.bit_count() == 1:
                depths[mask.bit_length() - 1] = depth
                continue
            packed = np.frombuffer(mask.to_bytes(width, "little"), np.uint8)
            depths[np.unpackbits(packed, count=self._size + 1, bitorder="little").view(np.bool_)] = depth
        return depths

    def places(self, incarnations: Iterable[str]) -> npt.NDArray[np.intp]:
        """The argument of `column` for these incarnations, valid as long as `slots` is the same object."""
        return np.array([self.slots.get(incarnation, -1) for incarnation in incarnations], np.intp)

    def without(self, incarnations: Iterable[str]) -> PrefixHits:
        """A copy in which these incarnations hold nothing."""
        kept = ~sum(1 << self.slots[incarnation] for incarnation in set(incarnations) & self.slots.keys())
        return PrefixHits(self.slots, self._size, [(mask & kept, depth) for mask, depth in self._found if mask & kept])

    def __getitem__(self, incarnation: str) -> int:
        depth = self.get(incarnation)
        if depth is None:
            raise KeyError(incarnation)
        return depth

    def get(self, incarnation: str, default: Any = None) -> Any:
        """The depth, or `default`. `Mapping.get` would raise and catch KeyError: most nodes hold nothing of most prompts."""
        if not self._found or (slot := self.slots.get(incarnation)) is None:
            return default
        if self._depths is not None:
            return int(self._depths.item(slot)) or default
        for mask, depth in self._found:
            if mask >> slot & 1:
                return depth
        return default

    def __iter__(self) -> Iterator[str]:
        return (incarnation for incarnation in self.slots if self.get(incarnation))

    def __len__(self) -> int:
        return sum(mask.bit_count() for mask, _ in self._found)
