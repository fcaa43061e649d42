"""log(sum(exp(x - max))) over rows of a vocabulary on the host. Runs on a rank's engine thread."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.kernels.native.library import NativeLibrary

_Rows = NDArray[np.float32]
LogSumExp = Callable[[_Rows, list[int], list[float]], list[float]]
"""(rows [n, vocab], indices of m rows, their maxima) -> m sums."""

_PART = 2**14
"""Entries that are exponentiated at once, so that temporaries stay in cache."""


def log_sum_exp(rows: _Rows, indices: list[int], highest: list[float]) -> list[float]:
    """By NumPy."""
    return [_of_row(rows[index], top) for index, top in zip(indices, highest, strict=True)]


def choose_log_sum_exp(native: NativeLibrary | None) -> LogSumExp:
    """By the native kernels, on all of their threads, if there are any."""
    if native is None:
        return log_sum_exp

    def call(rows: _Rows, indices: list[int], highest: list[float]) -> list[float]:
        rows = np.ascontiguousarray(rows)
        numbers, maxima = np.array(indices, np.int32), np.array(highest, np.float32)
        out = np.empty(len(indices))
        data, count, vocab = rows.ctypes.data, len(indices), rows.shape[1]
        native.log_sum_exp(
            native.team, data, vocab, vocab, numbers.ctypes.data, count, maxima.ctypes.data, out.ctypes.data
        )
        return out.tolist()

    return call


def _of_row(row: _Rows, top: float) -> float:
    total = 0.0
    for start in range(0, row.size, _PART):
        part = row[start : start + _PART] - np.float32(top)
        total += float(np.exp(part, out=part).sum())
    return math.log(total)
