"""Passes over whole rows of a vocabulary on the host: masks, sums for log-probabilities, and draws from all tokens.

NumPy computes them, or the native kernels, whose sums and draws use all of their threads. Runs on a rank's engine thread.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.engine.sampling.gumbel import NoiseKey, gumbel_argmax
from common.kernels.native.library import MAXIMA_OF, DrawStruct, NativeLibrary

Row = NDArray[np.float32]
_PART = 2**14
"""Entries that are exponentiated at once, so that temporaries stay in cache."""
_ADDED = np.array([-np.inf, 0], np.float32)
"""What a mask adds to a logit: -inf where the token's bit is 0, nothing where it is 1."""


class Sum(NamedTuple):
    """log(sum(exp(x - max))) of a row, and the row's highest entries."""

    value: float
    maxima: Row
    """[vocab // MAXIMA_OF], the highest of each `MAXIMA_OF` entries."""


@dataclass
class Draw:
    """A token to be drawn from a whole row, with weights e^((logits - top) / temperature)."""

    logits: Row
    """[vocab], contiguous; `top` is the highest."""
    top: float
    temperature: float
    key: NoiseKey


class RowPasses:
    """Passes over rows, here in NumPy. The result of a row does not depend on the rows that are passed with it."""

    def mask(self, row: Row, mask: bytes, out: Row) -> None:
        """Copy `row` to `out` with -inf for every token that `mask` does not allow; both are [vocab] and contiguous.

        mask: one bit for each token, 1 if it is allowed, the lowest bit of a byte first; tokens past its end are not allowed.
        """
        allowed = np.unpackbits(np.frombuffer(mask or b"\0", np.uint8), count=row.size, bitorder="little")
        # Without a branch for each token, which a mask of every second one would make slow.
        np.add(row, _ADDED.take(allowed), out=out)

    def sums(self, rows: NDArray[np.float32], indices: list[int], highest: list[float]) -> list[Sum]:
        """rows: [n, vocab], contiguous; indices, highest: of m rows, and their maxima. Returns m sums."""
        whole = rows.shape[1] // MAXIMA_OF * MAXIMA_OF
        return [
            Sum(_sum(rows[index], top), rows[index, :whole].reshape(-1, MAXIMA_OF).max(1))
            for index, top in zip(indices, highest, strict=True)
        ]

    def draw(self, draws: list[Draw]) -> list[int]:
        """Tokens of rows of the same vocabulary."""
        return [
            gumbel_argmax(np.exp((each.logits - np.float32(each.top)) / np.float32(each.temperature)), each.key)
            for each in draws
        ]


class NativePasses(RowPasses):
    """Row passes in the native kernels."""

    def __init__(self, native: NativeLibrary) -> None:
        self._native = native

    def mask(self, row: Row, mask: bytes, out: Row) -> None:
        native = self._native
        native.mask(native.team, row.ctypes.data, row.size, mask, len(mask), out.ctypes.data)

    def sums(self, rows: NDArray[np.float32], indices: list[int], highest: list[float]) -> list[Sum]:
        if not indices:
            return []
        numbers, tops = np.array(indices, np.int32), np.array(highest, np.float32)
        count, vocab, native = len(indices), rows.shape[1], self._native
        values, maxima = np.empty(count), np.empty((count, vocab // MAXIMA_OF), np.float32)
        native.log_sum_exp(
            native.team,
            rows.ctypes.data,
            vocab,
            numbers.ctypes.data,
            count,
            tops.ctypes.data,
            values.ctypes.data,
            maxima.ctypes.data,
        )
        return list(map(Sum, values.tolist(), maxima))

    def draw(self, draws: list[Draw]) -> list[int]:
        if not draws:
            return []
        structs = (DrawStruct * len(draws))(
            *((each.logits.ctypes.data, each.top, each.temperature, each.key) for each in draws)
        )
        tokens = np.empty(len(draws), np.int32)
        native, size = self._native, draws[0].logits.size
        native.draw_tokens(native.team, ctypes.addressof(structs), len(draws), size, tokens.ctypes.data)
        return tokens.tolist()


def _sum(row: Row, top: float) -> float:
    total = 0.0
    for start in range(0, row.size, _PART):
        part = row[start : start + _PART] - np.float32(top)
        total += float(np.exp(part, out=part).sum())
    return math.log(total)
