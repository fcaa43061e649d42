"""`plan` against its definition, over random specs: relay = gather the whole KV, split it anew."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.kv_words import plane_words, word_of

from common.base.errors import ConfigError
from common.kv.rank_layout import GroupPart, KVLayout, RankShard
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from common.kv.storage import KVStorage
from kvtransfer.copy.host import SliceCopier
from kvtransfer.resharding import Piece, reshard
from kvtransfer.wire import KVSlice

NUM_BLOCKS = 5


@st.composite
def specs(draw: st.DrawFn) -> KVSpec:
    """One to three groups over 1 to 7 layers; a layer may be in several. Heads from none (1) to 12."""
    num_layers = draw(st.integers(1, 7))
    members: list[set[int]] = [set() for _ in range(draw(st.integers(1, 3)))]
    for layer in range(num_layers):
        for number in draw(st.sets(st.integers(0, len(members) - 1), min_size=1)):
            members[number].add(layer)
    groups: list[LayerGroup] = []
    for layers in filter(None, members):
        planes = [
            KVPlane(f"plane {i}", w) for i, w in enumerate(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
        ]
        heads, dtype = draw(st.sampled_from([1, 1, 2, 3, 4, 6, 8, 12])), draw(st.sampled_from(["float32", "bfloat16"]))
        groups.append(LayerGroup(tuple(sorted(layers)), tuple(planes), heads, dtype))
    return KVSpec(tuple(groups), block_size=2)


@st.composite
def layouts(draw: st.DrawFn, spec: KVSpec) -> KVLayout:
    cuts = sorted(draw(st.sets(st.integers(1, spec.num_layers - 1), max_size=3))) if spec.num_layers > 1 else []
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, spec.num_layers], strict=True))
    if draw(st.sampled_from([False, False, True])):
        return KVLayout("m", spec, 1, stages, dp_size=draw(st.integers(1, 5)), hands_on=draw(st.booleans()))
    try:
        return KVLayout(
            "m",
            spec,
            draw(st.integers(1, 12)),
            stages,
            cp_size=draw(st.sampled_from([1, 1, 2, 3, 4])),
            hands_on=draw(st.booleans()),
        )
    except ConfigError:
        assume(False)
        raise


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    spec = draw(specs())
    return draw(layouts(spec)), draw(layouts(spec))


def home(layout: KVLayout) -> int:
    """A data-parallel rank, for a sequence whose blocks it holds."""
    return layout.home_of([[7 * layout.num_replicas + 2]])


def pieces_of(src: KVLayout, dst: KVLayout) -> list[Piece]:
    return reshard(src, dst, home(src), home(dst))


def held(layout: KVLayout, shard: RankShard) -> slice:
    """The positions of the sequence's blocks on a rank."""
    positions = layout.positions(shard, home(layout))
    return slice(0) if positions is None else positions.indices


def cut(whole: np.ndarray, part: GroupPart) -> np.ndarray:
    """whole: [layers of the group, heads, ...]."""
    return whole[part.layer_lo : part.layer_hi, part.head_lo : part.head_hi]


def inside(piece: GroupPart, part: GroupPart) -> GroupPart:
    """`piece`, counted from the beginning of `part`."""
    layer, head = part.layer_lo, part.head_lo
    return GroupPart(
        part.group, piece.layer_lo - layer, piece.layer_hi - layer, piece.head_lo - head, piece.head_hi - head
    )


@settings(deadline=None)
@given(pairs())
def test_relay_equals_gathering_everything_and_splitting_anew(pair: tuple[KVLayout, KVLayout]) -> None:
    """[layers, heads, blocks] of each group; a rank has the blocks of its stripe."""
    src, dst = pair
    sizes = [(len(group.layers), group.num_heads, NUM_BLOCKS) for group in src.spec.groups]
    whole = [np.arange(np.prod(size)).reshape(size) for size in sizes]
    have = [[cut(whole[part.group], part) for part in shard.parts] for shard in src.shards()]
    got = [[np.full((part.num_layers, part.num_heads, NUM_BLOCKS), -1) for part in s.parts] for s in dst.shards()]
    for piece in pieces_of(src, dst):
        group, blocks = piece.part.group, piece.stripe.indices
        a, b = src.shards()[piece.src_rank], dst.shards()[piece.dst_rank]
        assert a.parts[group].contains(piece.part), "the source has the layers and the heads"
        assert b.parts[group].contains(piece.part), "the destination wants them"
        both = [set(range(NUM_BLOCKS)[held(*each)]) for each in ((src, a), (dst, b))]
        assert set(range(NUM_BLOCKS)[blocks]) <= both[0] & both[1], "both hold the blocks"
        target = cut(got[piece.dst_rank][group], inside(piece.part, b.parts[group]))[..., blocks]
        assert (target == -1).all(), "each byte once"
        target[:] = cut(have[piece.src_rank][group], inside(piece.part, a.parts[group]))[..., blocks]
    for rank, shard in enumerate(dst.shards()):
        for number in dst.handed_on(src):
            got[rank][number] = got[rank - shard.tp_rank][number]
        for part, cells in zip(shard.parts, got[rank], strict=True):
            own = held(dst, shard)
            np.testing.assert_array_equal(cells[..., own], cut(whole[part.group], part)[..., own])
            assert (cells >= 0).sum() == cells[..., own].size, "and nothing of other ranks' blocks"


