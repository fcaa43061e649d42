"""A receiver that accepts messages and never acknowledges them, or whose connection breaks, over ZMQ and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import transports
from support.fake_receivers import FakeShmReceiver, FakeZmqReceiver

from common.base.clock import MockClock
from common.base.errors import DeadlineExceeded, PeerLost
from common.control.messages import AttemptKey
from common.engine.kv_transfer import SourceReleased

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
    cluster.senders[0].end.abort(AttemptKey("nobody", 1))
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
