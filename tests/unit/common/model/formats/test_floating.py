"""Products by floating-point weights, packed or not."""

from __future__ import annotations

import pytest
import torch

from common.model.formats.floating import FloatLinear
from common.model.precision import Precision, can_pack


@pytest.mark.parametrize("small_batches", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_bf16_products_are_the_bf16_weights_products(rows: int, small_batches: bool) -> None:
    """Whichever copy of the weights a batch uses on this machine, packed or not, plain or biased."""
    precision = Precision.choose("bfloat16", small_batches=small_batches)
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for shape in ((64, 48), (512, 320)):
            weight = torch.randn(shape, generator=generator).bfloat16()
            bias = torch.randn(shape[0], generator=generator).bfloat16()
            x = torch.randn(rows, shape[1], generator=generator).bfloat16()
            out = FloatLinear(weight, bias, precision).forward(x.to(precision.for_rows(rows)))
            expected = x.double() @ weight.double().T + bias.double()
            torch.testing.assert_close(out.double(), expected, atol=0.2, rtol=0.01)


def test_prepacking_is_used_where_this_torch_has_it() -> None:
    """A silent fall-back would cost a factor of two in decode speed."""
    if torch.backends.mkldnn.is_available():
        assert can_pack(torch.float32)
