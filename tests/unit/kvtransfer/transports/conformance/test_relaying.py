"""Conformance of every transport: KV arrives bit for bit, between all layouts and in every order of calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.kv_words import kv_words
from support.transfer_harness import PATTERN, layout, wait_until
from support.transport_conformance import TRANSPORTS

from common.kv.rank_layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup

LATENT = KVSpec((LayerGroup((0, 1, 2), (KVPlane("latent", 9),), 1, "bfloat16"),), block_size=4)
"""One plane without heads, which every tensor-parallel rank of a stage holds whole."""


MIXED = KVSpec(
    (
        LayerGroup((0, 2), (KVPlane("k", 8), KVPlane("v", 8)), 4, "bfloat16"),
        LayerGroup((1,), (KVPlane("k", 6), KVPlane("v", 4)), 2, "float32"),
        LayerGroup((1, 2), (KVPlane("index", 5),), 1, "float8_e4m3"),
    ),
    block_size=4,
)
"""Layers that differ, one of them in two groups, with planes that differ in width."""


STAGES = {1: (3,), 2: (2, 1), 3: (1, 1, 1)}


LAYOUTS = {
    "tp2-to-tp4-replicated": (layout(tp=2), layout(tp=4)),
    "pp2-to-pp3": (layout(pp=(2, 2)), layout(pp=(1, 2, 1))),
    "one-to-one": (layout(), layout()),
    "tp1-to-tp2": (layout(tp=1), layout(tp=2)),
    "tp2-to-tp1": (layout(tp=2), layout(tp=1)),
    "tp4-to-tp2-odd-heads": (layout(tp=4, heads=12), layout(tp=2, heads=12)),
    "tp3-to-tp2-crossing-heads": (layout(tp=3, heads=6), layout(tp=2, heads=6)),
    "pp1-to-pp2-uneven": (layout(), layout(pp=(3, 1))),
    "pp2-to-pp2-shifted": (layout(pp=(1, 3)), layout(pp=(3, 1))),
    "tp2-to-tp2-pp2": (layout(tp=2), layout(tp=2, pp=(2, 2))),
    "replicated-source": (layout(tp=4, heads=2), layout(tp=1, heads=2)),
    "replicated-destination": (layout(tp=1, heads=2), layout(tp=4, heads=2, pp=(1, 3))),
    "float32": (layout(tp=2, dtype="float32"), layout(dtype="float32")),
}


@pytest.mark.parametrize("pair", LAYOUTS)
def test_relay_between_layouts_is_equal_bit_for_bit(make: Any, pair: str) -> None:
    src, dst = LAYOUTS[pair]
    make(src, dst).transfer(tokens=27).run()


# Process groups take seconds to make: gloo relays groups that differ, below.
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if "collective" not in name], indirect=True)
@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("dst_tp", [1, 2, 4])
@pytest.mark.parametrize("src_tp", [1, 2, 4])
def test_plane_without_heads_reaches_every_rank_whole(make: Any, src_tp: int, dst_tp: int, pp: int) -> None:
    src = KVLayout("model", LATENT, tp_size=src_tp)
    dst = KVLayout("model", LATENT, tp_size=dst_tp, pp_layers=STAGES[pp])
    make(src, dst).transfer(tokens=11).run()


@pytest.mark.parametrize(("src", "dst"), [((1, 1), (2, 2)), ((4, 1), (1, 3)), ((2, 2), (4, 1)), ((2, 3), (2, 2))])
def test_layer_groups_that_differ_are_relayed_together(make: Any, src: tuple[int, int], dst: tuple[int, int]) -> None:
    layouts = [KVLayout("model", MIXED, tp_size=tp, pp_layers=STAGES[pp]) for tp, pp in (src, dst)]
    make(*layouts).transfer(tokens=27, held=1).run()


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 64])
def test_partial_last_block_is_relayed(make: Any, tokens: int) -> None:
    make().transfer(tokens=tokens).run()


@pytest.mark.parametrize("held", [1, 3, 4])
def test_held_blocks_are_not_sent_nor_written(make: Any, held: int) -> None:
    transfer = make().transfer(tokens=14, held=held)
    transfer.poison_destination()
    transfer.run()
    for rank in transfer.cluster.receivers:
        assert (kv_words(rank.storage)[:, :, transfer.dst_blocks[:held]].view(np.uint8) == PATTERN).all()


def test_grant_before_anything_is_final(make: Any) -> None:
    transfer = make().transfer()
    transfer.compute()
    transfer.hand_over()
    transfer.check_received()


def test_grant_after_everything_is_final(make: Any) -> None:
    transfer = make().transfer()
    transfer.compute()
    transfer.open_senders()
    transfer.final()
    transfer.open_receivers()
    transfer.grant()
    transfer.check_received()


def test_second_grant_changes_nothing(make: Any) -> None:
    transfer = make().transfer()
    transfer.compute()
    transfer.hand_over(num_blocks=2)
    transfer.grant()
    transfer.final()
    transfer.check_received()


def test_layers_and_chunks_go_out_as_they_become_final(make: Any) -> None:
    """Only final blocks are read: the rest of the source is written later."""
    cluster = make()
    transfer = cluster.transfer(tokens=27)
    transfer.open_receivers()
    transfer.open_senders()
    transfer.grant()
    source = kv_words(cluster.senders[0].storage)
    for upto in (2, 5, transfer.total):
        for layer in range(4):
            source[layer][:, transfer.src_blocks[:upto]] = transfer.truth[layer, :, :upto]
            transfer.final(upto, range(layer, layer + 1))
            wait_until(
                lambda layer=layer, upto=upto: np.array_equal(
                    kv_words(cluster.receivers[0].storage)[layer][:, transfer.dst_blocks[:upto]],
                    transfer.truth[layer, :, :upto],
                ),
                f"layer {layer} up to block {upto}",
            )
            if (layer, upto) != (3, transfer.total):
                assert not cluster.receivers[0].recorder.events
                assert not cluster.senders[0].recorder.events
    transfer.check_received()


def test_fully_held_transfer_completes_without_sending(make: Any) -> None:
    make().transfer(tokens=14, held=4).run()


def test_many_transfers_interleave(make: Any) -> None:
    cluster = make(layout(tp=2), layout(tp=1, pp=(2, 2)), num_blocks=256)
    ids = np.random.default_rng(3).permutation(256)
    transfers = [cluster.transfer(f"r{i}", tokens=20 + i, seed=i, held=i % 3) for i in range(12)]
    at = 0
    for t in transfers:
        t.src_blocks = t.dst_blocks = ids[at : at + t.total].tolist()
        at += t.total
        t.compute()
        t.open_senders()
    for layer in range(4):
        for i, t in enumerate(transfers):
            if layer == i % 4:
                t.open_receivers()
                t.grant()
            t.final(layers=range(layer, layer + 1))
    for t in transfers:
        t.check_received()
