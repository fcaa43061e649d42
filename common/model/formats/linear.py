"""A linear layer, on a CPU on weights packed once for it. Runs on a rank's engine thread, under inference mode."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from common.model.precision import Precision, can_pack

_PACK_ROWS_HINT = 16
"""oneDNN's packed format for so many rows measured well from 1 to 512."""
_PACK_MIN_WEIGHTS = 2**17
"""Below, a oneDNN call's own overhead (30-50 us) outweighs what packing gains."""


class Linear:
    """y = x W^T + b. Keeps one copy of W per dtype of `precision.packs`, on a CPU prepacked by oneDNN where it can."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: Precision) -> None:
        self._weights: dict[torch.dtype, tuple[Tensor, Tensor | None, bool]] = {}
        for dtype in precision.packs:
            pack = weight.device.type == "cpu" and weight.numel() >= _PACK_MIN_WEIGHTS and can_pack(dtype)
            own = weight.to(dtype)
            kept = torch.ops.mkldnn._reorder_linear_weight(own, _PACK_ROWS_HINT) if pack else own
            self._weights[dtype] = (kept, None if bias is None else bias.to(dtype), pack)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, in], of a dtype in `precision.packs`. Returns a fresh [T, out] of the same dtype."""
        weight, bias, packed = self._weights[x.dtype]
        if packed:
            return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)
