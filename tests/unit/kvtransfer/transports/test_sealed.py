"""KV over ZMQ with certificates: nobody on the way can read it or change it unseen, and nobody without the key gets in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import zmq
from support import single_transport, transports
from support.transfer_harness import DEADLINE_S, Cluster, layout, wait_until
from support.transports import Transport

from common.base.errors import PeerLost, TransferAborted
from common.control.messages import AttemptKey
from common.engine.kv_transfer import AbortOrder, DestinationReleased, ReceiveFailed, SourceReleased
from common.security import sealed_sockets
from common.security.sealed_endpoints import OVERHEAD_BYTES, split_key, with_key
from common.security.sealing import Channel, ServerKey
from kvtransfer import wire
from kvtransfer.transfer_end import TransferEnd
from kvtransfer.transports.zmq import DealerLink, ZmqListener


class Tap:
    """A TCP proxy in front of a port of loopback that keeps all bytes in both directions."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def tapped_cluster(*, seals: bool) -> Iterator[tuple[Cluster, list[Tap]]]:
    taps: list[Tap] = []

    def receiver(*where, **options) -> TransferEnd:
        listener = ZmqListener("127.0.0.1", 0, seals=seals)
        place, key = split_key(listener.offer.endpoint)[0], listener.offer.key
        taps.append(Tap(int(place.rpartition(":")[2])))
        end = TransferEnd(*where, [], [listener], incarnation="dst-1", **options)
        end.address = with_key(f"zmq+tcp://127.0.0.1:{taps[-1].port}", key)
        return end

    options = {"message_bytes": 1024, "window": 4, "min_message_bytes": 1}
    transport = Transport(lambda *where, **kw: single_transport.zmq_sender(*where, **options, **kw), receiver)
    cluster = Cluster(transport, layout(tp=2), layout())
    try:
        yield cluster, taps
    finally:
        cluster.close()
        for tap in taps:
            tap.close()


@pytest.mark.parametrize("seals", [False, True])
def test_what_travels_is_unreadable_if_and_only_if_it_is_sealed(seals: bool) -> None:
    with tapped_cluster(seals=seals) as (cluster, taps):
        transfer = cluster.transfer(tokens=40)
        transfer.run()
        seen = b"".join(bytes(tap.seen) for tap in taps)
        kv = bytes(cluster.senders[0].storage.host_bytes)  # type: ignore[arg-type]
        pieces = {kv[at : at + 16] for at in range(0, len(kv), 64)} - {bytes(16)}
        assert len(pieces) > 20
        assert any(piece in seen for piece in pieces) != seals


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with transports.clusters(transports.zmq) as make:
        yield make(seals=True)


@contextmanager
def introduced(cluster: Cluster) -> Iterator[tuple[zmq.Socket[bytes], Channel]]:
    """The socket of somebody who knows the receiver's key, and its channel."""
    address, key = split_key(cluster.receivers[0].end.address.removeprefix("zmq+"))
    assert key is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        channel = sealed_sockets.introduce(client, key)
        client.connect(address)
        yield client, channel


def message(channel: Channel, header: bytes = b"header", payload: bytes = b"payload") -> list[bytes]:
    """Sealed as a sender does."""
    sealed_header, sealed_payload = channel.seal(header), bytearray(len(payload) + OVERHEAD_BYTES)
    channel.seal_into(payload, sealed_payload, context=sealed_header)
    return [sealed_header, bytes(sealed_payload)]


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


