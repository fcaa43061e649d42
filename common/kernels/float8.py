"""e4m3 numbers with a scale, as an FP8 KV cache stores them. Runs on a rank's engine thread.

A stored number times its tensor's scale is the value. e4m3 has three bits of mantissa: a value between 2^-6 and 448
(times the scale) is kept to within 1/16 of itself; smaller ones to within 2^-10, larger ones become 448.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0


def narrow(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`x` in the form that a cache of `dtype` stores: unchanged, or in e4m3 divided by `scale`, clamped to e4m3's range."""
    if dtype != E4M3:
        return x.to(dtype)
    wide = x.float() if scale == 1.0 else x.float() / scale
    # Newer versions of PyTorch clamp by themselves, older ones give NaN.
    return wide.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def widen(x: Tensor) -> Tensor:
    """`x` in float32, without any scale; a fresh tensor unless `x` is float32.

    On a CPU e4m3 goes through a table: four times as fast as PyTorch's conversion, about as fast as that of bfloat16.
    """
    if x.dtype != E4M3 or x.device.type != "cpu":
        return x.float()
    return _table().index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


def words_of(x: Tensor) -> Tensor:
    """The same memory, viewed as bytes if `x` is e4m3, for which PyTorch has no indexed copies."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


@functools.cache
def _table() -> Tensor:
    """[256] float32: the value of each byte."""
    return torch.arange(256, dtype=torch.uint8).view(E4M3).float()
