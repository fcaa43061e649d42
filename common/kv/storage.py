"""The memory of one rank's KV cache, seen by two: attention (tensors) and transfers (NumPy)."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

from common.kv.layout import DTYPE_BYTES, KVLayout, RankShard

_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NUMPY_WORD = {4: np.uint32, 2: np.uint16, 1: np.uint8}


class KVStorage:
    """Paged K and V of one rank, all its layers, in one allocation.

    `data`: [layers, 2 (K, V), num_blocks, block_size, kv_heads/tp, head_dim].
    `words`: the same CPU memory as unsigned integers of the dtype's width, for copies that must not start
    an OpenMP team on the calling thread and for dtypes that NumPy lacks; None on other devices.
    """

    def __init__(self, layout: KVLayout, shard: RankShard, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.shard = shard
        self.num_blocks = num_blocks
        shape = (
            shard.layer_hi - shard.layer_lo,
            2,
            num_blocks,
            layout.block_size,
            shard.head_hi - shard.head_lo,
            layout.head_dim,
        )
        self.data: Tensor = torch.empty(shape, dtype=_TORCH_DTYPE[layout.dtype], device=device)
        if device == "cpu":
            _advise_huge_pages(self.data)
        self.data.zero_()
        self.words: np.ndarray | None = None
        if device == "cpu":
            word = _NUMPY_WORD[DTYPE_BYTES[layout.dtype]]
            self.words = self.data.view(getattr(torch, np.dtype(word).name)).numpy()

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, block_size, kv_heads/tp, head_dim] of this rank's `layer`-th layer."""
        return self.data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """As `keys`."""
        return self.data[layer, 1]


def _advise_huge_pages(data: Tensor) -> None:
    """Ask for large pages, before the first touch: blocks at random places otherwise miss the TLB at every turn,
    which halves the speed of gathering and scattering them. No more than a wish; systems without them ignore it."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    first = -(-data.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = data.data_ptr() + data.nbytes - first
    if size > 0:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(size // mmap.PAGESIZE * mmap.PAGESIZE), advice
        )
