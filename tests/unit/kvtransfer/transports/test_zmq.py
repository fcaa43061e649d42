"""Guarantees of the ZMQ transport: bounded memory per peer, isolation of peers, lost connections."""

from __future__ import annotations

import dataclasses
import errno
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from support import transports
from support.fake_receivers import FakeZmqReceiver
from support.mock_clock import MockClock
from support.single_transport import zmq_receiver, zmq_sender
from support.transfer_harness import DEADLINE_S, Recorder, layout, wait_until

import kvtransfer.transports.zmq
from common.base.errors import ConfigError, DeadlineExceeded, HandshakeRefused, PeerLost
from common.control.messages import AttemptKey, PeerRef
from common.engine.kv_transfer import AbortOrder, SourceReleased
from common.kv.rank_layout import KVLayout
from common.kv.spec import KVSpec
from common.kv.storage import KVStorage
from kvtransfer import wire


@pytest.fixture
def make() -> Iterator[Any]:
    with transports.clusters(transports.zmq) as make:
        yield make


@pytest.fixture
def fake() -> Iterator[FakeZmqReceiver]:
    receiver = FakeZmqReceiver()
    yield receiver
    receiver.close()


def test_unacknowledged_messages_are_bounded_and_each_ack_allows_one_more(make: Any, fake: FakeZmqReceiver) -> None:
    cluster = make(window=3)
    transfer = cluster.transfer(tokens=100)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    transfer.final()
    seen = [fake.next() for _ in range(3)]
    assert fake.next(timeout_s=0.1) is None, "the window is full"
    assert not cluster.senders[0].recorder.events
    for identity, header, _ in list(seen):
        fake.ack(identity, header)
    total = cluster.src_layout.spec.bytes_per_block * transfer.total
    while sum(len(payload) for _, _, payload in seen) < total:
        got = fake.next()
        assert got is not None
        fake.ack(*got[:2])
        seen.append(got)
    assert cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error is None
    assert fake.next(timeout_s=0.1) is None, "each byte once"


def test_staging_buffer_is_not_rewritten_before_its_ack(make: Any, fake: FakeZmqReceiver) -> None:
    """Messages wait unread in the socket while the sender has many more to stage."""
    # Large enough that pyzmq does not copy the messages.
    big = KVLayout("model", KVSpec.uniform(4, 2, 512, "float32", block_size=16))
    cluster = make(big, big, message_bytes=2**18, window=2, min_message_bytes=1)
    transfer = cluster.transfer(tokens=32 * 16)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    transfer.final()
    received = 0
    while received < big.spec.bytes_per_block * transfer.total:
        got = fake.next()
        assert got is not None
        identity, header, payload = got
        want = b"".join(
            transfer.truth[s.layer_lo : s.layer_hi, :, s.block_lo : s.block_hi].tobytes() for s in header.slices
        )
        assert payload == want
        received += len(payload)
        fake.ack(identity, header)


def test_unreachable_peer_ends_at_the_deadline(make: Any) -> None:
    cluster = make()
    transfer = cluster.transfer(tokens=120, timeout_s=0.3)
    transfer.open_senders()
    transfer.grant(PeerRef("decode", "dst-1", "", ["zmq+tcp://127.0.0.1:1"]))
    transfer.final()
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, DeadlineExceeded)


@pytest.mark.parametrize(
    ("address", "error"),
    [("carrier-pigeon", HandshakeRefused), ("zmq+pigeon://coop", PeerLost), ("zmq+tcp://127.0.0.1:x", PeerLost)],
)
def test_malformed_address_fails_the_transfer(make: Any, address: str, error: type[Exception]) -> None:
    cluster = make()
    transfer = cluster.transfer()
    transfer.open_senders()
    transfer.grant(PeerRef("decode", "dst-1", "", [address]))
    assert isinstance(cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error, error)
    cluster.transfer("good").run()


def test_peer_that_never_acknowledges_is_given_up_after_the_idle_time(make: Any, fake: FakeZmqReceiver) -> None:
    clock = MockClock()
    cluster = make(clock=clock, idle_s=10.0)
    transfer = cluster.transfer(tokens=120, timeout_s=1000.0)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    transfer.final()
    assert fake.next() is not None
    clock.advance(11.0)
    cluster.senders[0].end.apply(AbortOrder(AttemptKey("nobody", 1)))
    assert isinstance(cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error, PeerLost)


def test_idle_connection_is_closed_and_made_again_on_demand(make: Any) -> None:
    clock = MockClock()
    cluster = make(clock=clock, idle_s=10.0)
    sender = cluster.senders[0].end
    cluster.transfer("first").run()
    wait_until(lambda: all(not p.in_flight for p in sender._send._peers.values()), "every ack is in")
    clock.advance(11.0)
    sender.apply(AbortOrder(AttemptKey("nobody", 1)))
    wait_until(lambda: not sender._send._peers, "the connection is closed")
    cluster.transfer("second").run()


