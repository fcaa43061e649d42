"""Gather and scatter against plain indexing."""

from __future__ import annotations

import gc
import warnings
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.host_device import CopyRuns, HostDevice, copy_runs

from common.base.errors import ConfigError, CorruptSlice
from common.kv.layout import KVLayout, RankShard
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import copy_by_index
from kvtransfer.copy.device import LentBlocks, Mark, pages_of
from kvtransfer.copy.device_copy import DeviceCopier
from kvtransfer.copy.host import SliceCopier, as_tensor
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


def finish(mark: Mark | None) -> None:
    """As an I/O thread does: look again and again."""
    assert mark is not None
    assert not mark.done(), "nothing is copied before somebody has looked twice"
    while not mark.done():
        pass


@pytest.mark.parametrize("reached", [True, False], ids=["direct", "by-way-of-pinned-memory"])
@pytest.mark.parametrize("copy_runs", [copy_runs, copy_by_index], ids=["kernel", "torch"])
@settings(deadline=None, max_examples=50)
@given(case=cases())
def test_device_copier_does_the_same_with_runs(
    case: tuple[KVStorage, KVSlice, np.ndarray], reached: bool, copy_runs: CopyRuns
) -> None:
    """The arithmetic of the kernel, by its emulation, and what PyTorch does where the kernel is not compiled."""
    storage, piece, blocks = case
    device = HostDevice(storage, copy_runs)
    assert storage.words is not None
    size = piece.size_bytes(storage.layout)
    make = device.device_buffer if reached else lambda size: np.zeros(size, dtype=np.uint8)
    got, want = make(size + 3), np.zeros(size + 3, dtype=np.uint8)
    got[:] = 0
    SliceCopier(storage).gather_all([piece], blocks, want)
    copier = DeviceCopier(device, storage)
    finish(copier.gather_all([piece], blocks, got))
    np.testing.assert_array_equal(got, want)
    payload = make(size)
    payload[:] = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    before = storage.words.copy()
    SliceCopier(storage).scatter_all([piece], blocks, payload)
    after = storage.words.copy()
    storage.words[:] = before
    payload.setflags(write=False)
    finish(copier.scatter_all([piece], blocks, payload))
    np.testing.assert_array_equal(storage.words, after)


@pytest.mark.parametrize("copy_runs", [copy_runs, copy_by_index], ids=["kernel", "torch"])
@settings(deadline=None, max_examples=50)
@given(case=cases(), data=st.data())
def test_lent_blocks_are_copied_as_if_they_had_been_sent(
    case: tuple[KVStorage, KVSlice, np.ndarray], data: st.DataObject, copy_runs: CopyRuns
) -> None:
    """Source and destination hold other heads and layers, and have other numbers of blocks."""
    storage, piece, blocks = case
    layers, heads = piece.layer_hi - piece.layer_lo, piece.head_hi - piece.head_lo
    more = [data.draw(st.integers(0, 2)) for _ in range(4)]
    shard = RankShard(
        0,
        0,
        max(0, piece.layer_lo - more[0]),
        piece.layer_lo + layers + more[1],
        max(0, piece.head_lo - more[2]),
        piece.head_lo + heads + more[3],
    )
    theirs = KVStorage(storage.layout, shard, NUM_BLOCKS + 4)
    lender = HostDevice(theirs)
    assert storage.words is not None
    assert theirs.words is not None
    theirs.words[:] = np.arange(theirs.words.size).reshape(theirs.words.shape) % 50_000
    their_blocks = np.array(data.draw(st.permutations(range(NUM_BLOCKS + 4)))[:NUM_BLOCKS], dtype=np.int64)
    payload = np.zeros(piece.size_bytes(storage.layout), dtype=np.uint8)
    SliceCopier(theirs).gather_all([piece], their_blocks, payload)
    want = storage.words.copy()
    want[selected(storage, piece, blocks)] = payload.view(want.dtype).reshape(
        want[selected(storage, piece, blocks)].shape
    )
    lo = data.draw(st.integers(0, piece.block_lo))
    lent = LentBlocks(pages_of(theirs, lender), len(payload), lo, their_blocks[lo:])
    finish(DeviceCopier(HostDevice(storage, copy_runs), storage).scatter_all([piece], blocks, lent))
    np.testing.assert_array_equal(storage.words, want)


@pytest.mark.parametrize(
    ("ids", "first", "piece"),
    [
        ([0, 1, 2], 0, KVSlice(0, 1, 0, 1, 0, 4)),  # too few
        ([0, 1, 2], 1, KVSlice(0, 1, 0, 1, 0, 2)),  # begins too late
        ([0, 99], 0, KVSlice(0, 1, 0, 1, 0, 2)),
        ([0, -1], 0, KVSlice(0, 1, 0, 1, 0, 2)),
        ([0, 1], 0, KVSlice(0, 2, 0, 1, 0, 2)),  # a layer that is not there
        ([0, 1], 0, KVSlice(0, 1, 0, 2, 0, 2)),
    ],
)
def test_lent_blocks_that_do_not_exist_are_refused_before_anything_is_copied(
    ids: list[int], first: int, piece: KVSlice
) -> None:
    kv = KVLayout("m", 2, 2, 4, "float32")
    ours, theirs = KVStorage(kv, kv.shard(0, 0), 4), KVStorage(kv, RankShard(0, 0, 0, 1, 0, 1), 4)
    device = HostDevice(ours)
    lent = LentBlocks(pages_of(theirs, HostDevice(theirs)), 1, first, np.array(ids, dtype=np.int64))
    good = KVSlice(0, 1, 0, 1, first, first + 1)
    with pytest.raises(CorruptSlice):
        DeviceCopier(device, ours).scatter_all([good, piece], np.arange(4), lent)
    assert device.copies == 0


def test_tensor_over_received_memory_copies_nothing_warns_nobody_and_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On an I/O thread: what Python offers to keep a warning back changes the whole process."""
    monkeypatch.setattr(warnings, "catch_warnings", None)
    received = np.frombuffer(bytearray(range(100)), dtype=np.uint8)
    received.flags.writeable = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", lambda *args, **_: pytest.fail(str(args[0])))
        tensor = as_tensor(received)
    assert tensor.data_ptr() == received.ctypes.data
    alive = weakref.ref(received)
    del received
    gc.collect()
    assert alive() is not None
    assert tensor.tolist() == list(range(100))
    del tensor
    gc.collect()
    assert alive() is None
    own = np.zeros(4, dtype=np.uint8)
    as_tensor(own)[1] = 7
    assert own[1] == 7
