from __future__ import annotations

import pytest
import torch

from common.kernels.native.find import find_native
from common.kernels.native.kernels import NativeRotary


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_angles_of_any_positions_in_any_order(factor: float) -> None:
    native = find_native()
    assert native is not None
    frequencies = 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)
    rotary = NativeRotary(native, frequencies, factor)
    for positions in ([0], [5000, 3, 3, 1023, 1024], [7, 131_071], []):
        angles = torch.tensor(positions, dtype=torch.long)[:, None] * frequencies
        expected = torch.stack((angles.cos(), angles.sin())) * factor
        rows = torch.tensor(positions, dtype=torch.long)
        rotary.tables(rows)
        torch.testing.assert_close(rotary.table.index_select(1, rows), expected, atol=2e-7, rtol=1e-6)
