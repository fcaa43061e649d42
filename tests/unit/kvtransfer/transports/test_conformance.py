"""What every KV transport must do. Each transport is a fixture parameter; each test runs on each of them."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from support import transports
from support.kv_words import kv_words
from support.transfer_harness import PATTERN, Cluster, Recorder, layout, wait_until

from common.base.clock import MockClock
from common.base.errors import CorruptSlice, DeadlineExceeded, HandshakeRefused, PeerLost, TransferError
from common.control.messages import AttemptKey, PeerRef
from common.engine.kv_transfer import (
    DestinationReleased,
    IncomingTransfer,
    OutgoingTransfer,
    Received,
    ReceiveFailed,
    SourceReleased,
)
from common.kv.layout import KVLayout
from common.kv.spec import KVPlane, KVSpec, LayerGroup
from kvtransfer.transports.collective.connector import CollectiveConnector
from kvtransfer.transports.collective.listener import CollectiveListener
from kvtransfer.transports.shm.connector import ShmConnector
from kvtransfer.transports.shm.listener import ShmListener
from kvtransfer.transports.zmq import ZmqConnector, ZmqListener

TRANSPORTS = {
    "cuda_ipc": transports.cuda_ipc,
    "staged-zmq": lambda: transports.staged(
        partial(ZmqConnector, staging_bytes=1024, window=4), partial(ZmqListener, "127.0.0.1", 0)
    ),
    "staged-collective": lambda: transports.staged(
        partial(CollectiveConnector, "127.0.0.1", staging_bytes=1024, window=4),
        partial(CollectiveListener, "127.0.0.1", 0),
    ),
    "staged-shm": lambda: transports.staged(partial(ShmConnector, page_bytes=1024, num_pages=4), ShmListener),
    "zmq": transports.zmq,
    "loopback": transports.loopback,
    "shm": transports.shm,
    "collective": transports.collective,
}


def _threads() -> set[str]:
    return {t.name for t in threading.enumerate() if t.name.startswith("kv-")}


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Any:
    return TRANSPORTS[request.param]()


@pytest.fixture
def make(transport: Any) -> Iterator[Any]:
    """Makes clusters. Checks at the end that every open was released once and no thread is left."""
    clusters: list[Cluster] = []
    opened: list[tuple[Recorder, AttemptKey]] = []

    def factory(src: KVLayout | None = None, dst: KVLayout | None = None, **kw: Any) -> Cluster:
        cluster = Cluster(transport, src or layout(), dst or layout(), **kw)
        clusters.append(cluster)
        for rank in [*cluster.senders, *cluster.receivers]:
            real_open, recorder = rank.end.open, rank.recorder

            def open_(transfer: Any, real_open: Any = real_open, recorder: Recorder = recorder) -> None:
                real_open(transfer)
                opened.append((recorder, transfer.key))

            rank.end.open = open_
        return cluster

    yield factory
    for cluster in clusters:
        cluster.close()
    assert not _threads()
    for recorder, key in opened:
        kinds = [type(e).__name__ for e in recorder.of(key, object)]
        times = opened.count((recorder, key))
        assert sum(k.endswith("Released") for k in kinds) == times, (key, kinds)
        assert kinds[-1].endswith("Released"), (key, kinds)


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


@pytest.mark.parametrize("final_layers", [0, 1, 2, 3, 4])
def test_receiver_abort_stops_all_writes_before_the_blocks_are_reused(make: Any, final_layers: int) -> None:
    cluster = make(layout(), layout(tp=2))
    old = cluster.transfer("r", attempt=1, tokens=100)
    old.compute()
    old.open_receivers()
    old.open_senders()
    old.grant()
    old.final(layers=range(final_layers)) if final_layers else None
    for rank in cluster.receivers:
        rank.end.abort(old.key)
    for rank in cluster.receivers:
        rank.recorder.wait(old.key, DestinationReleased)
    old.poison_destination()
    old.final()
    cluster.senders[0].recorder.wait(old.key, SourceReleased)
    # A later transfer on the same connection: all late messages of the old one have arrived when it ends.
    probe = cluster.transfer("probe", tokens=1, held=1)
    probe.run()
    fence = cluster.transfer("r", attempt=2, tokens=4, seed=9)
    fence.run()
    for rank in cluster.receivers:
        others = [b for b in range(cluster.num_blocks) if b not in fence.dst_blocks]
        assert (kv_words(rank.storage)[:, :, others].view(np.uint8) == PATTERN).all()


@pytest.mark.parametrize("final_layers", [0, 2, 4])
def test_sender_abort_releases_the_source_and_the_receiver_never_completes(make: Any, final_layers: int) -> None:
    cluster = make()
    transfer = cluster.transfer(tokens=100)
    transfer.compute()
    transfer.hand_over(num_blocks=3)
    if final_layers:
        transfer.final(layers=range(final_layers - 1))
    cluster.senders[0].end.abort(transfer.key)
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, TransferError)
    # The engine reuses the blocks at once.
    kv_words(cluster.senders[0].storage)[:] = 0xA5
    transfer.final()
    again = cluster.transfer("r", attempt=2, tokens=20, seed=5)
    again.run()
    assert not cluster.receivers[0].recorder.of(transfer.key, Received)
    cluster.receivers[0].end.abort(transfer.key)
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)


def test_message_of_another_attempt_disturbs_nothing(make: Any) -> None:
    cluster = make()
    current = cluster.transfer("r", attempt=2, seed=1)
    current.compute()
    current.open_receivers()
    stale = cluster.transfer("r", attempt=1, seed=2)
    stale.open_senders()
    stale.grant()
    stale.final()
    cluster.senders[0].recorder.wait(stale.key, SourceReleased)
    wait_until(lambda: cluster.receivers[0].end.discarded_messages > 0, "the stale message is counted")
    current.open_senders()
    current.grant()
    current.final()
    current.check_received()


def test_stale_source_incarnation_is_refused(make: Any) -> None:
    cluster = make()
    transfer = cluster.transfer()
    transfer.compute()
    transfer.open_receivers(src_incarnation="src-2")
    transfer.poison_destination()
    transfer.open_senders()
    transfer.grant()
    transfer.final(num_blocks=1)
    wait_until(lambda: cluster.receivers[0].end.discarded_messages > 0, "the stale message is counted")
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, TransferError)
    transfer.check_destination_untouched()
    assert not cluster.receivers[0].recorder.events
    cluster.receivers[0].end.abort(transfer.key)
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)


def test_stale_destination_incarnation_is_refused(make: Any) -> None:
    cluster = make()
    transfer = cluster.transfer()
    transfer.open_receivers()
    transfer.poison_destination()
    transfer.open_senders()
    dst = cluster.dst
    transfer.grant(type(dst)(dst.node_id, "dst-0", "", dst.data_addresses))
    transfer.final(num_blocks=1)
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, TransferError)
    transfer.check_destination_untouched()


def test_wrong_block_hash_fails_the_transfer_and_writes_nothing(make: Any) -> None:
    cluster = make()
    transfer = cluster.transfer()
    other = cluster.transfer(seed=7)
    transfer.compute()
    transfer.open_receivers(hashes=other.hashes)
    transfer.poison_destination()
    transfer.open_senders()
    transfer.grant()
    transfer.final(num_blocks=1)
    failed = cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
    assert isinstance(failed.error, CorruptSlice)
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, CorruptSlice)
    transfer.check_destination_untouched()
    assert not cluster.receivers[0].recorder.of(transfer.key, DestinationReleased)
    cluster.receivers[0].end.abort(transfer.key)
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)


def test_duplicate_slice_fails_the_transfer(make: Any, transport: Any) -> None:
    cluster = make()
    transfer = cluster.transfer()
    transfer.compute()
    transfer.open_receivers()
    storage, recorder = cluster.senders[0].storage, Recorder()
    twin = transport.sender(storage, cluster.src_layout, 0, recorder, cluster.clock)
    try:
        for end in (cluster.senders[0].end, twin):
            end.open(OutgoingTransfer(transfer.key, "src-1", transfer.src_blocks, transfer.hashes, 14, 60.0))
        transfer.grant()
        transfer.final(num_blocks=1)
        wait_until(
            lambda: np.array_equal(
                kv_words(cluster.receivers[0].storage)[:, :, transfer.dst_blocks[0]], transfer.truth[:, :, 0]
            ),
            "the first block",
        )
        cluster.senders[0].end, original = twin, cluster.senders[0].end
        transfer.grant()
        transfer.final(num_blocks=1)
        failed = cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
        assert isinstance(failed.error, CorruptSlice)
        cluster.senders[0].end = original
    finally:
        twin.close()


def test_incompatible_layouts_are_refused_at_both_ends(make: Any) -> None:
    cluster = make(layout(dtype="bfloat16"), layout(dtype="float16"))
    transfer = cluster.transfer()
    transfer.open_receivers()
    transfer.open_senders()
    transfer.grant()
    failed = cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(failed.error, HandshakeRefused)
    assert isinstance(released.error, HandshakeRefused)


def test_deadlines_pass_at_both_ends(make: Any) -> None:
    clock = MockClock()
    cluster = make(clock=clock)
    transfer = cluster.transfer(timeout_s=5.0)
    transfer.compute()
    transfer.hand_over(num_blocks=1)
    wait_until(
        lambda: np.array_equal(
            kv_words(cluster.receivers[0].storage)[:, :, transfer.dst_blocks[0]], transfer.truth[:, :, 0]
        ),
        "the first block",
    )
    assert not cluster.senders[0].recorder.events

    def deadline_has_passed() -> bool:
        # Repeatedly: an ack that is taken only now counts as progress at the advanced time.
        clock.advance(6.0)
        for rank in [*cluster.senders, *cluster.receivers]:
            rank.end.abort(AttemptKey("nobody", 1))  # wakes the thread, which the mock clock does not
        return bool(cluster.senders[0].recorder.events and cluster.receivers[0].recorder.events)

    wait_until(deadline_has_passed, "both deadlines")
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, DeadlineExceeded)
    failed = cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
    assert isinstance(failed.error, DeadlineExceeded)
    transfer.poison_destination()
    transfer.final()
    cluster.receivers[0].end.abort(transfer.key)
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)
    transfer.check_destination_untouched()


def _wake(cluster: Cluster) -> None:
    """Make the threads look at the mock clock, which does not wake them."""
    for rank in [*cluster.senders, *cluster.receivers]:
        rank.end.abort(AttemptKey("nobody", 1))


def test_slow_transfer_continues_as_long_as_it_makes_progress(make: Any) -> None:
    """Four blocks, each just in time; together they take much longer than the timeout."""
    clock = MockClock()
    cluster = make(clock=clock)
    transfer = cluster.transfer(timeout_s=5.0)
    transfer.compute()
    transfer.open_receivers()
    transfer.open_senders()
    transfer.grant()
    for upto in range(1, transfer.total + 1):
        clock.advance(4.0)
        _wake(cluster)
        transfer.final(num_blocks=upto)
        wait_until(
            lambda upto=upto: np.array_equal(
                kv_words(cluster.receivers[0].storage)[:, :, transfer.dst_blocks[:upto]], transfer.truth[:, :, :upto]
            ),
            f"block {upto}",
        )
    transfer.check_received()


def test_sender_waits_for_its_grant_without_a_deadline(make: Any) -> None:
    clock = MockClock()
    cluster = make(clock=clock)
    transfer = cluster.transfer(timeout_s=5.0)
    transfer.compute()
    transfer.open_senders()
    transfer.final()
    clock.advance(100.0)
    _wake(cluster)
    transfer.open_receivers()
    transfer.grant()
    transfer.check_received()


def test_disconnect_fails_transfers_to_that_incarnation_and_the_next_grant_reconnects(make: Any) -> None:
    cluster = make()
    sender, receiver = cluster.senders[0], cluster.receivers[0]
    transfer = cluster.transfer(tokens=100)
    transfer.compute()
    transfer.hand_over(num_blocks=20)
    sender.end.disconnect("dst-0")
    cluster.transfer("other", tokens=4, seed=3).run()
    assert not sender.recorder.of(transfer.key, SourceReleased), "it goes to another incarnation"
    sender.end.disconnect("dst-1")
    assert isinstance(sender.recorder.wait(transfer.key, SourceReleased).error, PeerLost)
    receiver.end.abort(transfer.key)
    receiver.recorder.wait(transfer.key, DestinationReleased)
    cluster.transfer(attempt=2, tokens=100, seed=5).run()


def test_sender_close_releases_the_source(make: Any) -> None:
    cluster = make()
    transfer = cluster.transfer(tokens=100)
    transfer.compute()
    transfer.hand_over(num_blocks=20)
    cluster.senders[0].end.close()
    released = cluster.senders[0].recorder.of(transfer.key, SourceReleased)
    assert len(released) == 1
    assert isinstance(released[0].error, TransferError)
    # Lent blocks may have been taken back during a copy, which the receiver then reports.
    assert not cluster.receivers[0].recorder.of(transfer.key, Received)
    with pytest.raises(TransferError, match="closed"):
        transfer.open_senders()


def test_receiver_close_releases_the_destination_and_ends_the_sender(make: Any) -> None:
    cluster = make()
    transfer = cluster.transfer(tokens=100)
    transfer.compute()
    transfer.hand_over(num_blocks=1)
    wait_until(
        lambda: np.array_equal(
            kv_words(cluster.receivers[0].storage)[:, :, transfer.dst_blocks[0]], transfer.truth[:, :, 0]
        ),
        "the first block",
    )
    cluster.receivers[0].end.close()
    assert len(cluster.receivers[0].recorder.of(transfer.key, DestinationReleased)) == 1
    transfer.poison_destination()
    transfer.final()
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, TransferError)
    transfer.check_destination_untouched()


def test_grant_whose_addresses_do_not_fit_its_ranks_fails_the_transfer(make: Any) -> None:
    """One address more than ranks, the first one twice: rank 1 would get the slices of rank 2."""
    cluster = make(layout(), layout(tp=2))
    transfer = cluster.transfer()
    transfer.open_senders()
    first, second = cluster.dst.data_addresses
    transfer.grant(PeerRef("decode", "dst-1", "", [first, first, second]))
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert "3 data addresses for 2 ranks, 2 of them different" in str(released.error)


def test_opening_a_live_key_again_is_refused_and_the_first_goes_on(make: Any) -> None:
    transfer = make().transfer()
    transfer.compute()
    transfer.open_receivers()
    transfer.open_senders()
    with pytest.raises(TransferError, match="open already"):
        transfer.open_senders()
    with pytest.raises(TransferError, match="open already"):
        transfer.open_receivers()
    transfer.grant()
    transfer.final()
    transfer.check_received()


def test_message_at_which_the_receiver_fails_is_acknowledged(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its sender would wait for the ack, with a smaller window, until its own deadline."""
    cluster = make()
    copier = cluster.receivers[0].end._copier
    scatter_all = copier.scatter_all

    def fail(*_: Any) -> None:
        monkeypatch.setattr(copier, "scatter_all", scatter_all)
        raise RuntimeError("the GPU is gone")

    cluster.transfer("before").run()
    monkeypatch.setattr(copier, "scatter_all", fail)
    transfer = cluster.transfer(tokens=60)
    transfer.compute()
    transfer.hand_over()
    assert isinstance(cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed).error, TransferError)
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert "I/O thread failed" in str(released.error)
    peer = next(iter(cluster.senders[0].end._peers.values()))
    wait_until(lambda: not peer.in_flight, "the whole window is free again")
    assert not cluster.receivers[0].end._unanswered
    cluster.receivers[0].end.abort(transfer.key)
    cluster.transfer("after", seed=1).run()


