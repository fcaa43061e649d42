"""Guarantees of the ZMQ transport: malformed, misplaced and early messages harm no transfer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import zmq
from support import transports
from support.transfer_harness import DEADLINE_S, layout, wait_until

from common.base.hashing import HASH_BYTES
from common.control.messages import AttemptKey
from common.engine.kv_transfer import AbortOrder, ReceiveFailed
from kvtransfer import wire


@pytest.fixture
def make() -> Iterator[Any]:
    with transports.clusters(transports.zmq) as make:
        yield make


HOSTILE = {
    "no frames": [b""],
    "garbage header": [b"\xff" * 50, b"payload"],
    "three frames": [b"a", b"b", b"c"],
    "a thousand frames": [b"x"] * 1000,
    "an ack": [wire.encode(wire.SliceAck(AttemptKey("r", 1), 1)), b""],
    "header too large": [bytes(wire.MAX_HEADER_BYTES + 1), b""],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_malformed_frames_are_dropped_and_the_receiver_continues(
    make: Any, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = make()
    transfer = cluster.transfer()
    transfer.compute()
    transfer.open_receivers()
    receiver = cluster.receivers[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(receiver.end.address.removeprefix("zmq+"))
        socket.send_multipart(HOSTILE[what])
        wait_until(lambda: "dropped a data message" in caplog.text, "the message is dropped")
    assert not receiver.recorder.events
    transfer.open_senders()
    transfer.grant()
    transfer.final()
    transfer.check_received()


def test_payload_above_the_limit_is_refused_by_the_socket(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wire, "MAX_PAYLOAD_BYTES", 10_000)
    cluster = make()
    receiver = cluster.receivers[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(receiver.end.address.removeprefix("zmq+"))
        socket.send_multipart([b"header", bytes(20_000)])
        assert monitor.poll(1000 * DEADLINE_S), "the receiver disconnects"
        socket.disable_monitor()
        monitor.close()
    assert "data message" not in caplog.text
    cluster.transfer().run()


@pytest.mark.parametrize("wrong", ["layers", "heads", "group", "blocks", "held", "short", "long", "overlap"])
def test_slice_out_of_place_is_corrupt_and_writes_nothing(make: Any, wrong: str) -> None:
    cluster = make(layout(), layout(tp=2))
    transfer = cluster.transfer(tokens=16, held=1)
    transfer.open_receivers()
    transfer.poison_destination()
    receiver = cluster.receivers[0]
    piece = {
        "layers": wire.KVSlice(0, 3, 5, 0, 1, 1, 3),
        "heads": wire.KVSlice(0, 0, 1, 1, 2, 1, 3),
        "group": wire.KVSlice(1, 0, 1, 0, 1, 1, 3),
        "blocks": wire.KVSlice(0, 0, 1, 0, 1, 3, 5),
        "held": wire.KVSlice(0, 0, 1, 0, 1, 0, 2),
    }.get(wrong, wire.KVSlice(0, 0, 1, 0, 1, 1, 3))
    size = piece.size_bytes(cluster.src_layout.spec.unit_bytes) + {"short": -1, "long": 1}.get(wrong, 0)
    slices = [piece, piece] if wrong == "overlap" else [piece]
    hashes = [*transfer.hashes, bytes(HASH_BYTES)][piece.block_lo : piece.block_hi]
    header = wire.SliceHeader(transfer.key, "src-1", "dst-1", 0, 0, 1, slices, piece.block_lo, b"".join(hashes))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(receiver.end.address.removeprefix("zmq+"))
        socket.send_multipart([wire.encode(header), bytes(size * len(slices))])
        failed = receiver.recorder.wait(transfer.key, ReceiveFailed)
        assert failed.error.code == "corrupt_slice"
        assert socket.poll(1000 * DEADLINE_S)
        assert wire.decode_ack(socket.recv()).code == "corrupt_slice"
    transfer.check_destination_untouched()


def test_message_that_arrives_before_its_open_is_taken_from_the_mailbox_is_accepted(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`open`, grant, send and arrival may all happen between the thread's look at its mailbox and its next receive."""
    cluster = make()
    transfer = cluster.transfer()
    transfer.compute()
    receiver = cluster.receivers[0].end
    router = receiver._receive._listeners[0]._router
    receive, raced = router.receive, []

    def racing(max_frames: int) -> Any:
        if not raced:
            raced.append(True)
            transfer.hand_over()
            assert router.socket.poll(1000 * DEADLINE_S)
        return receive(max_frames)

    monkeypatch.setattr(router, "receive", racing)
    receiver.apply(AbortOrder(AttemptKey("nobody", 1)))
    transfer.check_received()
