"""Modules that take the place of a class's own."""

from __future__ import annotations

import torch

from common.kernels.torch_kernels import TORCH
from common.model.formats.floating import float_linear
from common.model.generic.modules import ColumnsOfMerged, MergedColumns
from common.model.precision import Precision

FLOAT32 = Precision(torch.float32, torch.float32, torch.float32)


@torch.inference_mode()
def test_layers_of_one_input_are_one_product_and_others_are_right_too() -> None:
    weight = torch.randn(12, 8)
    merged = MergedColumns(float_linear(weight, None, FLOAT32, TORCH), torch.float32, [6, 4, 2])
    products: list[torch.Tensor] = []
    compute = merged.compute
    merged.compute = lambda x: products.append(x) or compute(x)
    q, k, v = (ColumnsOfMerged(merged, index) for index in range(3))
    parts = weight.split([6, 4, 2])
    x, other = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    for layer, part in zip((q, k, v), parts, strict=True):
        torch.testing.assert_close(layer(x), x @ part.T)
    assert len(products) == 1
    for layer, part, given in ((q, parts[0], x), (k, parts[1], other), (v, parts[2], x), (v, parts[2], x)):
        torch.testing.assert_close(layer(given), given @ part.T)
