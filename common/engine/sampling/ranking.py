"""Sorting the highest entries of a row on the host."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_BLOCK = 256
"""Entries whose maximum is taken at once."""


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
    blocks, cut = row.size // _BLOCK, -math.inf
    if count <= blocks:  # as many entries as this are at least the count-th highest of the blocks' maxima
        maxima = row[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(1)
        cut = float(np.partition(maxima, blocks - count)[blocks - count])
    ids, _ = ranked(row, cut)
    return ids[:count].tolist()