def test_calls_about_unknown_keys_are_ignored(make: Any) -> None:
    cluster = make()
    ghost = cluster.transfer("ghost")
    ghost.grant()
    ghost.final()
    cluster.senders[0].end.abort(ghost.key)
    cluster.receivers[0].end.abort(ghost.key)
    cluster.transfer("r").run()
    assert not cluster.senders[0].recorder.of(ghost.key, object)
    assert not cluster.receivers[0].recorder.of(ghost.key, object)


def test_block_outside_the_storage_fails_its_transfer_only(make: Any) -> None:
    cluster = make()
    bad = cluster.transfer("bad")
    bad.src_blocks = bad.dst_blocks = [0, 1, 2, cluster.num_blocks]
    bad.open_receivers()
    bad.open_senders()
    assert cluster.senders[0].recorder.wait(bad.key, SourceReleased).error is not None
    cluster.receivers[0].recorder.wait(bad.key, ReceiveFailed)
    cluster.transfer("good").run()


def test_failing_callback_does_not_prevent_later_events(make: Any, transport: Any) -> None:
    recorder = Recorder()

    def raising(event: Any) -> None:
        recorder(event)
        raise RuntimeError("the owner's bug")

    cluster = make()
    storage = cluster.receivers[0].storage
    receiver = transport.receiver(storage, cluster.dst_layout, 0, raising, cluster.clock)
    try:
        for i in range(2):
            key = AttemptKey(f"r{i}", 1)
            receiver.open(
                IncomingTransfer(key, cluster.dst, cluster.src_layout, [1], cluster.transfer(tokens=4).hashes, 1, 9.0)
            )
            recorder.wait(key, Received)
            recorder.wait(key, DestinationReleased)
    finally:
        receiver.close()


