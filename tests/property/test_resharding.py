"""`plan` against its definition: relay = gather the whole KV, split it anew."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from common.base.errors import ConfigError
from common.kv.layout import KVLayout
from kvtransfer.resharding import plan


@st.composite
def layouts(draw: st.DrawFn, layers: int, heads: int) -> KVLayout:
    tp = draw(st.integers(1, 12))
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1), max_size=3))) if layers > 1 else []
    stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    try:
        return KVLayout("m", layers, heads, 4, "float32", tp_size=tp, pp_layers=stages)
    except ConfigError:
        assume(False)
        raise


@st.composite
def pairs(draw: st.DrawFn) -> tuple[KVLayout, KVLayout]:
    layers, heads = draw(st.integers(1, 7)), draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    return draw(layouts(layers, heads)), draw(layouts(layers, heads))


@given(pairs())
def test_relay_equals_gathering_everything_and_splitting_anew(pair: tuple[KVLayout, KVLayout]) -> None:
    src, dst = pair
    whole = np.arange(src.num_layers * src.num_kv_heads).reshape(src.num_layers, src.num_kv_heads)
    have = [whole[s.layer_lo : s.layer_hi, s.head_lo : s.head_hi] for s in src.shards()]
    got = [np.full((s.layer_hi - s.layer_lo, s.head_hi - s.head_lo), -1) for s in dst.shards()]
    for piece in plan(src, dst):
        a, b = src.shards()[piece.src_rank], dst.shards()[piece.dst_rank]
        assert a.layer_lo <= piece.layer_lo < piece.layer_hi <= a.layer_hi, "the source has the layers"
        assert a.head_lo <= piece.head_lo < piece.head_hi <= a.head_hi, "the source has the heads"
        target = got[piece.dst_rank][
            piece.layer_lo - b.layer_lo : piece.layer_hi - b.layer_lo,
            piece.head_lo - b.head_lo : piece.head_hi - b.head_lo,
        ]
        assert (target == -1).all(), "each byte once"
        target[:] = have[piece.src_rank][
            piece.layer_lo - a.layer_lo : piece.layer_hi - a.layer_lo,
            piece.head_lo - a.head_lo : piece.head_hi - a.head_lo,
        ]
    for shard, received in zip(dst.shards(), got, strict=True):
        want = whole[shard.layer_lo : shard.layer_hi, shard.head_lo : shard.head_hi]
        np.testing.assert_array_equal(received, want)


@given(pairs())
def test_a_pair_of_ranks_exchanges_at_most_one_piece(pair: tuple[KVLayout, KVLayout]) -> None:
    """The sender keeps one route per destination rank."""
    counts = Counter((p.src_rank, p.dst_rank) for p in plan(*pair))
    assert not counts or max(counts.values()) == 1


@pytest.mark.parametrize(
    ("heads", "src_tp", "dst_tp", "busy"), [(2, 4, 4, 4), (2, 4, 2, 2), (1, 4, 4, 4), (2, 8, 4, 4)]
)
def test_replicas_of_the_source_share_the_work(heads: int, src_tp: int, dst_tp: int, busy: int) -> None:
    src = KVLayout("m", 2, heads, 4, "float32", tp_size=src_tp)
    dst = KVLayout("m", 2, heads, 4, "float32", tp_size=dst_tp)
    assert len({p.src_rank for p in plan(src, dst)}) == busy
