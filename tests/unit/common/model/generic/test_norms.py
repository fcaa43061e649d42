"""A class's RMS norms are replaced where ours gives the same, and left where it does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from common.base.device import CPU
from common.kernels.choose import choose_kernels
from common.model.generic.load import replace_norms
from common.model.generic.modules import OwnNorm


class TinyRMSNorm(nn.Module):
    def __init__(self, offset: float = 0.0, power: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(48) + 0.5)
        self.variance_epsilon = 1e-5
        self.offset, self.power = offset, power

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.abs().pow(self.power).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.offset + self.weight) * wide.to(x.dtype)


class Root(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm


@torch.inference_mode()
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms_with_and_without_an_offset_are_replaced(offset: float) -> None:
    theirs = TinyRMSNorm(offset)
    root = Root(theirs)
    replace_norms(root, choose_kernels(CPU, torch.float32), torch.float32)
    assert isinstance(root.norm, OwnNorm)
    for shape in ((1, 5, 48), (2, 3, 4, 48)):
        x = torch.randn(shape)
        torch.testing.assert_close(root.norm(x), theirs(x))


@torch.inference_mode()
@pytest.mark.parametrize("norm", [TinyRMSNorm(0.5), TinyRMSNorm(power=3), nn.LayerNorm(48)])
def test_other_norms_are_left(norm: nn.Module) -> None:
    root = Root(norm)
    replace_norms(root, choose_kernels(CPU, torch.float32), torch.float32)
    assert root.norm is norm
