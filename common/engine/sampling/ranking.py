"""Sorting the highest entries of a row on the host."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def ranked(row: NDArray[np.float32], cut: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Ids of all entries >= cut, highest first, ties by lower id; and exp of each."""
    ids = np.flatnonzero(row >= cut)
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], np.exp(values[order].astype(np.float64))
