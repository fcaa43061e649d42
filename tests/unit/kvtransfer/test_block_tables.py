"""Relaying KV of a model with full and windowed layers: every split of both nodes, memory shared by the block tables."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from common.base.errors import TransferError
from common.base.hashing import HASH_BYTES
from common.control.identities import pack_ids
from common.control.messages import AttemptKey, Grant, PeerRef
from common.engine.kv_transfer import OpenDestinationOrder, OpenSourceOrder, TransferPlan
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.kv.storage import KVStorage
from kvtransfer.copy.host import SliceCopier
from kvtransfer.receive_state import ReceiveState
from kvtransfer.send_state import SendState

PLANES = KVPlane("k", 3), KVPlane("v", 3)
SPEC = KVSpec(
    (
        LayerGroup((2, 5), PLANES, 2, "float32"),
        LayerGroup((0, 3), PLANES, 2, "float32", window=8, table=1),
        LayerGroup((1, 4), PLANES, 2, "float32", window=8, table=2),
    ),
    block_size=2,
)
Split = tuple[int, tuple[int, ...], int, int]
"""(tp, pp, cp, dp)"""
SPLITS: list[Split] = [(1, (), 1, 1), (2, (), 1, 1), (4, (), 1, 1), (1, (2, 4), 1, 1), (2, (3, 3), 1, 1)]
STRIPED: list[Split] = [(1, (), 2, 1), (2, (2, 4), 3, 1), (1, (), 4, 1)]
DATA_PARALLEL: list[Split] = [(1, (), 1, 2), (1, (2, 4), 1, 3)]
PAIRS = [
    *itertools.product(SPLITS, SPLITS),
    *itertools.product(STRIPED, [SPLITS[-1], *STRIPED]),
    *itertools.product(SPLITS[-1:], STRIPED),
    *itertools.product(DATA_PARALLEL, [SPLITS[-1], STRIPED[1], *DATA_PARALLEL]),
    *itertools.product([SPLITS[2], STRIPED[1]], DATA_PARALLEL),
]
HOME = 1
"""The data-parallel rank that holds the sequence."""

TOTAL, NUM_BLOCKS = 7, 24
KEY = AttemptKey("r", 1)
HASHES = [bytes([i]) * HASH_BYTES for i in range(TOTAL)]
HELD_BY_SENDER = [0, 3, 3]


def tables(seed: int, layout: KVLayout | None = None) -> list[list[int]]:
    """Three tables of different blocks, which all lie in the same memory; with stripes, position i has a block of rank i % stripes,
    with data-parallel ranks all have one of rank `HOME`."""
    places = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: 3 * TOTAL].reshape(3, TOTAL)
    if layout is not None and layout.dp_size > 1:
        return (places * layout.dp_size + HOME).tolist()
    stripes = 1 if layout is None else layout.cp_size
    return (places * stripes + np.arange(TOTAL) % stripes).tolist()


def held(layout: KVLayout, storage: KVStorage) -> slice:
    """The positions of the sequence that a rank holds."""
    positions = layout.positions(storage.shard, HOME)
    return slice(0) if positions is None else positions.indices


def storages(layout: KVLayout) -> list[KVStorage]:
    return [KVStorage(layout, shard, NUM_BLOCKS) for shard in layout.shards()]


def local(layout: KVLayout, storage: KVStorage, blocks: list[int]) -> list[int]:
    """Where a rank has its blocks of a sequence."""
    return [storage.shard.stripe.local(block) for block in blocks[held(layout, storage)]]


def transfer(source: list[list[int]] | None = None) -> OpenSourceOrder:
    return OpenSourceOrder(TransferPlan(KEY, source or tables(1), HELD_BY_SENDER, HASHES, 60.0))


def grant(layout: KVLayout, first_blocks: list[int], blocks: list[list[int]]) -> Grant:
    return Grant(
        KEY,
        PeerRef("d", "d1", "", [str(r) for r in range(layout.world_size)]),
        layout,
        first_blocks,
        list(map(pack_ids, blocks)),
    )


@pytest.mark.parametrize("first_blocks", [[0, 3, 3], [4, 3, 5], [7, 4, 3], [7, 7, 7]])
@pytest.mark.parametrize(("src_split", "dst_split"), PAIRS)
def test_each_table_gets_its_blocks_from_its_first_one_on_and_no_others(
    src_split: Split, dst_split: Split, first_blocks: list[int]
) -> None:
    src, dst = (
        KVLayout("m", SPEC, tp_size=tp, pp_layers=pp, cp_size=cp, dp_size=dp)
        for tp, pp, cp, dp in (src_split, dst_split)
    )
    sources, targets = storages(src), storages(dst)
    ours, theirs = tables(1, src), tables(2, dst)
    truth = np.random.default_rng(3).random((3, 2, 2, TOTAL, 2, 2, 3), dtype=np.float32)
    """[groups, layers, planes, blocks, heads, slots, width]"""
    for storage in sources:
        for group, part in enumerate(storage.shard.parts):
            own = truth[group, part.layer_lo : part.layer_hi, :, held(src, storage), part.head_lo : part.head_hi]
            storage.groups[group].stacked.numpy()[:, :, local(src, storage, ours[group])] = own
    plan = TransferPlan(KEY, theirs, first_blocks, HASHES, 60.0)
    order = OpenDestinationOrder(plan, PeerRef("p", "s1", "", []), src)
    incoming = [ReceiveState(order, dst, r, NUM_BLOCKS, 0) for r in range(dst.world_size)]
    moved = 0
    for rank, storage in enumerate(sources):
        outgoing = SendState(transfer(ours), src, rank, NUM_BLOCKS)
        outgoing.grant(grant(dst, first_blocks, theirs), 0.0)
        for layer in range(storage.shard.num_layers):
            outgoing.blocks_final(layer, TOTAL, 0.0)
        for target in outgoing.destinations:
            while (batch := outgoing.take(target, max_bytes=500, now=0.0)) is not None:
                payload = np.zeros(batch.size_bytes, np.uint8)
                SliceCopier(storage).gather_all(batch.slices, batch.blocks, payload)
                claim = incoming[target].claim(outgoing.header(batch, "s1", "d1", 0), len(payload))
                SliceCopier(targets[target]).scatter_all(claim.slices, claim.blocks, payload)
                incoming[target].placed(claim, 0.0)
                moved += batch.size_bytes
    assert all(end.complete for end in incoming)
    replicas = max(1, dst.tp_size // 2)
    wanted = sum(TOTAL - first for first in first_blocks)
    assert moved == replicas * wanted * SPEC.unit_bytes[0] * 2 * 2, "blocks x layers x heads of each table"
    for storage in targets:
        for group, part in enumerate(storage.shard.parts):
            positions = range(TOTAL)[held(dst, storage)]
            first = sum(position < first_blocks[group] for position in positions)
            got = storage.groups[group].stacked.numpy()[:, :, local(dst, storage, theirs[group])[first:]]
            own = truth[group, part.layer_lo : part.layer_hi, :, held(dst, storage), part.head_lo : part.head_hi]
            np.testing.assert_array_equal(got, own[:, :, first:])


@pytest.mark.parametrize("first_blocks", [[0, 2, 3], [0, 3, 2], [8, 3, 3], [0, 3], [0]])
def test_a_grant_of_blocks_that_the_sender_has_given_up_or_never_had_is_refused(first_blocks: list[int]) -> None:
    layout = KVLayout("m", SPEC)
    outgoing = SendState(transfer(), layout, 0, NUM_BLOCKS)
    with pytest.raises(TransferError, match="KV from blocks"):
        outgoing.grant(grant(layout, first_blocks, tables(2)), 0.0)
    with pytest.raises(TransferError):
        outgoing.grant(grant(layout, HELD_BY_SENDER, [*tables(2)[:2], [1, 2]]), 0.0)
    with pytest.raises(TransferError):
        outgoing.grant(grant(layout, HELD_BY_SENDER, tables(2)[:2]), 0.0)
    assert not outgoing.granted
