"""log(sum(exp(x - max))) by NumPy and by every variant of the native kernels, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from support.native_variants import VARIANTS, native

from common.engine.sampling.log_sum_exp import choose_log_sum_exp

ROWS = [0, 3, 4]


@pytest.mark.parametrize("variant", [None, *VARIANTS])
@pytest.mark.parametrize("vocab", [1, 31, 1024, 2050, 152_064])
def test_sums_of_some_rows_equal_float64(variant: str | None, vocab: int):
    sums = choose_log_sum_exp(None if variant is None else native(variant))
    rows = np.random.default_rng(vocab).normal(0, 5, (6, vocab)).astype(np.float32)
    rows[3, : vocab // 2] = -np.inf
    highest = rows[ROWS].max(1).tolist()
    wide = rows[ROWS].astype(np.float64)
    expected = np.log(np.exp(wide - wide.max(1, keepdims=True)).sum(1))
    assert sums(rows, ROWS, highest) == pytest.approx(expected.tolist(), abs=2e-6)
