"""The nucleus of a large vocabulary, flat or peaked, against sorting everything."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.engine.sampling.steps.top_p import _nucleus  # pyright: ignore[reportPrivateUsage]

VOCAB = 40_000


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.95, 0.9999])
def test_the_nucleus_is_the_leading_part_of_all_sorted(spread: float, top_p: float) -> None:
    values = np.random.default_rng(int(spread * 100)).normal(0, spread, VOCAB).astype(np.float32)
    values[: VOCAB // 4] = -np.inf
    scaled = values - values.max()
    found = _nucleus(scaled, top_p, -math.inf)
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order].astype(np.float64))
    ends = np.searchsorted(np.cumsum(weights), top_p * weights.sum() + np.array([-1e-3, 1e-3]))
    least, most = (set(order[scaled[order] >= scaled[order[min(end, VOCAB - 1)]]].tolist()) for end in ends)
    assert least <= set(found.tolist()) <= most
    assert len(set(found.tolist())) == found.size


def test_a_top_p_just_below_1_leaves_a_nucleus_where_two_sums_differ_in_the_last_bit() -> None:
    values = np.random.default_rng(1761).normal(0, 2.9, 5000).astype(np.float32)
    assert _nucleus(values - values.max(), math.nextafter(1.0, 0.0), -math.inf).size == 5000
