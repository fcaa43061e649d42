"""The memory of one rank's KV cache: tensors for attention, bytes for transfers."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.base.errors import ConfigError
from common.base.free_memory import free_memory_bytes
from common.kernels.float8 import E4M3
from common.kv.cuda_pages import allocate_shareable
from common.kv.memory_layout import GroupMemory, group_memories, rank_bytes, strips_of
from common.kv.page_supply import PageSupply
from common.kv.rank_layout import KVLayout, RankShard
from common.kv.spec import LayerGroup

_TORCH_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3": E4M3}
Scales = tuple[tuple[float, ...], ...]
"""Scale of each plane, for each of a rank's layers in a group."""
_SUPPLY_SHARE = 0.25
"""Maximum share of the free memory that supplied pages may take: other nodes on this host may be starting too."""


class GroupStorage:
    """One layer group's planes on one rank. Layers are counted from the rank's first in this group."""

    def __init__(self, data: Tensor, group: LayerGroup, memory: GroupMemory, block_size: int, scales: Scales) -> None:
        """`data`: [bytes], uint8, the rank's whole storage. `scales`: empty if all are 1. Raises: ConfigError."""
        num_layers = memory.part.num_layers
        self.num_blocks = memory.num_blocks
        self.block_size = block_size
        is_scaled = bool(scales) and group.dtype == "float8_e4m3"
        self.scales: Scales = scales if is_scaled else ((1.0,) * len(group.planes),) * num_layers
        """Factor of the stored numbers, for each layer and plane; always 1 where the dtype is not FP8."""
        _check_scales(self.scales, num_layers, len(group.planes))
        numbers = data[memory.offset : memory.offset + memory.size_bytes].view(_TORCH_DTYPE[group.dtype])
        self._heads = memory.part.num_heads
        self._layers = numbers.view(num_layers, memory.layer_bytes // numbers.itemsize)
        self._is_uniform = len(strips_of(group, block_size)) == 1
        widths = [plane.width for plane in group.planes]
        self.planes: dict[str, Tensor] = {
            plane.name: self._plane(sum(widths[:i]), plane.width) for i, plane in enumerate(group.planes)
        }
        """By plane name: [layers, num_blocks, heads, block_size, width]."""

    @property
    def dtype(self) -> torch.dtype:
        return self._layers.dtype

    @property
    def device(self) -> torch.device:
        return self._layers.device

    @property
    def stacked(self) -> Tensor:
        """[layers, planes, num_blocks, heads, block_size, width]: all planes, which must be equally wide."""
        assert self._is_uniform, "planes of different widths cannot be stacked"
        width = next(iter(self.planes.values())).size(-1)
        shape = (len(self.planes), self.num_blocks, self._heads, self.block_size, width)
        return self._layers.view(self._layers.size(0), *shape)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks in the layers of this group: `KVStorage.copy_blocks`."""
        for plane in self.planes.values():
            stored = plane.view(torch.uint8)
            if stored.is_cpu:  # by NumPy, which does not start OpenMP threads
                numbers = stored.numpy()
                numbers[:, targets.numpy()] = numbers[:, sources.numpy()]
            else:
                stored.index_copy_(1, targets, stored.index_select(1, sources))

    def _plane(self, width_before: int, width: int) -> Tensor:
        slots = self.num_blocks * self._heads * self.block_size
        plane = self._layers[:, slots * width_before : slots * (width_before + width)]
        return plane.view(plane.size(0), self.num_blocks, self._heads, self.block_size, width)


class KVStorage:
    """The KV blocks of one rank, for all its layers, in one allocation.

    `data`: [bytes], uint8, with the rank's groups as `common.kv.memory_layout` places them.
    `host_bytes`: the same memory as a NumPy array, for copies that must not start OpenMP threads on the calling thread;
    None if the memory is not on the CPU.
    `groups`: the same memory as tensors, one `GroupStorage` for each group of the spec.
    """

    def __init__(
        self,
        layout: KVLayout,
        shard: RankShard,
        num_blocks: int,
        device: str = "cpu",
        scales: Sequence[Scales] = (),
    ) -> None:
        """`scales`: one entry for each group, empty if all are 1. Raises: ConfigError."""
        self.layout = layout
        self.shard = shard
        self.num_blocks = num_blocks
        self.memories = group_memories(layout.spec, shard.parts, num_blocks)
        """Where each group lies in `data`."""
        where = torch.device(device)
        size_bytes = rank_bytes(self.memories)
        self.shared = allocate_shareable(where, size_bytes) if where.type == "cuda" else None
        """The GPU memory, if other processes can map it; None otherwise and on the CPU."""
        if device == "cpu":
            data = torch.as_tensor(np.frombuffer(_map_zeros(size_bytes), dtype=np.uint8, count=size_bytes))
        elif self.shared is None:
            data = torch.zeros(size_bytes, dtype=torch.uint8, device=where)
        else:
            data = self.shared.tensor(where).zero_()
        self.data = data
        self.host_bytes: np.ndarray | None = data.numpy() if device == "cpu" else None
        scales = scales or [()] * len(layout.spec.groups)
        self.groups = tuple(
            GroupStorage(data, group, memory, layout.spec.block_size, own)
            for group, memory, own in zip(layout.spec.groups, self.memories, scales, strict=True)
        )

    def copy_blocks(self, table: int, sources: Tensor, targets: Tensor) -> None:
        """Copy the KV of block `sources[i]` to block `targets[i]`, in the layers of one block table. Both: [copies] int64, on
        the device. No block may be a target twice. On a GPU it only starts the copies, on the current stream."""
        for group, storage in zip(self.layout.spec.groups, self.groups, strict=True):
            if group.table == table:
                storage.copy_blocks(sources, targets)

    def page_supply(self) -> PageSupply:
        """Provides the pages of this memory before they are written to, within a limit of memory; nothing on a GPU."""
        planes: list[tuple[int, int]] = []
        if self.host_bytes is None:
            return PageSupply(0, planes, self.num_blocks, 0)
        for group, memory in zip(self.layout.spec.groups, self.memories, strict=True):
            for strip in strips_of(group, self.layout.spec.block_size):
                offset, plane_bytes, block_bytes = memory.place(strip, memory.part)
                count = memory.part.num_layers * strip.planes_per_layer
                planes += [(offset + i * plane_bytes, memory.num_blocks * block_bytes) for i in range(count)]
        return PageSupply(self.data.data_ptr(), planes, self.num_blocks, _SUPPLY_SHARE * free_memory_bytes())


def _check_scales(scales: Scales, num_layers: int, num_planes: int) -> None:
    if len(scales) != num_layers or any(len(each) != num_planes for each in scales):
        raise ConfigError(f"{len(scales)} sets of KV scales for {num_layers} layers of {num_planes} planes")
    if not all(0.0 < scale < math.inf for each in scales for scale in each):
        raise ConfigError(f"KV scales must be positive numbers: {scales}")


def _map_zeros(size_bytes: int) -> mmap.mmap:
    """At least `size_bytes` of zeroed memory, whose pages the kernel provides on the first write or by `page_supply`.

    It asks for huge pages: otherwise blocks at random places miss the TLB at every access, which halves the speed of
    gathering and scattering them.

    Raises: ConfigError if there is not that much memory: otherwise the node would die later, while serving.
    """
    left = free_memory_bytes()
    if size_bytes > left:
        raise ConfigError(f"no memory for {size_bytes / 1e9:.2f} GB of KV: {left / 1e9:.2f} GB are free")
    try:
        memory = mmap.mmap(-1, max(1, size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(f"no memory for {size_bytes / 1e9:.2f} GB of KV: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # only a hint
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
