"""The most likely entries of a row."""

from __future__ import annotations

import numpy as np
import pytest

from common.engine.sampling.ranking import most_likely


@pytest.mark.parametrize("size", [1, 5, 255, 256, 1000, 20_001])
@pytest.mark.parametrize("coarse", [False, True])
def test_the_highest_come_first_and_ties_by_id(size: int, coarse: bool) -> None:
    draw = np.random.default_rng(size)
    for count in (0, 1, 2, 20, 300):
        row = draw.normal(size=size).astype(np.float32)
        row = row.round() if coarse else row
        assert most_likely(row, count) == np.argsort(-row, kind="stable")[:count].tolist()
