"""Guarantees of the shared memory transport: its memory has no name, leaves nothing behind, and lets no peer harm another."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support import transports
from support.fake_receivers import FakeShmReceiver
from support.mock_clock import MockClock
from support.transfer_harness import DEADLINE_S, Cluster, layout, wait_until

from common.base.errors import PeerLost, ProtocolError
from common.control.messages import AttemptKey, PeerRef
from common.engine.kv_transfer import AbortOrder, SourceReleased
from kvtransfer import wire
from kvtransfer.transfer_end import TransferEnd
from kvtransfer.transports.same_host import host_id
from kvtransfer.transports.shm import connector, ring


@pytest.fixture
def make() -> Iterator[Any]:
    with transports.clusters(partial(transports.shm, num_pages=3)) as make:
        yield make


@pytest.fixture
def fake() -> Iterator[FakeShmReceiver]:
    receiver = FakeShmReceiver()
    yield receiver
    receiver.close()


def test_pages_are_bounded_and_not_rewritten_before_their_ack(make: Any, fake: FakeShmReceiver) -> None:
    cluster = make()
    transfer = cluster.transfer(tokens=100)
    transfer.compute()
    transfer.open_senders()
    transfer.grant(fake.peer)
    fake.accept()
    transfer.final()
    seen = [fake.next() for _ in range(3)]
    fake.connected.settimeout(0.1)
    with pytest.raises(TimeoutError):
        fake.next()
    fake.connected.settimeout(DEADLINE_S)
    assert len({page for page, _, _ in seen}) == 3
    for page, _, payload in seen:
        assert fake.ring.payload(page, len(payload)).tobytes() == payload
    for _, header, _ in seen:
        fake.ack(header)
    sent = sum(len(payload) for _, _, payload in seen)
    while sent < cluster.src_layout.spec.bytes_per_block * transfer.total:
        _, header, payload = fake.next()
        want = b"".join(
            transfer.truth[s.layer_lo : s.layer_hi, :, s.block_lo : s.block_hi].tobytes() for s in header.slices
        )
        assert payload == want
        fake.ack(header)
        sent += len(payload)
    assert cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error is None


@pytest.mark.parametrize("place", ["unix://host/kvrelay-nobody-listens", "unix://host/" + "x" * 200])
def test_unreachable_receiver_fails_the_transfer_at_once(make: Any, place: str) -> None:
    cluster = make()
    transfer = cluster.transfer()
    transfer.open_senders()
    transfer.grant(PeerRef("decode", "dst-1", "", [f"shm+{place.replace('host', host_id() or '')}"]))
    assert isinstance(cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error, PeerLost)
    cluster.transfer("good").run()


def test_process_without_descriptors_fails_only_the_transfer_that_needs_a_connection(
    make: Any, fake: FakeShmReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make()
    bystander = cluster.transfer("bystander", tokens=60)
    bystander.compute()
    bystander.hand_over(num_blocks=3)
    listener = cluster.receivers[0].end._receive._listeners[0]
    wait_until(lambda: bool(listener._senders), "it is connected, at both ends")

    class Nothing(socket.socket):
        def __init__(self, *_: Any, **__: Any) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    poor = cluster.transfer("poor", tokens=4)
    poor.open_senders()
    monkeypatch.setattr(socket, "socket", Nothing)
    poor.grant(fake.peer)
    error = cluster.senders[0].recorder.wait(poor.key, SourceReleased).error
    monkeypatch.undo()
    assert isinstance(error, PeerLost)
    assert "Too many open files" in error.message
    bystander.final()
    bystander.check_received()


def test_socket_of_another_user_in_place_of_the_receiver_gets_no_memory(
    make: Any, fake: FakeShmReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any process that knows the address may bind its name once the receiver has ended."""
    monkeypatch.setattr(connector, "user_of_peer", lambda _: os.geteuid() + 1)
    cluster = make()
    transfer = cluster.transfer()
    transfer.open_senders()
    transfer.grant(fake.peer)
    error = cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error
    assert isinstance(error, PeerLost)
    assert "user" in error.message
    connected, _ = fake.listener.accept()
    with connected:
        connected.settimeout(DEADLINE_S)
        data, fds, _, _ = socket.recv_fds(connected, 64, 1)
        assert (data, fds) == (b"", [])


def connect(receiver: TransferEnd) -> socket.socket:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected.settimeout(DEADLINE_S)
    connected.connect("\0" + receiver.address.rpartition("/")[2])
    return connected


