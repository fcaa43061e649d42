"""The memory of one rank's KV cache, seen by two: attention (tensors) and transfers (NumPy)."""

from __future__ import annotations

import contextlib
import math
import mmap

import numpy as np
import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.base.free_memory import free_memory_bytes
from common.kernels.float8 import E4M3
from common.kv.cuda_pages import allocate_shareable
from common.kv.layout import DTYPE_BYTES, KVLayout, RankShard

_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3": E4M3}
_NUMPY_WORD = {4: np.uint32, 2: np.uint16, 1: np.uint8}


class KVStorage:
    """Paged K and V of one rank, all its layers, in one allocation.

    `data`: [layers, 2 (K, V), num_blocks, kv_heads/tp, block_size, head_dim]: one head of one block is contiguous,
    so that ranks that split heads copy long runs (docs/decisions/0004-heads-before-slots.md).
    `words`: the same CPU memory as unsigned integers of the dtype's width, for copies that must not start
    an OpenMP team on the calling thread and for dtypes that NumPy lacks; None on other devices.
    """

    def __init__(
        self,
        layout: KVLayout,
        shard: RankShard,
        num_blocks: int,
        device: str = "cpu",
        scales: tuple[tuple[float, float], ...] = (),
    ) -> None:
        """`scales`: those of K and V for each of this rank's layers, empty for 1. Raises: ConfigError."""
        self.layout = layout
        self.shard = shard
        self.num_blocks = num_blocks
        num_layers = shard.layer_hi - shard.layer_lo
        is_scaled = bool(scales) and layout.dtype == "float8_e4m3"
        self.scales = scales if is_scaled else ((1.0, 1.0),) * num_layers
        """What a stored number is multiplied by, (K, V) for each layer; always 1 where the dtype is not FP8."""
        _check_scales(self.scales, num_layers)
        shape = (
            shard.layer_hi - shard.layer_lo,
            2,
            num_blocks,
            shard.head_hi - shard.head_lo,
            layout.block_size,
            layout.head_dim,
        )
        dtype, where = _TORCH_DTYPE[layout.dtype], torch.device(device)
        size_bytes = math.prod(shape) * DTYPE_BYTES[layout.dtype]
        self.shared = allocate_shareable(where, size_bytes) if where.type == "cuda" else None
        """On a card: its memory, if other processes can map it."""
        if device == "cpu":
            self.data: Tensor = _zeros_on_demand(size_bytes).view(dtype).view(shape)
        elif self.shared is None:
            self.data = torch.zeros(shape, dtype=dtype, device=where)
        else:
            self.data = self.shared.tensor(where).view(dtype).view(shape).zero_()
        self.words: np.ndarray | None = None
        if device == "cpu":
            word = _NUMPY_WORD[DTYPE_BYTES[layout.dtype]]
            self.words = self.data.view(getattr(torch, np.dtype(word).name)).numpy()

    def keys(self, layer: int) -> Tensor:
        """[num_blocks, kv_heads/tp, block_size, head_dim] of this rank's `layer`-th layer."""
        return self.data[layer, 0]

    def values(self, layer: int) -> Tensor:
        """As `keys`."""
        return self.data[layer, 1]


def _check_scales(scales: tuple[tuple[float, float], ...], num_layers: int) -> None:
    if len(scales) != num_layers:
        raise ConfigError(f"{len(scales)} pairs of KV scales for {num_layers} layers")
    if not all(0.0 < scale < math.inf for pair in scales for scale in pair):
        raise ConfigError(f"KV scales must be positive numbers: {scales}")


def _zeros_on_demand(size_bytes: int) -> Tensor:
    """[size_bytes], uint8, of memory that the system clears and hands out page by page as it is first written:
    a node starts at once, and takes no more than its requests have needed.

    In large pages where there are any: blocks at random places otherwise miss the TLB at every turn, which halves the
    speed of gathering and scattering them.

    Raises: ConfigError if there is not so much: to find that out page by page would end the node in the middle of its work.
    """
    left = free_memory_bytes()
    if size_bytes > left:
        raise ConfigError(f"no memory for {size_bytes / 1e9:.2f} GB of KV: {left / 1e9:.2f} GB are free")
    try:
        memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(f"no memory for {size_bytes / 1e9:.2f} GB of KV: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # no more than a wish
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8, count=size_bytes))