@settings(max_examples=50, deadline=None)
@given(pairs(), st.data())
def test_copying_every_piece_gives_every_rank_its_planes(pair: tuple[KVLayout, KVLayout], data: st.DataObject) -> None:
    """The same with real memory: planes of any width and dtype, blocks at other places on both sides."""
    src, dst = pair
    rng = np.random.default_rng(len(src.shards()))
    ids = [np.array(data.draw(st.permutations(range(NUM_BLOCKS))), dtype=np.int64) for _ in range(2)]
    """Where the rank that holds a block has it, on both sides."""
    whole = [
        [
            rng.integers(0, 2**16, (len(g.layers), g.num_heads, NUM_BLOCKS, 2, plane.width)).astype(word_of(g))
            for plane in g.planes
        ]
        for g in src.spec.groups
    ]
    sources = [KVStorage(src, shard, NUM_BLOCKS) for shard in src.shards()]
    targets = [KVStorage(dst, shard, NUM_BLOCKS) for shard in dst.shards()]
    for storage in sources:
        own = held(src, storage.shard)
        for part in storage.shard.parts:
            for plane, truth in zip(plane_words(storage, part.group), whole[part.group], strict=True):
                plane[:, ids[0][own]] = cut(truth, part).transpose(0, 2, 1, 3, 4)[:, own]
    for piece in pieces_of(src, dst):
        p, blocks = piece.part, piece.stripe.indices
        moved = [KVSlice(p.group, p.layer_lo, p.layer_hi, p.head_lo, p.head_hi, 0, piece.stripe.count(NUM_BLOCKS))]
        payload = np.zeros(moved[0].size_bytes(src.spec.unit_bytes), dtype=np.uint8)
        if payload.size:
            SliceCopier(sources[piece.src_rank]).gather_all(moved, ids[0][None, blocks], payload)
            SliceCopier(targets[piece.dst_rank]).scatter_all(moved, ids[1][None, blocks], payload)
    for storage in targets:
        own = held(dst, storage.shard)
        handed_on = dst.handed_on(src) if storage.shard.tp_rank else ()
        for part in storage.shard.parts:
            if part.group in handed_on:
                continue
            for plane, truth in zip(plane_words(storage, part.group), whole[part.group], strict=True):
                np.testing.assert_array_equal(plane[:, ids[1][own]], cut(truth, part).transpose(0, 2, 1, 3, 4)[:, own])


@settings(deadline=None)
@given(pairs())
def test_a_pair_of_ranks_exchanges_at_most_one_piece_of_a_group(pair: tuple[KVLayout, KVLayout]) -> None:
    counts = Counter((p.src_rank, p.dst_rank, p.part.group) for p in pieces_of(*pair))
    assert not counts or max(counts.values()) == 1


@settings(deadline=None)
@given(pairs())
def test_ranks_that_hold_planes_without_heads_share_the_work(pair: tuple[KVLayout, KVLayout]) -> None:
    """Among the ranks of one stage and stripe of the source, no rank sends to more than one destination more than another rank does."""
    src, dst = pair
    pieces = pieces_of(src, dst)
    for number, group in enumerate(src.spec.groups):
        if group.num_heads > 1:
            continue
        counts = Counter(p.src_rank for p in pieces if p.part.group == number)
        for stage in range(src.pp_size * src.num_replicas):
            of_stage = [counts[stage * src.tp_size + tp_rank] for tp_rank in range(src.tp_size)]
            assert max(of_stage) - min(of_stage) <= 1


@settings(deadline=None)
@given(pairs())
def test_what_a_stage_hands_on_is_sent_to_it_once(pair: tuple[KVLayout, KVLayout]) -> None:
    src, dst = (replace(each, hands_on=True) for each in pair)
    for number in dst.handed_on(src):
        pieces = [piece for piece in pieces_of(src, dst) if piece.part.group == number]
        sent = sum(piece.part.num_layers * piece.stripe.count(NUM_BLOCKS) for piece in pieces)
        assert sent == len(src.spec.groups[number].layers) * NUM_BLOCKS
    assert not replace(dst, hands_on=False).handed_on(src)
    assert not dst.handed_on(replace(src, hands_on=False)), "a node of protocol 16 sends to every rank"


@pytest.mark.parametrize(
    ("heads", "src_tp", "dst_tp", "busy"), [(2, 4, 4, 4), (2, 4, 2, 2), (1, 4, 4, 4), (2, 8, 4, 4)]
)
def test_replicas_of_the_source_share_the_work(heads: int, src_tp: int, dst_tp: int, busy: int) -> None:
    spec = KVSpec.uniform(2, heads, 4, "float32")
    src, dst = KVLayout("m", spec, tp_size=src_tp), KVLayout("m", spec, tp_size=dst_tp)
    assert len({p.src_rank for p in reshard(src, dst)}) == busy
