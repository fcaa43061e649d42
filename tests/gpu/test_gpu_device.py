"""What the rest of the suite takes for granted of the GPU."""

from __future__ import annotations

import torch


def test_the_gpu_multiplies_bf16_and_keeps_float8() -> None:
    a, b = (torch.randn(256, 256, device="cuda") for _ in range(2))
    exact = a.double() @ b.double()
    torch.testing.assert_close((a.bfloat16() @ b.bfloat16()).double(), exact, atol=1.0, rtol=0.02)
    assert torch.equal(a.to(torch.float8_e4m3fn).cpu().float(), a.cpu().to(torch.float8_e4m3fn).float())