class NoDescriptors:
    """A listening socket in a process that has no file descriptor left."""

    def __init__(self, real: socket.socket) -> None:
        self.real, self.tries = real, 0

    def accept(self) -> Any:
        self.tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def fileno(self) -> int:
        return self.real.fileno()


def test_receiver_out_of_descriptors_accepts_senders_later_and_fails_no_transfer(make: Any) -> None:
    clock = MockClock()
    cluster = make(clock=clock)
    receiver = cluster.receivers[0].end
    listener = receiver._receive._listeners[0]
    live = cluster.transfer("live")
    live.open_receivers()
    real = listener._socket
    listener._socket = none_left = NoDescriptors(real)
    waiting = cluster.transfer("waiting")
    waiting.compute()
    waiting.hand_over()
    wait_until(lambda: listener._accept_again_s is not None, "the accept has failed")
    for _ in range(20):
        receiver.apply(AbortOrder(AttemptKey("nobody", 1)))  # one turn of its thread
    assert none_left.tries == 1, "it does not spin"
    listener._socket = real
    clock.advance(2.0)
    receiver.apply(AbortOrder(AttemptKey("nobody", 1)))
    waiting.check_received()
    assert not cluster.receivers[0].recorder.of(live.key, object)


def hostile_greeting(what: str) -> tuple[list[bytes], list[int]]:
    """The messages to send, and the descriptors to pass with the first one."""
    made, fd, greeting = ring.create(2, 4096)
    match what:
        case "no memory":
            os.close(fd)
            return [greeting], []
        case "garbage":
            return [b"\xff" * 20], [fd]
        case "larger than it is":
            return [struct.pack("<8sIQ", b"kvring01", 3, 4096)], [fd]
        case "huge":
            return [struct.pack("<8sIQ", b"kvring01", 2**31, 2**40)], [fd]
        case "not sealed":
            unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
            os.ftruncate(unsealed, os.fstat(fd).st_size)
            os.close(fd)
            return [greeting], [unsealed]
        case "no such page":
            return [greeting, struct.pack("<IIQ", 2, 10, 10)], [fd]
        case "payload beyond the page":
            return [greeting, struct.pack("<IIQ", 0, 10, 4097)], [fd]
        case "header beyond its place":
            return [greeting, struct.pack("<IIQ", 0, wire.MAX_HEADER_BYTES + 1, 10)], [fd]
        case "short message":
            return [greeting, b"abc"], [fd]
        case _:
            made.header(0, 10)[:] = 255
            return [greeting, struct.pack("<IIQ", 0, 10, 10)], [fd]


@pytest.mark.parametrize(
    "what",
    [
        "no memory",
        "garbage",
        "larger than it is",
        "huge",
        "not sealed",
        "no such page",
        "payload beyond the page",
        "header beyond its place",
        "short message",
        "garbage header",
    ],
)
def test_sender_of_a_malformed_message_is_disconnected_and_the_receiver_continues(make: Any, what: str) -> None:
    cluster = make()
    receiver = cluster.receivers[0].end
    with connect(receiver) as connected:
        messages, fds = hostile_greeting(what)
        socket.send_fds(connected, messages[:1], fds)
        for fd in fds:
            os.close(fd)
        for message in messages[1:]:
            connected.send(message)
        assert connected.recv(100) == b"", "disconnected"
    cluster.transfer().run()


def test_silent_connection_delays_no_transfer(make: Any) -> None:
    cluster = make()
    with connect(cluster.receivers[0].end):
        cluster.transfer().run()


def test_sender_of_another_user_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = make()
    real = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    with connect(cluster.receivers[0].end) as connected:
        assert connected.recv(100) == b""


def test_size_of_a_ring_cannot_be_changed() -> None:
    _, fd, greeting = ring.create(2, 4096)
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        theirs = ring.accept(greeting, fd)
        with pytest.raises(ValueError, match="read-only"):
            theirs.payload(0, 10)[:] = 1
        with pytest.raises(ProtocolError):
            ring.accept(greeting[:-1], fd)
    finally:
        os.close(fd)


def test_rings_are_unmapped_and_have_no_name() -> None:
    def mapped() -> list[str]:
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "kvrelay-ring" in line]

    before = mapped()
    cluster = Cluster(transports.shm(), layout(tp=2), layout(pp=(2, 2)))
    try:
        cluster.transfer().run()
        assert len(mapped()) > len(before)
        assert all("/memfd:kvrelay-ring" in line for line in mapped())
    finally:
        cluster.close()
    wait_until(lambda: mapped() == before, "both ends have unmapped their rings")
