"""Gather and scatter against plain indexing."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.host_device import CopyRuns, HostDevice, copy_runs
from support.kv_words import plane_words

from common.base.errors import CorruptSlice
from common.kernels.native.find import find_native
from common.kv.rank_layout import GroupPart, KVLayout, RankShard
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.kv.storage import KVStorage
from kvtransfer.copy.cuda import as_tensor, copy_by_index
from kvtransfer.copy.device import LentBlocks, RankMemory, StreamMark
from kvtransfer.copy.device_copy import DeviceCopier
from kvtransfer.copy.host import SliceCopier
from kvtransfer.wire import KVSlice

NUM_BLOCKS = 9


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    """Up to three groups, of planes that may differ in width."""
    groups: list[LayerGroup] = []
    for _ in range(draw(st.integers(1, 3))):
        widths = draw(st.lists(st.sampled_from([1, 3, 16]), min_size=1, max_size=3))
        planes = tuple(KVPlane(f"plane {i}", width) for i, width in enumerate(widths))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3"]))
        groups.append(LayerGroup(tuple(range(draw(st.integers(1, 3)))), planes, draw(st.integers(1, 6)), dtype))
    return KVSpec(tuple(groups), block_size=draw(st.sampled_from([1, 4])))


def fill(storage: KVStorage, numbers: int) -> None:
    assert storage.host_bytes is not None
    storage.host_bytes[:] = np.random.default_rng(numbers).integers(0, 256, storage.host_bytes.size, dtype=np.uint8)


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVStorage, KVSlice, np.ndarray]:
    """A rank whose shard starts anywhere, and any slice of it."""
    spec = draw(specs())
    parts: list[GroupPart] = []
    for number, group in enumerate(spec.groups):
        at_layer, at_head = draw(st.integers(0, 5)), draw(st.integers(0, 5))
        parts.append(GroupPart(number, at_layer, at_layer + len(group.layers), at_head, at_head + group.num_heads))
    storage = KVStorage(KVLayout("m", spec), RankShard(0, 0, 0, spec.num_layers, tuple(parts)), NUM_BLOCKS)
    fill(storage, 1)
    blocks = np.array(draw(st.permutations(range(NUM_BLOCKS))), dtype=np.int64)

    def span(low: int, high: int) -> tuple[int, int]:
        lo = draw(st.integers(low, high - 1))
        return lo, draw(st.integers(lo + 1, high))

    part = draw(st.sampled_from(parts))
    layers, heads = span(part.layer_lo, part.layer_hi), span(part.head_lo, part.head_hi)
    return storage, KVSlice(part.group, *layers, *heads, *span(0, NUM_BLOCKS)), blocks


def places(storage: KVStorage, piece: KVSlice, blocks: np.ndarray) -> Iterator[tuple[np.ndarray, Any]]:
    """For each layer and plane of the piece, in the order of the wire: the plane, and the piece's index in it."""
    part, ids = storage.shard.parts[piece.group], blocks[piece.block_lo : piece.block_hi]
    heads = slice(piece.head_lo - part.head_lo, piece.head_hi - part.head_lo)
    for layer in range(piece.layer_lo - part.layer_lo, piece.layer_hi - part.layer_lo):
        for plane in plane_words(storage, piece.group):
            yield plane[layer], (ids, heads)


def size_of(storage: KVStorage, piece: KVSlice) -> int:
    return piece.size_bytes(storage.layout.spec.unit_bytes)


def payload_of(storage: KVStorage, piece: KVSlice, blocks: np.ndarray) -> bytes:
    return b"".join(plane[index].tobytes() for plane, index in places(storage, piece, blocks))


def write(storage: KVStorage, piece: KVSlice, blocks: np.ndarray, payload: np.ndarray) -> np.ndarray:
    """What the storage's memory is after `payload` was written; the storage stays as it is."""
    assert storage.host_bytes is not None
    before, at = storage.host_bytes.copy(), 0
    for plane, index in places(storage, piece, blocks):
        size = plane[index].nbytes
        plane[index] = payload[at : at + size].view(plane.dtype).reshape(plane[index].shape)
        at += size
    after = storage.host_bytes.copy()
    storage.host_bytes[:] = before
    return after


@given(cases())
def test_gather_gives_the_payload_in_wire_order(case: tuple[KVStorage, KVSlice, np.ndarray]) -> None:
    storage, piece, blocks = case
    want = payload_of(*case)
    assert len(want) == size_of(storage, piece)
    out = np.zeros(len(want), dtype=np.uint8)
    SliceCopier(storage).gather_all([piece], blocks[None], out)
    assert out.tobytes() == want


@pytest.mark.parametrize("is_native", [False, True], ids=["numpy", "native"])
@given(case=cases())
def test_scatter_writes_the_slice_and_nothing_beside_it(
    case: tuple[KVStorage, KVSlice, np.ndarray], is_native: bool
) -> None:
    """Rows of whole cache lines are written past the caches by the native library, others are not."""
    storage, piece, blocks = case
    payload = np.random.default_rng(0).integers(0, 255, size_of(storage, piece), dtype=np.uint8)
    want = write(storage, piece, blocks, payload)
    SliceCopier(storage, find_native() if is_native else None).scatter_all([piece], blocks[None], payload)
    assert storage.host_bytes is not None
    np.testing.assert_array_equal(storage.host_bytes, want)


