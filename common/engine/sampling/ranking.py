"""Sorting the highest entries of a row on the host."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_STRIDED = 128
"""Entries, at equal distances, whose maximum is taken first."""


def ranked(row: NDArray[np.float32], cut: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of all entries >= cut, highest first, ties by lower id; and exp of each."""
    ids = np.flatnonzero(row >= cut)
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], np.exp(values[order].astype(np.float64))


def most_likely(row: NDArray[np.float32], count: int) -> list[int]:
    """Ids of the `count` highest entries, or of all, highest first, ties by lower id."""
    if count == 0:
        return []
    distance, cut = row.size // _STRIDED, -math.inf
    if count <= distance:  # as many entries as this are at least the count-th highest of these maxima
        maxima = row[: distance * _STRIDED].reshape(_STRIDED, distance).max(0)
        cut = float(np.partition(maxima, distance - count)[distance - count])
    ids, _ = ranked(row, cut)
    return ids[:count].tolist()
