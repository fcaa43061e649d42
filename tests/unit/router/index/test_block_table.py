"""The hash table under the prefix index."""

from __future__ import annotations

import random

import numpy as np
import pytest

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


@pytest.mark.parametrize("few", [0, 10_000])
def test_keys_chosen_to_share_their_upper_bits_make_room_among_themselves(few: int) -> None:
    """Each bit that they share doubled the directory: 3,000 keys with 27 such bits took 3.4 GB."""
    table = BlockTable(20 * SEGMENT, lambda _: None, few=few)
    others = _keys(SEGMENT, 1)
    table.put(others, lambda _: 7, stamp=1)
    chosen = np.arange(1, 3 * SEGMENT, dtype=np.uint64) | np.uint64(0x123456789A << 24)
    for start in range(0, len(chosen), 500):
        table.put(chosen[start : start + 500], lambda _: 7, stamp=2 + start)
    assert len(table._directory) <= 64 * 2 * table._most_segments
    assert (table.find(chosen[-500:], None) == 7).all()
    assert (table.find(others, None) == 7).mean() > 0.99
    assert table.live == np.count_nonzero(table.values)
