"""Sorting the highest entries of a row on the host."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from common.kernels.native.library import MAXIMA_OF

_WITHIN = np.arange(MAXIMA_OF)


def ranked(row: NDArray[np.float32], cut: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of all entries >= cut, highest first, ties by lower id; and exp of each."""
    ids = np.flatnonzero(row >= cut)
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], np.exp(values[order].astype(np.float64))


def most_likely(row: NDArray[np.float32], maxima: NDArray[np.float32], count: int) -> list[int]:
    """Ids of the `count` highest entries, or of all, highest first, ties by lower id. maxima:
    [vocab // MAXIMA_OF], the highest of each `MAXIMA_OF` entries."""
    if count == 0:
        return []
    if count > maxima.size:
        return ranked(row, -math.inf)[0][:count].tolist()
    # As many entries as this are at least the count-th highest of the maxima.
    cut = np.partition(maxima, maxima.size - count)[maxima.size - count]
    parts = np.flatnonzero(maxima >= cut)
    whole = maxima.size * MAXIMA_OF
    ids = (parts[:, None] * MAXIMA_OF + _WITHIN).ravel()
    ids = np.concatenate([ids, np.arange(whole, row.size)])
    ids = ids[row[ids] >= cut]
    return ids[np.argsort(-row[ids], kind="stable")[:count]].tolist()