def finish(mark: StreamMark | None) -> None:
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
    size = size_of(storage, piece)
    make = device.device_buffer if reached else lambda size: np.zeros(size, dtype=np.uint8)
    got, want = make(size + 3), np.zeros(size + 3, dtype=np.uint8)
    got[:] = 0
    SliceCopier(storage).gather_all([piece], blocks[None], want)
    copier = DeviceCopier(device, storage)
    finish(copier.gather_all([piece], blocks[None], got))
    np.testing.assert_array_equal(got, want)
    payload = make(size)
    payload[:] = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8)
    after = write(storage, piece, blocks, payload)
    payload.setflags(write=False)
    finish(copier.scatter_all([piece], blocks[None], payload))
    assert storage.host_bytes is not None
    np.testing.assert_array_equal(storage.host_bytes, after)


@pytest.mark.parametrize("copy_runs", [copy_runs, copy_by_index], ids=["kernel", "torch"])
@settings(deadline=None, max_examples=50)
@given(case=cases(), data=st.data())
def test_lent_blocks_are_copied_as_if_they_had_been_sent(
    case: tuple[KVStorage, KVSlice, np.ndarray], data: st.DataObject, copy_runs: CopyRuns
) -> None:
    """Source and destination hold other heads and layers, and have other numbers of blocks."""
    storage, piece, blocks = case
    spec = storage.layout.spec
    more = [data.draw(st.integers(0, 2)) for _ in range(4)]
    parts = list(storage.shard.parts)
    parts[piece.group] = GroupPart(
        piece.group,
        max(0, piece.layer_lo - more[0]),
        piece.layer_hi + more[1],
        max(0, piece.head_lo - more[2]),
        piece.head_hi + more[3],
    )
    theirs = KVStorage(storage.layout, RankShard(0, 0, 0, spec.num_layers, tuple(parts)), NUM_BLOCKS + 4)
    lender = HostDevice(theirs)
    fill(theirs, 2)
    their_blocks = np.array(data.draw(st.permutations(range(NUM_BLOCKS + 4)))[:NUM_BLOCKS], dtype=np.int64)
    payload = np.frombuffer(payload_of(theirs, piece, their_blocks), dtype=np.uint8)
    want = write(storage, piece, blocks, payload)
    lo = data.draw(st.integers(0, piece.block_lo))
    lent = LentBlocks(memory_of(theirs, lender), len(payload), lo, their_blocks[None, lo:])
    finish(DeviceCopier(HostDevice(storage, copy_runs), storage).scatter_all([piece], blocks[None], lent))
    assert storage.host_bytes is not None
    np.testing.assert_array_equal(storage.host_bytes, want)


def memory_of(storage: KVStorage, device: HostDevice) -> RankMemory:
    return RankMemory(device.as_bytes(storage), storage.memories)


@pytest.mark.parametrize(
    ("ids", "first", "piece"),
    [
        ([0, 1, 2], 0, KVSlice(0, 0, 1, 0, 1, 0, 4)),  # too few
        ([0, 1, 2], 1, KVSlice(0, 0, 1, 0, 1, 0, 2)),  # begins too late
        ([0, 99], 0, KVSlice(0, 0, 1, 0, 1, 0, 2)),
        ([0, -1], 0, KVSlice(0, 0, 1, 0, 1, 0, 2)),
        ([0, 1], 0, KVSlice(0, 0, 2, 0, 1, 0, 2)),  # a layer that is not there
        ([0, 1], 0, KVSlice(0, 0, 1, 0, 2, 0, 2)),
        ([0, 1], 0, KVSlice(1, 0, 1, 0, 1, 0, 2)),  # a group that is not there
        ([0, 1], 5, KVSlice(0, 0, 1, 0, 1, 0, 2)),  # blocks before those that are lent
    ],
)
def test_lent_blocks_that_do_not_exist_are_refused_before_anything_is_copied(
    ids: list[int], first: int, piece: KVSlice
) -> None:
    kv = KVLayout("m", KVSpec.uniform(2, 2, 4, "float32"))
    ours, theirs = (
        KVStorage(kv, kv.shard(0, 0), 4),
        KVStorage(kv, RankShard(0, 0, 0, 1, (GroupPart(0, 0, 1, 0, 1),)), 4),
    )
    device = HostDevice(ours)
    lent = LentBlocks(memory_of(theirs, HostDevice(theirs)), 1, first, np.array([ids], dtype=np.int64))
    good = KVSlice(0, 0, 1, 0, 1, first, first + 1)
    with pytest.raises(CorruptSlice):
        DeviceCopier(device, ours).scatter_all([good, piece], np.arange(4)[None], lent)
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
