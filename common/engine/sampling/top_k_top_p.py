"""The thresholds of top_k and top_p, on a device and for whole batches at once.

The shapes of all tensor operations are known to the host, so that it never waits. Nothing is sorted: a threshold is found by
bisection of the range of float32, or by flashinfer's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_TINY = 1e-300


class Thresholds:
    """Finds the value of each row above which a count or a mass is reached. x: [r, vocab] float32, each row's maximum 0.

    This class bisects: 32 passes over the rows, exact.
    """

    def of_count(self, x: Tensor, count: Tensor) -> Tensor:
        """The `count`-th highest of each row, [r, 1]. count: [r, 1] int64, 1 ... vocab."""
        return _highest(x, lambda t: (x >= t).sum(-1, keepdim=True) >= count)

    def of_mass(self, x: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
        """The highest value, [r, 1], for which the values at least as high weigh more than `mass`: [r, 1] float64.

        `mass` is less than the weight of the whole row. weights: [r, vocab] float32, exp(x).
        """
        return _highest(
            x, lambda t: torch.where(x >= t, weights, 0.0).sum(-1, keepdim=True, dtype=torch.float64) > mass
        )


class FlashInferThresholds(Thresholds):
    """Thresholds by flashinfer's kernels for top-k and top-p, in float32. flashinfer: the imported package."""

    def __init__(self, flashinfer: Any) -> None:
        self._sampling = flashinfer.sampling

    def of_count(self, x: Tensor, count: Tensor) -> Tensor:
        kept = self._sampling.top_k_renorm_probs(x.softmax(-1), count.flatten().int())
        return _lowest(x, kept > 0)

    def of_mass(self, x: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
        part = (mass / total).float().clamp_(1e-7, 1.0)
        kept = self._sampling.top_p_renorm_probs(weights / total.float(), part.flatten().contiguous()) > 0
        return _lowest(x, kept | ((part >= 1.0) & (weights > 0)))


def nucleus_edge(x: Tensor, top_p: Tensor, thresholds: Thresholds) -> Tensor:
    """The lowest value, [r, 1], in the shortest leading part of each row that holds `top_p` of its mass.

    x: [r, vocab] float32, each row's maximum 0, -inf: not to be drawn; top_p: [r, 1] float64.
    """
    weights = x.exp()
    # The last value of the nucleus is the first at which *less* than `needed` lies above.
    needed = (top_p * weights.sum(-1, keepdim=True, dtype=torch.float64)).clamp_(min=_TINY)
    return thresholds.of_mass(x, weights, torch.nextafter(needed, torch.zeros_like(needed)))


def ordered(x: Tensor) -> Tensor:
    """int32 numbers that sort as the float32 numbers `x` do; -0 equals 0."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _highest(x: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """The highest float32 t, [r, 1], for which `holds(t)`. It must hold for -inf, and for all values below one that holds."""
    num_rows = x.size(0)
    low = torch.full((num_rows, 1), -torch.inf, device=x.device)
    low, high = ordered(low).long(), torch.ones(num_rows, 1, dtype=torch.int64, device=x.device)
    for _ in range(32):
        middle = (low + high) >> 1
        keys = middle.int()
        found = holds((keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32))
        low, high = torch.where(found, middle, low), torch.where(found, high, middle)
    keys = low.int()
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _lowest(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x, torch.inf).amin(-1, keepdim=True)