def test_new_incarnation_at_an_address_ends_transfers_to_the_old_one(make: Any, fake: FakeZmqReceiver) -> None:
    cluster = make()
    old, new = cluster.transfer("old", tokens=120), cluster.transfer("new", tokens=4)
    for t in (old, new):
        t.compute()
        t.open_senders()
    old.grant(fake.peer)
    old.final()
    assert fake.next() is not None
    new.grant(dataclasses.replace(fake.peer, incarnation="dst-2"))
    new.final()
    assert isinstance(cluster.senders[0].recorder.wait(old.key, SourceReleased).error, PeerLost)
    headers = []
    while (got := fake.next(timeout_s=0.2)) is not None:
        headers.append(got[1])
        fake.ack(*got[:2])
    assert cluster.senders[0].recorder.wait(new.key, SourceReleased).error is None
    assert {h.dst_incarnation for h in headers if h.key == new.key} == {"dst-2"}


def test_small_layers_wait_to_fill_a_message_unless_they_are_the_last(make: Any, fake: FakeZmqReceiver) -> None:
    kv = layout()
    per_layer = kv.spec.bytes_per_block // kv.spec.num_layers
    cluster = make(message_bytes=2**20, min_message_bytes=2 * per_layer)
    transfer = cluster.transfer(tokens=4)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    transfer.final(layers=range(1))
    assert fake.next(timeout_s=0.1) is None
    transfer.final(layers=range(1, 2))
    got = fake.next()
    assert got is not None
    assert [(s.layer_lo, s.layer_hi) for s in got[1].slices] == [(0, 2)]
    fake.ack(*got[:2])
    transfer.final(layers=range(3, 4))
    assert fake.next(timeout_s=0.1) is None
    transfer.final(layers=range(2, 3))
    got = fake.next()
    assert got is not None
    assert [(s.layer_lo, s.layer_hi) for s in got[1].slices] == [(2, 4)]
    assert not cluster.senders[0].recorder.events, "the link may still lose it"
    fake.ack(*got[:2])
    assert cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error is None


