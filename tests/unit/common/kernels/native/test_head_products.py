"""Products of each head's rows with its own matrix, in every variant, against single products in float64."""

from __future__ import annotations

import pytest
import torch
from support.native_variants import DISTINCT, native

from common.kernels.native.linear import NativeLinear, pack_float

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("variant", DISTINCT)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "inputs", "outputs"), [(1, 128, 32), (3, 40, 64), (16, 24, 96)])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_each_head_is_multiplied_by_its_own_matrix(
    variant: str, dtype: torch.dtype, heads: int, inputs: int, outputs: int, rows: int
) -> None:
    torch.manual_seed(3)
    weights = torch.randn(heads, outputs, inputs).to(dtype)
    layer = NativeLinear(native(variant), pack_float(weights.flatten(0, 1), is_paired=False), None)
    x = torch.randn(rows, heads, inputs + 8).to(dtype)[..., 4:-4]
    whole = torch.full((rows, heads, outputs + 16), 7.0).to(dtype)
    layer.multiply_heads(x, whole[..., 16:])
    expected = torch.einsum("thi,hoi->tho", x.double(), weights.double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(whole[..., 16:].double(), expected, atol=tolerance, rtol=1e-2)
    assert (whole[..., :16] == 7.0).all(), "what lies between heads is left as it is"
