"""Guarantees of the collective transport: a group that is never built, or a store that does not answer, affects no other peer."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import zmq
from support import transports
from support.fake_receivers import FakeRouter
from support.mock_clock import MockClock
from support.single_transport import gloo_receiver
from support.transfer_harness import DEADLINE_S, Cluster, wait_until

from common.base.errors import PeerLost
from common.control.messages import PeerRef
from common.engine.kv_transfer import DisconnectOrder, SourceReleased
from kvtransfer.transports.collective import process_group, protocol
from kvtransfer.transports.collective.process_group import wait_for_payload
from kvtransfer.transports.collective.protocol import GroupLeave, GroupMeet, GroupReply, GroupRequest
from kvtransfer.transports.zmq import DealerLink

ENCODE = protocol.CODEC.encode


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with transports.clusters(transports.collective) as make:
        yield make(timeout_s=0.5)


class FakeReceiver(FakeRouter):
    def __init__(self) -> None:
        super().__init__("gloo")

    def request(self) -> tuple[bytes, GroupRequest]:
        assert self.socket.poll(1000 * DEADLINE_S)
        identity, data = self.socket.recv_multipart()
        return identity, protocol.CODEC.decode(data)

    def reply(self, identity: bytes, reply: GroupReply) -> None:
        self.socket.send_multipart([identity, b"g" + ENCODE(reply)])


@pytest.fixture
def fake() -> Iterator[FakeReceiver]:
    receiver = FakeReceiver()
    yield receiver
    receiver.close()


def offer_to(cluster: Cluster, peer: PeerRef) -> Any:
    transfer = cluster.transfer("hanging", tokens=60)
    transfer.open_senders()
    transfer.grant(peer)
    transfer.final()
    return transfer


def test_receiver_that_never_replies_delays_no_other_and_is_given_up(cluster: Cluster, fake: FakeReceiver) -> None:
    hanging = offer_to(cluster, fake.peer)
    fake.request()
    cluster.transfer("good").run()
    assert isinstance(cluster.senders[0].recorder.wait(hanging.key, SourceReleased).error, PeerLost)


@pytest.mark.parametrize("store", ["refuses", "hangs"])
def test_store_that_does_not_answer_delays_no_other_and_is_given_up(
    cluster: Cluster, fake: FakeReceiver, store: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        hanging = offer_to(cluster, fake.peer)
        identity, request = fake.request()
        port = server.getsockname()[1]
        if store == "refuses":
            server.close()
        fake.reply(identity, GroupReply(request.name, port))
        cluster.transfer("good").run()
        assert isinstance(cluster.senders[0].recorder.wait(hanging.key, SourceReleased).error, PeerLost)


def test_link_whose_group_ended_by_itself_does_not_block_close(fake: FakeReceiver) -> None:
    """The next connection forgets the ended ones; an open socket of theirs would block the context for ever."""
    with transports.clusters(transports.collective) as make, socket.create_server(("127.0.0.1", 0)) as server:
        cluster = make(timeout_s=0.5)
        hanging = offer_to(cluster, fake.peer)
        identity, request = fake.request()
        port = server.getsockname()[1]
        server.close()
        fake.reply(identity, GroupReply(request.name, port))
        assert isinstance(cluster.senders[0].recorder.wait(hanging.key, SourceReleased).error, PeerLost)
        cluster.transfer("good").run()
        connector: Any = cluster.senders[0].end._send.connections._connectors["gloo"]
        wait_until(lambda: len(connector._peers) == 1 or connector._peers[0].link_closed, "its link is closed")
        gc.disable()
        try:
            closing = threading.Thread(target=cluster.senders[0].end.close, daemon=True)
            closing.start()
            closing.join(DEADLINE_S)
            assert not closing.is_alive(), "close hangs"
        finally:
            gc.enable()


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_process_without_threads_refuses_a_group_and_fails_no_other_transfer(
    cluster: Cluster, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: Any) -> None:
        if thread.name.startswith("kv-group-to" if end == "sender" else "kv-group-from"):
            raise RuntimeError("can't start new thread")
        real_start(thread)

    real_start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    bystander = cluster.transfer("bystander", seed=1)
    bystander.compute()
    bystander.open_receivers()
    bystander.open_senders()
    transfer = cluster.transfer()
    transfer.open_senders()
    transfer.grant()
    error = cluster.senders[0].recorder.wait(transfer.key, SourceReleased).error
    assert isinstance(error, PeerLost)
    assert "thread" in error.message
    monkeypatch.undo()
    bystander.grant()
    bystander.final()
    bystander.check_received()


@pytest.mark.parametrize("place", ["tcp://[fd00::1:7", "tcp://127.0.0.1", "no://where:1"])
def test_malformed_address_fails_its_transfer_only(cluster: Cluster, place: str) -> None:
    waiting = cluster.transfer("waiting", seed=1)
    waiting.compute()
    waiting.open_receivers()
    waiting.open_senders()
    lost = offer_to(cluster, PeerRef("d", "dst-1", "", ["gloo+" + place]))
    assert isinstance(cluster.senders[0].recorder.wait(lost.key, SourceReleased).error, PeerLost)
    waiting.grant()
    waiting.final()
    waiting.check_received()


def test_refusal_names_its_reason(cluster: Cluster, fake: FakeReceiver) -> None:
    hanging = offer_to(cluster, fake.peer)
    identity, request = fake.request()
    fake.reply(identity, GroupReply("another group", error="not yours"))
    fake.reply(identity, GroupReply(request.name, error="out of groups"))
    error = cluster.senders[0].recorder.wait(hanging.key, SourceReleased).error
    assert isinstance(error, PeerLost)
    assert "out of groups" in error.message


def test_sender_that_never_joins_its_group_is_forgotten(cluster: Cluster) -> None:
    """It announces that it joins the store but does not; meanwhile the receiver serves others."""
    receiver = cluster.receivers[0].end
    listener: Any = receiver._receive._listeners[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(receiver.address.removeprefix("gloo+"))
        dealer.send(ENCODE(GroupRequest("absent", "gloo", 1024)))
        assert dealer.poll(1000 * DEADLINE_S)
        assert protocol.CODEC.decode(dealer.recv()[1:]).port
        dealer.send(ENCODE(GroupMeet()))
        cluster.transfer("good").run()
        assert dealer.poll(1000 * DEADLINE_S)
        assert protocol.CODEC.decode(dealer.recv()[1:]).error
        wait_until(lambda: len(listener._senders) == 1, "only the good one is left")


HOSTILE = {
    "garbage": [b"\xff\xff"],
    "too many frames": [b"a", b"b", b"c"],
    "meeting without a group": [ENCODE(GroupMeet())],
    "an answer": [ENCODE(GroupReply("x"))],
    "payload without a group": [b"header", bytes(8)],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_malformed_messages_are_dropped_and_the_receiver_continues(
    cluster: Cluster, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = cluster.receivers[0].end
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(receiver.address.removeprefix("gloo+"))
        dealer.send_multipart(HOSTILE[what])
        wait_until(lambda: "dropped a malformed message" in caplog.text, "it is dropped")
    cluster.transfer().run()


@pytest.mark.parametrize("size", [0, 1025, 2**62])
def test_payload_of_a_wrong_size_ends_its_group_before_a_buffer_is_taken(cluster: Cluster, size: int) -> None:
    receiver = cluster.receivers[0].end
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(receiver.address.removeprefix("gloo+"))
        dealer.send(ENCODE(GroupRequest("greedy", "gloo", 1024)))
        assert dealer.poll(1000 * DEADLINE_S)
        dealer.recv()
        dealer.send_multipart([b"header", size.to_bytes(8, "little")])
        assert dealer.poll(1000 * DEADLINE_S)
        assert protocol.CODEC.decode(dealer.recv()[1:]).error
    cluster.transfer().run()


def test_group_ends_with_sender_or_receiver_and_is_made_again(cluster: Cluster) -> None:
    cluster.transfer("first").run()
    receiver = cluster.receivers[0]
    old: Any = receiver.end._receive._listeners[0]
    assert len(old._senders) == 1
    again = gloo_receiver(receiver.storage, cluster.dst_layout, 0, receiver.recorder)
    receiver.end.close()
    assert not old._senders
    receiver.end = again
    cluster.transfer("second", seed=1).run()
    cluster.senders[0].end.close()
    listener: Any = again._receive._listeners[0]
    wait_until(lambda: not listener._senders, "the receiver has noticed")


@pytest.mark.parametrize(
    ("moved_at", "over_at", "says"),
    [
        (0.0, 0.0, ""),
        (0.3, 9.9, ""),
        (0.3, 0.2, ""),  # the work is over a moment before its event
        (9.9, 0.2, "lost the peer"),  # failed work is over but its event never completes
        (9.9, 9.9, "longer than 2.0 s"),
    ],
)
def test_waiting_for_a_payload_tells_failure_from_success(moved_at: float, over_at: float, says: str) -> None:
    clock = MockClock()
    reason = wait_for_payload(
        lambda: clock() >= moved_at, lambda: clock() >= over_at, 2.0, clock, lambda _: clock.advance(0.01)
    )
    assert says in reason
    assert bool(reason) == bool(says)
    assert clock() <= 2.1


class FakeGroup:
    def __init__(self) -> None:
        self.aborted = 0

    def abort(self) -> None:
        self.aborted += 1


@pytest.mark.parametrize(("backend", "aborted"), [("nccl", 1), ("gloo", 0)])
def test_nccl_group_frees_its_memory_when_its_thread_ends(
    backend: str, aborted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = FakeGroup()
    monkeypatch.setattr(process_group, "_make_group", lambda *_: group)
    plan = process_group.GroupPlan(backend, "a", process_group.RECEIVING, "127.0.0.1", "127.0.0.1", 5.0)
    reasons: list[str] = []
    ready = threading.Event()
    thread = process_group.ProcessGroupThread("pair", plan, on_ready=ready.set, on_end=reasons.append)
    thread.listen()
    thread.start()
    thread.meet(0)
    assert ready.wait(DEADLINE_S)
    thread.stop()
    assert thread.join(DEADLINE_S)
    assert (reasons, group.aborted) == (["stopped"], aborted)


def test_nccl_staging_stays_within_its_memory_limit(
    cluster: Cluster, fake: FakeReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tested with gloo, as if its buffers were GPU memory. Sixteen connections with messages of 2 MiB fit."""
    assert protocol.has_room("nccl", [2**21] * 15, 2**21)
    assert not protocol.has_room("nccl", [2**21] * 16, 2**21)
    cluster.transfer("good").run()
    monkeypatch.setattr(protocol, "NCCL", "gloo")
    listener: Any = cluster.receivers[0].end._receive._listeners[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(cluster.receivers[0].end.address.removeprefix("gloo+"))
        dealer.send(ENCODE(GroupRequest("large", "gloo", 2**26)))
        assert dealer.poll(1000 * DEADLINE_S)
        assert "no room" in protocol.CODEC.decode(dealer.recv()[1:]).error
    assert len(listener._senders) == 1
    monkeypatch.setattr(protocol, "STAGING_BYTES", 2 * 8 * 1024 - 1)
    hanging = offer_to(cluster, fake.peer)
    error = cluster.senders[0].recorder.wait(hanging.key, SourceReleased).error
    assert isinstance(error, PeerLost)
    assert "set aside" in error.message
    monkeypatch.undo()
    cluster.transfer("still", seed=1).run()


def test_connection_that_could_not_announce_its_end_is_dropped_when_the_next_one_is_made(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the receiver would keep it, and its GPU memory, for half a minute."""
    cluster.transfer("first").run()
    listener: Any = cluster.receivers[0].end._receive._listeners[0]
    [old] = listener._senders.values()
    real_send, leave = DealerLink.send, ENCODE(GroupLeave())

    def send(link: Any, *frames: Any) -> None:
        if frames != (leave,):
            real_send(link, *frames)

    monkeypatch.setattr(DealerLink, "send", send)
    cluster.senders[0].end.apply(DisconnectOrder("dst-1"))
    cluster.transfer("second", seed=1).run()
    assert len(listener._senders) == 1
    assert old not in listener._senders.values()


class HangingGroup(FakeGroup):
    """NCCL whose other end never joins. `abortable`: an abort ends the wait, as NCCL documents."""

    def __init__(self, *, abortable: bool) -> None:
        super().__init__()
        self.abortable = abortable
        self.over = threading.Event()

    def recv(self, *_: object) -> None:
        assert self.over.wait(DEADLINE_S)
        raise RuntimeError("NCCL communicator was aborted")

    def abort(self) -> None:
        super().abort()
        if self.abortable:
            self.over.set()


@pytest.mark.parametrize("abortable", [True, False])
def test_communicator_that_is_never_built_has_a_deadline(abortable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    group = HangingGroup(abortable=abortable)
    monkeypatch.setattr(process_group, "_make_group", lambda *_: group)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    plan = process_group.GroupPlan("nccl", "a", process_group.RECEIVING, "127.0.0.1", "127.0.0.1", 0.2)
    reasons: list[str] = []
    ended = threading.Event()
    thread = process_group.ProcessGroupThread(
        "pair", plan, on_ready=lambda: None, on_end=lambda reason: (reasons.append(reason), ended.set())
    )
    thread.listen()
    thread.start()
    thread.meet(0)
    thread.move(torch.zeros(4), lambda: None)
    assert ended.wait(DEADLINE_S)
    assert thread.join(DEADLINE_S if abortable else 0.0) == abortable
    group.over.set()
    assert thread.join(DEADLINE_S)
    assert (reasons, group.aborted) == (["no NCCL communicator within 0.2 s"], 1)
