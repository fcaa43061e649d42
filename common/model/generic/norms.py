"""Puts our RMS norm in the place of a class's own norms that compute the same, as random rows show. While a rank loads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from common.kernels.base import Kernels
from common.model.generic.modules import RowModule

_OFFSETS = (0.0, 1.0)
"""What classes add to the weight before they multiply with it."""
_SCALES = (1e-2, 1.0, 30.0)


class OwnNorm(RowModule):
    """An RMS norm over the last axis."""

    def __init__(self, kernels: Kernels, weight: Tensor, eps: float) -> None:
        """weight: as the kernels take it."""
        super().__init__(lambda rows: kernels.rms_norm(rows, weight, eps))
        self.weight = nn.Parameter(weight, requires_grad=False)


def replace_norms(root: Any, kernels: Kernels, dtype: torch.dtype) -> None:
    """Replace the RMS norms in a module whose weights are loaded. dtype: of activations."""
    adding = [kernels.with_norm_offset(offset) for offset in _OFFSETS]
    for name, module in list(root.named_modules()):
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        parameters = dict(module.named_parameters())
        if "RMSNorm" not in type(module).__name__ or list(parameters) != ["weight"] or not isinstance(eps, float):
            continue
        weight = parameters["weight"].detach()
        if weight.is_meta or weight.dim() != 1:
            continue
        ours = [OwnNorm(of_offset, of_offset.norm_weight(weight), eps) for of_offset in adding]
        same = next((each for each in ours if _is_same(module, each, weight, dtype)), None)
        if same is not None:
            root.set_submodule(name, same)


def _is_same(theirs: nn.Module, ours: nn.Module, weight: Tensor, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(len(_SCALES), weight.size(0), generator=generator) * torch.tensor(_SCALES)[:, None]
    x = rows.to(weight.device, dtype)[None]
    expected, found = theirs(x), ours(x)
    if found.dtype != expected.dtype:
        return False
    return torch.allclose(found, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