class Cable:
    """A proxy to a port of this host. After `cut` it forwards nothing, while both ends still see an open connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(DEADLINE_S)
        self.port: int = self._server.getsockname()[1]
        self._cut = threading.Event()
        self._ends: tuple[socket.socket, ...] = ()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def cut(self) -> None:
        self._cut.set()
        self._thread.join(DEADLINE_S)

    def close(self) -> None:
        self.cut()
        for end in self._ends:
            end.close()
        self._server.close()

    def _carry(self) -> None:
        near, _ = self._server.accept()
        far = socket.create_connection(("127.0.0.1", self._port))
        self._ends = near, far
        while not self._cut.is_set():
            for end in select.select(self._ends, [], [], 0.01)[0]:
                (far if end is near else near).sendall(end.recv(2**16))


def test_silent_link_fails_the_transfer_before_its_deadline(
    make: Any, fake: FakeZmqReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvtransfer.transports.zmq, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(kvtransfer.transports.zmq, "SILENCE_S", 0.5)
    address = fake.peer.data_addresses[0]
    cable = Cable(int(address.rpartition(":")[2]))
    try:
        cluster = make()
        transfer = cluster.transfer(tokens=4)
        transfer.compute()
        transfer.open_senders()
        transfer.grant(dataclasses.replace(fake.peer, data_addresses=[f"zmq+tcp://127.0.0.1:{cable.port}"]))
        transfer.final()
        assert fake.next() is not None
        cable.cut()
        assert isinstance(cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error, PeerLost)
    finally:
        cable.close()


def test_receiver_closes_the_connection_of_a_silent_sender(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vanished host sends nothing; its connection would stay open for ever."""
    monkeypatch.setattr(kvtransfer.transports.zmq, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(kvtransfer.transports.zmq, "GONE_S", 0.5)
    cluster = make()
    router = cluster.receivers[0].end._receive._listeners[0]._router
    monitor = router.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    cable = Cable(int(router.endpoint.rpartition(":")[2]))
    try:
        transfer = cluster.transfer(tokens=4)
        transfer.compute()
        transfer.open_receivers()
        transfer.open_senders()
        transfer.grant(dataclasses.replace(cluster.dst, data_addresses=[f"zmq+tcp://127.0.0.1:{cable.port}"]))
        transfer.final()
        transfer.check_received()
        cable.cut()
        assert monitor.poll(1000 * DEADLINE_S), "disconnected"
    finally:
        cable.close()
        router.socket.disable_monitor()
        monitor.close()


@pytest.mark.parametrize("what", [zmq.DEALER, zmq.PAIR])
def test_process_without_descriptors_fails_only_the_transfer_that_needs_a_connection(
    make: Any, fake: FakeZmqReceiver, what: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link needs two sockets: its own and its monitor's."""
    cluster = make()
    bystander = cluster.transfer("bystander", tokens=60)
    bystander.compute()
    bystander.hand_over(num_blocks=3)
    socket_of = zmq.Context.socket

    def socket_or_not(context: Any, kind: int, *args: Any, **kwargs: Any) -> Any:
        if kind == what:
            raise zmq.ZMQError(errno.EMFILE)
        return socket_of(context, kind, *args, **kwargs)

    wait_until(lambda: bool(cluster.senders[0].end._send._peers), "it is connected")
    monkeypatch.setattr(zmq.Context, "socket", socket_or_not)
    poor = cluster.transfer("poor", tokens=4)
    poor.open_senders()
    poor.grant(fake.peer)
    error = cluster.senders[0].recorder.wait(poor.key, SourceReleased).error
    monkeypatch.undo()
    assert isinstance(error, PeerLost)
    assert "Too many open files" in error.message
    bystander.final()
    bystander.check_received()


def test_small_layers_of_a_slow_prompt_are_sent_before_the_receiver_gives_up(make: Any, fake: FakeZmqReceiver) -> None:
    clock = MockClock()
    cluster = make(clock=clock, message_bytes=2**20, min_message_bytes=2**20)
    transfer = cluster.transfer(tokens=4, timeout_s=20.0)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    for layer in range(3):
        transfer.final(layers=range(layer, layer + 1))
        assert fake.next(timeout_s=0.1) is None
        clock.advance(6.0)
        cluster.senders[0].end.apply(AbortOrder(AttemptKey("nobody", 1)))
        got = fake.next()
        assert got is not None
        assert [(s.layer_lo, s.layer_hi) for s in got[1].slices] == [(layer, layer + 1)]
        fake.ack(*got[:2])


def test_small_layers_are_sent_in_time_where_the_timeout_is_shorter_than_the_longest_sleep(
    make: Any, fake: FakeZmqReceiver
) -> None:
    """The thread slept until the transfer's deadline, and aborted it with slices that it had kept back to fill a message."""
    cluster = make(message_bytes=2**20, min_message_bytes=2**20)
    transfer = cluster.transfer(tokens=4, timeout_s=1.6)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    transfer.final(layers=range(1))
    got = fake.next()
    assert got is not None
    assert [(s.layer_lo, s.layer_hi) for s in got[1].slices] == [(0, 1)]


@pytest.mark.parametrize("code", ["", "transfer_aborted"])
def test_late_ack_of_an_older_transfer_does_not_count_for_the_next_one_of_the_same_key(
    make: Any, fake: FakeZmqReceiver, code: str
) -> None:
    cluster = make(min_message_bytes=1024)  # all in one message
    sender = cluster.senders[0]
    sent = []
    for _ in range(2):
        transfer = cluster.transfer(tokens=4)
        transfer.compute()
        transfer.open_senders()
        transfer.grant(fake.peer)
        transfer.final()
        got = fake.next()
        assert got is not None
        sent.append(got)
        if len(sent) == 1:
            sender.end.apply(AbortOrder(transfer.key))
            sender.recorder.wait(transfer.key, SourceReleased)
    (identity, old, _), new = sent[0], sent[1][:2]
    ack = wire.SliceAck(old.key, old.sequence, code, "late")
    fake.socket.send_multipart([identity, wire.encode(ack)])
    wait_until(lambda: next(iter(sender.end._send._peers.values())).in_flight == 1, "the late ack is taken")
    cluster.transfer("bystander", tokens=1, held=1).run()
    assert len(sender.recorder.of(transfer.key, SourceReleased)) == 1, "only that of the first"
    fake.ack(*new)
    wait_until(lambda: len(sender.recorder.of(transfer.key, SourceReleased)) == 2, "released by its own ack")
    assert sender.recorder.of(transfer.key, SourceReleased)[1].error is None


def test_staging_smaller_than_one_block_of_one_layer_still_works(make: Any) -> None:
    make(layout(tp=1, heads=4), layout(tp=2, heads=4), message_bytes=1).transfer(tokens=30).run()


def test_block_of_one_layer_above_the_wire_limit_is_a_config_error() -> None:
    huge = KVLayout("m", KVSpec.uniform(1, 4096, 256, "float32"))
    storage = KVStorage(huge, huge.shard(0, 0), 0)
    with pytest.raises(ConfigError, match="one block"):
        zmq_sender(storage, huge, 0, Recorder())


def test_port_in_use_is_a_config_error(make: Any) -> None:
    cluster = make()
    port = int(cluster.receivers[0].end.address.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=str(port)):
        zmq_receiver(cluster.receivers[0].storage, cluster.dst_layout, 0, Recorder(), port=port)
