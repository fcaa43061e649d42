"""Conformance of every transport: aborts, lost peers, close and failures release all blocks exactly once."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pytest
from support.kv_words import kv_words
from support.transfer_harness import PATTERN, Cluster, layout, wait_until
from support.transport_conformance import relay_threads

from common.base.errors import PeerLost, TransferError
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    DisconnectOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
)


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
        rank.end.apply(AbortOrder(old.key))
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
    cluster.senders[0].end.apply(AbortOrder(transfer.key))
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, TransferError)
    # The engine reuses the blocks at once.
    kv_words(cluster.senders[0].storage)[:] = 0xA5
    transfer.final()
    again = cluster.transfer("r", attempt=2, tokens=20, seed=5)
    again.run()
    assert not cluster.receivers[0].recorder.of(transfer.key, Received)
    cluster.receivers[0].end.apply(AbortOrder(transfer.key))
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)


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
            rank.end.apply(AbortOrder(transfer.key))
        transfer.final()
        for rank in cluster.senders:
            rank.recorder.wait(transfer.key, SourceReleased)
        if wave % 2:
            cluster.receivers[0].end.apply(AbortOrder(transfer.key))
        cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)
        whole = cluster.transfer(f"w{wave}", attempt=2, tokens=100, seed=100 + wave)
        whole.dst_blocks = transfer.dst_blocks
        whole.run()
    bystander.check_content()


def test_disconnect_fails_transfers_to_that_incarnation_and_the_next_grant_reconnects(make: Any) -> None:
    cluster = make()
    sender, receiver = cluster.senders[0], cluster.receivers[0]
    transfer = cluster.transfer(tokens=100)
    transfer.compute()
    transfer.hand_over(num_blocks=20)
    sender.end.apply(DisconnectOrder("dst-0"))
    cluster.transfer("other", tokens=4, seed=3).run()
    assert not sender.recorder.of(transfer.key, SourceReleased), "it goes to another incarnation"
    sender.end.apply(DisconnectOrder("dst-1"))
    assert isinstance(sender.recorder.wait(transfer.key, SourceReleased).error, PeerLost)
    receiver.end.apply(AbortOrder(transfer.key))
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
    peer = next(iter(cluster.senders[0].end._send._peers.values()))
    wait_until(lambda: not peer.in_flight, "the whole window is free again")
    assert not cluster.receivers[0].end._receive._unanswered
    cluster.receivers[0].end.apply(AbortOrder(transfer.key))
    cluster.transfer("after", seed=1).run()


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
    assert not relay_threads()
    gc.collect()  # the simulated GPU is freed with its storage
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, "file descriptors return")
