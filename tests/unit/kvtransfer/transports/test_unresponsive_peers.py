"""A receiver that accepts messages and never acknowledges them, or whose connection breaks, over ZMQ and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from support import transports
from support.fake_receivers import FakeShmReceiver, FakeZmqReceiver
from support.mock_clock import MockClock

from common.base.errors import DeadlineExceeded, PeerLost
from common.control.messages import AttemptKey
from common.engine.kv_transfer import AbortOrder, SourceReleased

FAKES = {"zmq": (transports.zmq, FakeZmqReceiver), "shm": (transports.shm, FakeShmReceiver)}


@pytest.fixture(params=FAKES)
def make(request: pytest.FixtureRequest) -> Iterator[Any]:
    with transports.clusters(FAKES[request.param][0]) as make:
        yield make


@pytest.fixture
def fake(request: pytest.FixtureRequest, make: Any) -> Iterator[Any]:
    receiver = FAKES[request.node.callspec.params["make"]][1]()
    yield receiver
    receiver.close()


def test_silent_peer_delays_no_other_and_its_transfers_end_at_their_deadline(make: Any, fake: Any) -> None:
    clock = MockClock()
    cluster = make(clock=clock)
    stuck = [cluster.transfer(f"stuck{i}", tokens=120, timeout_s=5.0) for i in range(3)]
    for t in stuck:
        t.compute()
        t.open_senders()
        t.grant(fake.peer)
        t.final()
    for i in range(3):
        cluster.transfer(f"ok{i}", tokens=60, seed=i).run()
    assert not any(cluster.senders[0].recorder.of(t.key, SourceReleased) for t in stuck)
    clock.advance(6.0)
    cluster.senders[0].end.apply(AbortOrder(AttemptKey("nobody", 1)))
    for t in stuck:
        assert isinstance(cluster.senders[0].recorder.wait(t.key, SourceReleased).error, DeadlineExceeded)


def test_connection_that_breaks_with_the_last_slices_in_flight_fails_the_transfer(make: Any, fake: Any) -> None:
    """Everything was sent; otherwise only the receiver's deadline would notice the loss."""
    cluster = make()
    transfer = cluster.transfer(tokens=4)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    fake.accept()
    transfer.final()
    assert fake.next() is not None
    fake.drop()
    assert isinstance(cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error, PeerLost)


def test_transfer_that_waits_behind_another_one_has_no_deadline_while_that_one_moves() -> None:
    clock = MockClock()
    with transports.clusters(transports.zmq) as make, closing(FakeZmqReceiver()) as fake:
        cluster = make(clock=clock)
        sent = [cluster.transfer(name, tokens=tokens, timeout_s=8.0) for name, tokens in (("long", 120), ("short", 30))]
        for transfer in sent:
            transfer.compute()
            transfer.open_senders()
            transfer.grant(fake.peer)
            transfer.final()
        recorder, order = cluster.senders[0].recorder, []
        while not all(recorder.of(transfer.key, SourceReleased) for transfer in sent):
            message = fake.next(timeout_s=0.5)
            if message is not None:
                identity, header, _ = message
                order.append(header.key.request_id)
                clock.advance(1.0)
                fake.ack(identity, header)
        assert [recorder.wait(transfer.key, SourceReleased).error for transfer in sent] == [None, None]
        assert order.index("short") > 8
