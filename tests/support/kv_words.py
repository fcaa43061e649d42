"""A rank's KV in CPU memory as unsigned integers, for tests that compare bits."""

from __future__ import annotations

import numpy as np

from common.kv.memory_layout import strips_of
from common.kv.spec import DTYPE_BYTES, LayerGroup
from common.kv.storage import KVStorage

_WORD = {4: np.uint32, 2: np.uint16, 1: np.uint8}


def word_of(group: LayerGroup) -> np.dtype:
    """The unsigned integer type as wide as the group's numbers."""
    return np.dtype(_WORD[DTYPE_BYTES[group.dtype]])


def plane_words(storage: KVStorage, group: int = 0) -> list[np.ndarray]:
    """For each plane of a group [layers, num_blocks, heads, block_size, width]: views of the storage's memory."""
    spec, memory = storage.layout.spec, storage.memories[group]
    planes, word = spec.groups[group].planes, word_of(spec.groups[group])
    assert storage.host_bytes is not None
    data = storage.host_bytes[memory.offset : memory.offset + memory.size_bytes].view(word)
    layers = data.reshape(memory.part.num_layers, memory.layer_bytes // data.itemsize)
    shape = (memory.part.num_layers, memory.num_blocks, memory.part.num_heads, spec.block_size)
    views: list[np.ndarray] = []
    at = 0
    for plane in planes:
        size = int(np.prod(shape[1:])) * plane.width
        part = layers[:, at : at + size]
        views.append(np.lib.stride_tricks.as_strided(part, (*shape, plane.width), _strides(part, shape, plane.width)))
        at += size
    return views


def _strides(part: np.ndarray, shape: tuple[int, ...], width: int) -> tuple[int, ...]:
    item = part.itemsize
    return (part.strides[0], shape[2] * shape[3] * width * item, shape[3] * width * item, width * item, item)


def kv_words(storage: KVStorage) -> np.ndarray:
    """[layers, planes, num_blocks, heads, block_size, width] of the only group: a view of the storage's memory."""
    [group], [memory] = storage.layout.spec.groups, storage.memories
    assert len(strips_of(group, storage.layout.spec.block_size)) == 1
    assert storage.host_bytes is not None
    shape = (memory.part.num_layers, len(group.planes), memory.num_blocks, memory.part.num_heads)
    words = storage.host_bytes.view(word_of(group))
    return words.reshape(*shape, storage.layout.spec.block_size, group.planes[0].width)
