"""Conformance of every transport: calls and messages that do not match a live transfer change nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.kv_words import kv_words
from support.transfer_harness import Recorder, layout, wait_until

from common.base.errors import CorruptSlice, HandshakeRefused, TransferError
from common.control.messages import PeerRef
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    OpenSourceOrder,
    ReceiveFailed,
    SourceReleased,
    TransferPlan,
)


def test_message_of_another_attempt_disturbs_nothing(make: Any) -> None:
    cluster = make()
    current = cluster.transfer("r", attempt=2, seed=1)
    current.compute()
    current.open_receivers()
    stale = cluster.transfer("r", attempt=1, seed=2)
    stale.open_senders()
    stale.grant()
    stale.final()
    released = cluster.senders[0].recorder.wait(stale.key, SourceReleased)
    assert "is not expected here" in str(released.error)
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
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert "is expected from another incarnation than src-1" in str(released.error)
    transfer.check_destination_untouched()
    assert not cluster.receivers[0].recorder.events
    cluster.receivers[0].end.apply(AbortOrder(transfer.key))
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
    cluster.receivers[0].end.apply(AbortOrder(transfer.key))
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
            plan = TransferPlan(transfer.key, [transfer.src_blocks], [0], transfer.hashes, 60.0)
            end.apply(OpenSourceOrder(plan))
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


def test_grant_whose_addresses_do_not_fit_its_ranks_fails_the_transfer(make: Any) -> None:
    """One address more than ranks, the first one twice: rank 1 would get the slices of rank 2."""
    cluster = make(layout(), layout(tp=2))
    transfer = cluster.transfer()
    transfer.open_senders()
    first, second = cluster.dst.data_addresses
    transfer.grant(PeerRef("decode", "dst-1", "", [first, first, second]))
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert "3 data addresses for 2 ranks, 2 of them different" in str(released.error)


def test_calls_about_unknown_keys_are_ignored(make: Any) -> None:
    cluster = make()
    ghost = cluster.transfer("ghost")
    ghost.grant()
    ghost.final()
    cluster.senders[0].end.apply(AbortOrder(ghost.key))
    cluster.receivers[0].end.apply(AbortOrder(ghost.key))
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
