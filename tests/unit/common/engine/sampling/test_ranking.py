"""The most likely entries of a row."""

from __future__ import annotations

import numpy as np
import pytest

from common.engine.sampling.ranking import most_likely
from common.kernels.native.library import MAXIMA_OF


@pytest.mark.parametrize("size", [1, 5, 255, 256, 1000, 20_001])
@pytest.mark.parametrize("coarse", [False, True])
def test_the_highest_come_first_and_ties_by_id(size: int, coarse: bool) -> None:
    draw = np.random.default_rng(size)
    for count in (0, 1, 2, 20, 300):
        row = draw.normal(size=size).astype(np.float32)
        row = row.round() if coarse else row
        maxima = row[: size // MAXIMA_OF * MAXIMA_OF].reshape(-1, MAXIMA_OF).max(1, initial=-np.inf)
        assert most_likely(row, maxima, count) == np.argsort(-row, kind="stable")[:count].tolist()
