"""What the prefix index answers: how many leading blocks of a prompt each incarnation holds. Pure.

Kept as one number a slot of the index, so that a fleet of a thousand nodes is looked at without a Python step per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Depths = npt.NDArray[np.float64]


class Hits(Mapping[str, int]):
    """By incarnation, of those that hold the first block. Invariant: never changes."""

    def __init__(self, slots: Mapping[str, int], depths: Depths) -> None:
        """`slots`: each incarnation's place in `depths`, shared and never changed; `depths` ends with a 0."""
        self.slots = slots
        self._depths = depths

    @classmethod
    def of_masks(cls, slots: Mapping[str, int], size: int, found: Sequence[tuple[int, int]]) -> Hits:
        """From (mask of slots below `size`, their depth), each slot in one at most."""
        depths = np.zeros(size + 1)
        width = size // 8 + 1
        for mask, depth in found:
            if mask.bit_count() == 1:
                depths[mask.bit_length() - 1] = depth
                continue
            packed = np.frombuffer(mask.to_bytes(width, "little"), np.uint8)
            depths[np.unpackbits(packed, count=size + 1, bitorder="little").view(np.bool_)] = depth
        return cls(slots, depths)

    def column(self, places: npt.NDArray[np.intp]) -> Depths:
        """The depths at these places; -1 is that of an incarnation that the index does not know."""
        return self._depths[places]

    def places(self, incarnations: Iterable[str]) -> npt.NDArray[np.intp]:
        """What `column` takes for these incarnations, as long as `slots` is the same object."""
        return np.array([self.slots.get(incarnation, -1) for incarnation in incarnations], np.intp)

    def without(self, incarnations: Iterable[str]) -> Hits:
        """The same, with nothing held by these."""
        depths = self._depths.copy()
        depths[self.places(incarnations)] = 0.0
        return Hits(self.slots, depths)

    def __getitem__(self, incarnation: str) -> int:
        depth = int(self._depths[self.slots[incarnation]])
        if not depth:
            raise KeyError(incarnation)
        return depth

    def get(self, incarnation: str, default: Any = None) -> Any:
        """As any mapping's, without the exception: most requests ask for what is not held."""
        slot = self.slots.get(incarnation)
        return default if slot is None else int(self._depths.item(slot)) or default

    def __iter__(self) -> Iterator[str]:
        return (incarnation for incarnation, slot in self.slots.items() if self._depths[slot])

    def __len__(self) -> int:
        return int(np.count_nonzero(self._depths))
