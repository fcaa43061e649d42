"""Conformance of every transport: deadlines count progress, and callbacks may fail or call back."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from support.kv_words import kv_words
from support.mock_clock import MockClock
from support.transfer_harness import Cluster, Recorder, wait_until

from common.base.errors import DeadlineExceeded
from common.control.messages import AttemptKey
from common.engine.kv_transfer import (
    AbortOrder,
    DestinationReleased,
    OpenDestinationOrder,
    Received,
    ReceiveFailed,
    SourceReleased,
    TransferPlan,
)


def _wake(cluster: Cluster) -> None:
    """Make the threads look at the mock clock, which does not wake them."""
    for rank in [*cluster.senders, *cluster.receivers]:
        rank.end.apply(AbortOrder(AttemptKey("nobody", 1)))


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
            rank.end.apply(AbortOrder(AttemptKey("nobody", 1)))  # wakes the thread, which the mock clock does not
        return bool(cluster.senders[0].recorder.events and cluster.receivers[0].recorder.events)

    wait_until(deadline_has_passed, "both deadlines")
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, DeadlineExceeded)
    failed = cluster.receivers[0].recorder.wait(transfer.key, ReceiveFailed)
    assert isinstance(failed.error, DeadlineExceeded)
    transfer.poison_destination()
    transfer.final()
    cluster.receivers[0].end.apply(AbortOrder(transfer.key))
    cluster.receivers[0].recorder.wait(transfer.key, DestinationReleased)
    transfer.check_destination_untouched()


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
            plan = TransferPlan(key, [[1]], [1], cluster.transfer(tokens=4).hashes, 9.0)
            receiver.apply(OpenDestinationOrder(plan, cluster.dst, cluster.src_layout))
            recorder.wait(key, Received)
            recorder.wait(key, DestinationReleased)
    finally:
        receiver.close()


def test_callback_may_open_the_next_transfer_of_the_same_key(make: Any, transport: Any) -> None:
    cluster = make()
    recorder, reopened = Recorder(), threading.Event()
    transfer = cluster.transfer()
    plan = TransferPlan(transfer.key, [transfer.dst_blocks], [0], transfer.hashes, 60.0)
    incoming = OpenDestinationOrder(plan, cluster.dst, cluster.src_layout)

    def on_event(event: Any) -> None:
        recorder(event)
        if isinstance(event, DestinationReleased) and not reopened.is_set():
            reopened.set()
            receiver.apply(incoming)

    receiver = transport.receiver(cluster.receivers[0].storage, cluster.dst_layout, 0, on_event, cluster.clock)
    try:
        receiver.apply(incoming)
        receiver.apply(AbortOrder(transfer.key))
        recorder.wait(transfer.key, DestinationReleased)
        wait_until(reopened.is_set, "the callback ran")
    finally:
        receiver.close()
    assert len(recorder.of(transfer.key, DestinationReleased)) == 2