def test_callback_may_open_the_next_transfer_of_the_same_key(make: Any, transport: Any) -> None:
    cluster = make()
    recorder, reopened = Recorder(), threading.Event()
    transfer = cluster.transfer()
    incoming = IncomingTransfer(
        transfer.key, cluster.dst, cluster.src_layout, transfer.dst_blocks, transfer.hashes, 0, 60.0
    )

    def on_event(event: Any) -> None:
        recorder(event)
        if not reopened.is_set():
            reopened.set()
            receiver.open(incoming)

    receiver = transport.receiver(cluster.receivers[0].storage, cluster.dst_layout, 0, on_event, cluster.clock)
    try:
        receiver.open(incoming)
        receiver.abort(transfer.key)
        recorder.wait(transfer.key, DestinationReleased)
        wait_until(reopened.is_set, "the callback ran")
    finally:
        receiver.close()
    assert len(recorder.of(transfer.key, DestinationReleased)) == 2


def test_random_aborts_under_load_never_corrupt_a_neighbour(make: Any) -> None:
    """Several waves over the same destination blocks: an aborted transfer, then a complete one."""
    cluster = make(layout(tp=2), layout(tp=1), num_blocks=64)
    rng = np.random.default_rng(11)
    bystander = cluster.transfer("bystander", tokens=40, seed=1)
    bystander.dst_blocks = list(range(50, 60))
    bystander.run()
    for wave in range(12):
        transfer = cluster.transfer(f"w{wave}", tokens=100, seed=wave)
        transfer.dst_blocks = rng.permutation(50)[: transfer.total].tolist()
        transfer.compute()
        transfer.open_receivers()
        transfer.open_senders()
        transfer.grant()
        transfer.final(num_blocks=int(rng.integers(0, transfer.total)))
        who = cluster.senders if wave % 2 else cluster.receivers
        for rank in who:
            rank.end.abort(transfer.key)
        transfer.final()
        for rank in cluster.senders:
            rank.recorder.wait(transfer.key, SourceReleased)
        if wave % 2:
            cluster.receivers[0].end.abort(transfer.key)
        cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)
        whole = cluster.transfer(f"w{wave}", attempt=2, tokens=100, seed=100 + wave)
        whole.dst_blocks = transfer.dst_blocks
        whole.run()
    bystander.check_content()


def test_nothing_is_left_after_close(make: Any, transport: Any) -> None:
    def cycle() -> None:
        cluster = Cluster(transport, layout(tp=2), layout(pp=(2, 2)))
        cluster.transfer("done").run()
        hanging = cluster.transfer("hanging", seed=1)
        hanging.hand_over(num_blocks=2)
        cluster.close()
        cluster.close()

    cycle()  # the first one also starts pyzmq resources that live as long as the process
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        cycle()
    assert not _threads()
    gc.collect()  # the simulated GPU is freed with its storage
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "file descriptors return")