CHANGED: dict[str, Callable[[list[bytes], list[bytes]], list[bytes]]] = {
    "the header": lambda m, _: [flipped(m[0], 3), m[1]],
    "the payload": lambda m, _: [m[0], flipped(m[1], 3)],
    "the tag": lambda m, _: [m[0], flipped(m[1], len(m[1]) - OVERHEAD_BYTES)],
    "a tag that was cut": lambda m, _: [m[0], m[1][: -OVERHEAD_BYTES + 4]],
    "the payload of another message": lambda m, other: [m[0], other[1]],
    "the header of another message": lambda m, other: [other[0], m[1]],
    "the header as payload": lambda m, _: [m[0], m[0]],
    "nothing sealed": lambda *_: [b"header", b"payload"],
    "empty frames": lambda *_: [b"", b""],
    "one frame": lambda m, _: m[:1],
    "three frames": lambda m, _: [*m, b""],
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_message_that_was_changed_is_dropped(cluster: Cluster, what: str, caplog: pytest.LogCaptureFixture) -> None:
    receiver = cluster.receivers[0]
    with introduced(cluster) as (client, channel):
        client.send_multipart(CHANGED[what](message(channel), message(channel)))
        wait_until(lambda: "dropped a data message" in caplog.text, "the message is dropped")
        assert not client.poll(0), "it gets no ack"
    assert not receiver.recorder.events
    cluster.transfer().run()


def first_message_of(cluster: Cluster, transfer: Any) -> tuple[bytes, bytes]:
    """A header and payload that the receiver of `transfer` accepts."""
    piece = wire.KVSlice(0, 0, 1, 0, 2, 0, 1)
    header = wire.SliceHeader(transfer.key, "src-1", "dst-1", 0, 0, 1, [piece], 0, transfer.hashes[0])
    return wire.encode(header), bytes(piece.size_bytes(cluster.src_layout.spec.unit_bytes))


def test_a_message_that_is_sent_again_is_dropped_and_its_transfer_goes_on(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """In clear, a part that comes twice fails its transfer."""
    transfer = cluster.transfer()
    transfer.open_receivers()
    receiver = cluster.receivers[0]
    with introduced(cluster) as (client, channel):
        frames = message(channel, *first_message_of(cluster, transfer))
        for _ in range(3):
            client.send_multipart(frames)
        wait_until(lambda: caplog.text.count("dropped a data message") == 2, "the other two are dropped")
        assert client.poll(1000 * DEADLINE_S)
        assert wire.decode_ack(channel.open(client.recv())).code == ""
        assert not client.poll(0), "one ack"
    assert not receiver.recorder.of(transfer.key, ReceiveFailed)


def test_a_message_sent_again_after_its_connection_was_forgotten_harms_no_other_transfer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sealed_sockets, "MAX_CHANNELS", 1)
    past, present = cluster.transfer(), cluster.transfer(tokens=20)
    past.open_receivers()
    receiver = cluster.receivers[0]
    with introduced(cluster) as (client, channel), introduced(cluster) as (other, other_channel):
        frames = message(channel, *first_message_of(cluster, past))
        codes: list[str] = []

        def send_and_wait_for_ack() -> None:
            client.send_multipart(frames)
            assert client.poll(1000 * DEADLINE_S)
            codes.append(wire.decode_ack(channel.open(client.recv())).code)

        send_and_wait_for_ack()
        receiver.end.apply(AbortOrder(past.key))
        receiver.recorder.wait(past.key, DestinationReleased)
        other.send_multipart(message(other_channel))  # now the first connection is forgotten
        wait_until(lambda: "dropped a data message" in caplog.text, "a header that is none is dropped")
        send_and_wait_for_ack()
    assert codes == ["", TransferAborted.code], "it names no live transfer, and no nonce of a reply was used twice"
    present.run()


def test_a_sender_whose_key_is_of_an_earlier_start_of_the_receiver_fails_its_transfer(cluster: Cluster) -> None:
    rank = cluster.receivers[0].end
    address, _ = split_key(rank.address)
    rank.address = with_key(address, ServerKey().public)
    transfer = cluster.transfer()
    transfer.compute()
    transfer.open_receivers()
    transfer.open_senders()
    transfer.grant()
    transfer.final()
    released = cluster.senders[0].recorder.wait(transfer.key, SourceReleased)
    assert isinstance(released.error, PeerLost)


def test_sending_to_a_receiver_that_has_refused_the_connection_costs_no_other_transfer(cluster: Cluster) -> None:
    """The refusal may come between a sender's look at its connections and its send."""
    address, _ = split_key(cluster.receivers[0].end.address.removeprefix("zmq+"))
    poller = zmq.Poller()
    with zmq.Context() as context:
        link = DealerLink(context, poller, address, ServerKey().public)
        try:
            wait_until(
                lambda: bool(poller.poll(0)) and not link._socket.poll(0, zmq.POLLOUT), "the end of the connection"
            )
            link.send(b"header", b"payload")
            with pytest.raises(PeerLost):
                list(link.replies(dict(poller.poll(0))))
        finally:
            link.close()


def test_replies_that_were_changed_are_dropped(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """They would free a message's buffer before it was sent."""
    transfer = cluster.transfer()
    listener = cluster.receivers[0].end._receive._listeners[0]
    real_send, sent = listener._router.send, []

    def send(identity: bytes, data: bytes) -> None:
        sent.append(data)
        real_send(identity, flipped(data, 0))
        real_send(identity, wire.encode(wire.SliceAck(AttemptKey("r", 1), len(sent))))
        real_send(identity, data)
        real_send(identity, data)

    listener._router.send = send
    transfer.run()
    assert caplog.text.count("dropped a reply") >= 3 * len(sent) - 3  # the last ones may come after the end
