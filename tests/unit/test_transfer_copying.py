"""Gather and scatter against plain indexing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from common.kv.layout import KVLayout, RankShard
from common.kv.storage import KVStorage
from kvtransfer.copying import DeviceCopier, SliceCopier
from kvtransfer.wire import KVSlice

NUM_BLOCKS = 9


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVStorage, KVSlice, np.ndarray]:
    """A rank whose shard starts anywhere, and any slice of it."""
    heads, layers = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    kv = KVLayout("m", layers, heads, draw(st.sampled_from([1, 3, 8])), dtype, block_size=draw(st.sampled_from([1, 4])))
    at_layer, at_head = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    storage = KVStorage(kv, RankShard(0, 0, at_layer, at_layer + layers, at_head, at_head + heads), NUM_BLOCKS)
    assert storage.words is not None
    storage.words[:] = np.arange(storage.words.size).reshape(storage.words.shape) % 60_000
    blocks = np.array(draw(st.permutations(range(NUM_BLOCKS))), dtype=np.int64)

    def span(low: int, size: int) -> tuple[int, int]:
        lo = draw(st.integers(0, size - 1))
        return low + lo, low + draw(st.integers(lo + 1, size))

    return storage, KVSlice(*span(at_layer, layers), *span(at_head, heads), *span(0, NUM_BLOCKS)), blocks


def selected(storage: KVStorage, piece: KVSlice, blocks: np.ndarray) -> tuple[slice, slice, np.ndarray, slice]:
    shard = storage.shard
    return (
        slice(piece.layer_lo - shard.layer_lo, piece.layer_hi - shard.layer_lo),
        slice(None),
        blocks[piece.block_lo : piece.block_hi],
        slice(piece.head_lo - shard.head_lo, piece.head_hi - shard.head_lo),
    )


@given(cases())
def test_gather_gives_the_payload_in_wire_order(case: tuple[KVStorage, KVSlice, np.ndarray]) -> None:
    storage, piece, blocks = case
    assert storage.words is not None
    want = np.ascontiguousarray(storage.words[selected(*case)]).tobytes()
    assert len(want) == piece.size_bytes(storage.layout)
    out = np.zeros(len(want), dtype=np.uint8)
    SliceCopier(storage).gather(piece, blocks, out)
    assert out.tobytes() == want


@given(cases())
def test_scatter_writes_the_slice_and_nothing_beside_it(case: tuple[KVStorage, KVSlice, np.ndarray]) -> None:
    storage, piece, blocks = case
    assert storage.words is not None
    want = storage.words.copy()
    payload = np.random.default_rng(0).integers(0, 255, piece.size_bytes(storage.layout), dtype=np.uint8)
    shape = want[selected(*case)].shape
    want[selected(*case)] = payload.view(want.dtype).reshape(shape)
    SliceCopier(storage).scatter(piece, blocks, payload)
    np.testing.assert_array_equal(storage.words, want)


def test_storage_outside_cpu_memory_is_refused() -> None:
    kv = KVLayout("m", 1, 1, 4, "float32")
    with pytest.raises(ConfigError, match="CPU"):
        SliceCopier(KVStorage(kv, kv.shard(0, 0), 1, device="meta"))


@given(cases())
def test_device_copier_does_the_same_by_tensors(case: tuple[KVStorage, KVSlice, np.ndarray]) -> None:
    """On CPU tensors here; what it copies does not depend on the device."""
    storage, piece, blocks = case
    assert storage.words is not None
    size = piece.size_bytes(storage.layout)
    want, got = np.zeros(size + 3, dtype=np.uint8), torch.zeros(size + 3, dtype=torch.uint8)
    SliceCopier(storage).gather_all([piece], blocks, want)
    DeviceCopier(storage).gather_all([piece], blocks, got)
    np.testing.assert_array_equal(got.numpy(), want)
    payload = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    payload.setflags(write=False)
    before = storage.words.copy()
    SliceCopier(storage).scatter_all([piece], blocks, payload)
    after = storage.words.copy()
    storage.words[:] = before
    DeviceCopier(storage).scatter_all([piece], blocks, payload)
    np.testing.assert_array_equal(storage.words, after)
