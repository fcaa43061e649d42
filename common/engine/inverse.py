"""Tokens from uniform numbers on a device, whole batches at once: the inverse of each row's cumulative distribution.

The counterpart of `common.engine.sampler`, in tensor operations whose shapes depend on nothing that only the device
knows, so that the host never waits. Nothing is sorted: the token at some rank is the one at the threshold above which
the wanted mass lies, and a threshold is found by halving the range of float32, or by flashinfer's kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_CDF_BLOCK = 512
_TINY = 1e-300


class Thresholds(Protocol):
    """Values of a row at which something is reached from above. x: [r, vocab] float32, at most 0 and 0 somewhere."""

    def of_count(self, x: Tensor, count: Tensor) -> Tensor:
        """The `count`-th highest of each row, [r, 1]. count: [r, 1] int64, 1 ... vocab."""
        ...

    def of_mass(self, x: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
        """The highest value, [r, 1], so that those at least as high weigh more than `mass`: [r, 1] float64, less than all.

        weights: [r, vocab] float32, exp(x).
        """
        ...


class Bisection:
    """Thresholds by halving: 32 passes over the rows, exact."""

    def of_count(self, x: Tensor, count: Tensor) -> Tensor:
        return _highest(x, lambda t: (x >= t).sum(-1, keepdim=True) >= count)

    def of_mass(self, x: Tensor, weights: Tensor, mass: Tensor) -> Tensor:
        return _highest(x, lambda t: _mass(weights, x >= t) > mass)


class FlashInferThresholds:
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


def draw_in_order(weights: Tensor, u: Tensor) -> Tensor:
    """Drawn in the order of the vocabulary. weights: [r, vocab] float32; u: [r, 1] float64 in [0, 1). Returns [r] int64."""
    num_rows, vocab = weights.shape
    blocks = F.pad(weights, (0, -vocab % _CDF_BLOCK)).view(num_rows, -1, _CDF_BLOCK)
    mass = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = _below(u * mass[:, -1:], mass[:, -1:])
    block = torch.searchsorted(mass, target, right=True)
    before = torch.where(block > 0, mass.gather(1, (block - 1).clamp_(min=0)), 0.0)
    chosen = blocks.gather(1, block[..., None].expand(-1, 1, _CDF_BLOCK)).squeeze(1)
    inside = before + chosen.cumsum(-1, dtype=torch.float64)
    at = torch.searchsorted(inside, _below(target, inside[:, -1:]), right=True)
    return (block * _CDF_BLOCK + at).squeeze(1)


def draw_by_rank(x: Tensor, top_p: Tensor, u: Tensor, thresholds: Thresholds) -> Tensor:
    """Drawn from the highest down, equal ones by id, out of the shortest leading part that holds `top_p`.

    x: [r, vocab] float32, at most 0 and 0 somewhere, -inf: not to be drawn; top_p, u: [r, 1] float64. Returns [r] int64.
    """
    weights = x.exp()
    total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    # The last that is needed is the first at which *less* than `needed` has been passed.
    needed = (top_p * total).clamp_(min=_TINY)
    edge = thresholds.of_mass(x, weights, _below(needed, needed))
    above, each, ties = _around(x, weights, edge)
    kept_ties = ((needed - above) / each).ceil().clamp(min=1.0).minimum(ties)
    kept = above + kept_ties * each
    target = _below(u * kept, kept)
    # Never below what may be drawn at all, which a threshold found in float32 might be.
    at = thresholds.of_mass(x, weights, target).maximum(edge)
    above, each, ties = _around(x, weights, at)
    last = torch.where(at == edge, kept_ties, ties)
    index = ((target - above) / each).floor().clamp(min=0.0).minimum(last - 1)
    equal = x == at
    return (equal & (equal.cumsum(-1) == index + 1)).int().argmax(-1)


def ordered(x: Tensor) -> Tensor:
    """int32 numbers in the order of the float32 numbers `x`; -0 equals 0."""
    bits = (x + 0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _highest(x: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """The highest float32 t, [r, 1], for which `holds(t)`; it holds for -inf, and whatever is below where it holds."""
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


def _around(x: Tensor, weights: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: the mass above `t`, the weight of one that equals it, and how many do. All [r, 1] float64."""
    equal = x == t
    each = torch.where(equal, weights, 0.0).amax(-1, keepdim=True).double()
    return _mass(weights, x > t), each, equal.sum(-1, keepdim=True).double()


def _mass(weights: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, weights, 0.0).sum(-1, keepdim=True, dtype=torch.float64)


def _lowest(x: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, x, torch.inf).amin(-1, keepdim=True)


def _below(x: Tensor, bound: Tensor) -> Tensor:
    """`x`, or the number just below `bound` if it is not less."""
    return x.minimum(torch.nextafter(bound, torch.zeros_like(bound)))
