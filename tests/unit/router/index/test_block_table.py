"""The hash table under the prefix index."""

from __future__ import annotations

import random

import numpy as np

from router.index.block_table import SEGMENT, BlockTable


def _keys(count: int, seed: int) -> np.ndarray:
    rng = random.Random(seed)
    return np.array(list({rng.randrange(1, 2**64) for _ in range(count)}), np.uint64)


def test_a_cleared_table_has_nothing_and_takes_everything_again_in_the_same_memory():
    table = BlockTable(20 * SEGMENT, lambda _: None, few=8)
    memory = table.keys
    for seed in range(3):
        keys = _keys(4 * SEGMENT, seed)
        assert table.put(keys, lambda _: 7, stamp=1) == len(keys)
        assert table.segments > 4
        assert table.live == len(keys)
        assert (table.find(keys, None) == 7).all()
        table.clear()
        assert table.live == 0
        assert table.keys is memory
        assert not table.find(keys, None).any()
        assert not table.keys.any()
        assert table.put(keys[:5], lambda _: 3, stamp=1) == 5
        table.clear()
