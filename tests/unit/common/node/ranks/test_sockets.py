"""Sealed links between the ranks of a node: who gets in, and what an eavesdropper can do with what it has recorded."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from common.base.errors import ConfigError, PeerLost, ProtocolError
from common.node.ranks import sockets
from common.node.ranks.sockets import RankInbox, RankOutbox, ask_leader
from common.security import sealed_sockets
from common.security.sealed_endpoints import split_key, with_key
from common.security.sealed_sockets import SealedPush, SealedServer
from common.security.sealing import ServerKey

SECRET, OTHER = bytes(range(32)), bytes(range(1, 33))
HOST = "127.0.0.1"


@contextlib.contextmanager
def inbox(secret: bytes | None = SECRET, *, leads: bool = True) -> Iterator[RankInbox]:
    """In a context of its own, as in a process of its own."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made = RankInbox(context, HOST, 0, 2**20, secret, leads=leads)
    try:
        yield made
    finally:
        made.close()
        context.destroy(linger=0)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made.setsockopt(zmq.LINGER, 0)
    yield made
    made.destroy(linger=0)


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What travels."""
    recorded: list[bytes] = []
    seal = SealedPush.seal

    def recording(push: SealedPush, data: bytes) -> bytearray:
        frame = seal(push, data)
        recorded.append(bytes(frame))
        return frame

    monkeypatch.setattr(SealedPush, "seal", recording)
    return recorded


def meet(leader: RankInbox, rank: RankInbox, secret: bytes, timeout_s: float = 20.0) -> str:
    """The leader's address as the rank learns it, while the leader reads."""
    with ThreadPoolExecutor(1) as pool, zmq.Context() as context:
        asking = pool.submit(ask_leader, context, leader.address, rank, rank.address, secret, timeout_s)
        while not asking.done():
            assert leader.receive(0.05) is None
        return asking.result()


def arrives(leader: RankInbox, send: Callable[[], None]) -> list[bytes | memoryview]:
    """What the inbox gives for what is sent; ends with a message that gets through."""
    send()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    last = RankOutbox(context, with_key(leader.address, leader.key))
    last.send(b"last")
    got: list[bytes | memoryview] = []
    while (data := leader.receive(20.0)) != b"last":
        assert data is not None
        got.append(data)
    context.destroy(linger=0)
    return got


def test_rank_learns_the_leaders_key_and_both_speak(
    context: zmq.Context[zmq.Socket[bytes]], frames: list[bytes]
) -> None:
    with inbox() as leader, inbox(leads=False) as rank:
        address = meet(leader, rank, SECRET)
        assert address == with_key(leader.address, leader.key)
        RankOutbox(context, address).send(b"a report")
        assert leader.receive(20.0) == b"a report"
        RankOutbox(context, with_key(rank.address, rank.key)).send(b"an order")
        assert rank.receive(20.0) == b"an order"
        assert leader.key is not None
        assert not [frame for frame in frames if b"report" in frame or leader.key in frame]


def test_rank_that_is_busy_when_the_leader_answers_still_gets_the_key_and_gets_it_once(
    context: zmq.Context[zmq.Socket[bytes]], frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_LINGER_MS", 0)
    monkeypatch.setattr(sockets, "_MAX_ANSWERS", 2)
    with inbox() as leader, inbox(leads=False) as rank:
        asking = RankOutbox(context, with_key(leader.address, ServerKey(SECRET).public), lasting=True)

        def ask(*addresses: str) -> None:
            for address in addresses:
                asking.send(with_key(address, rank.key).encode())
            while with_key(addresses[-1], rank.key) not in leader._answers:
                assert leader.receive(0.02) is None

        nobody = [f"tcp://127.0.0.1:{port}" for port in range(1, 4)]
        ask(rank.address, rank.address, nobody[0])
        assert rank.receive(20.0) == leader.key
        ask(nobody[1], rank.address, nobody[2])
        assert [outbox.socket.closed for outbox in leader._answers.values()] == [True, True, False, False]
        orders = RankOutbox(context, with_key(rank.address, rank.key))
        orders.send(b"an order")
        assert rank.receive(20.0) == b"an order"


def test_messages_travel_in_clear_without_certificates(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with inbox(None) as leader:
        assert leader.key is None
        RankOutbox(context, leader.address).send(b"a report")
        assert leader.receive(20.0) == b"a report"


def test_rank_with_the_key_of_another_node_is_refused_and_both_say_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    refused = pytest.raises(ConfigError, match="refused this rank: --tls-dir must hold the same key on all hosts")
    with inbox() as leader, inbox(OTHER, leads=False) as rank, refused:
        meet(leader, rank, OTHER)
    [line] = [each for each in caplog.records if "refused a connection from 127.0.0.1: it does" in each.getMessage()]
    assert line.__dict__["peer"] == "127.0.0.1", "one peer cannot use up the lines about all"


def test_leader_that_does_not_answer_is_named() -> None:
    with (
        inbox(leads=False) as rank,
        zmq.Context() as context,
        pytest.raises(PeerLost, match=r"leader at tcp://127\.0\.0\.1:1 has not"),
    ):
        ask_leader(context, "tcp://127.0.0.1:1", rank, rank.address, SECRET, 0.3)


def test_message_that_comes_again_late_or_changed_is_dropped(
    context: zmq.Context[zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    with inbox() as leader:
        assert leader.key is not None
        socket = context.socket(zmq.PUSH)
        sealed = SealedPush(socket, leader.key)
        socket.connect(leader.address)
        first, second, third = (bytes(sealed.seal(text)) for text in (b"first", b"second", b"third"))
        changed = third[:-20] + bytes([third[-20] ^ 1]) + third[-19:]
        for frame in (second, second, first, changed, b"short", third):
            socket.send(frame)
        assert [leader.receive(20.0), leader.receive(20.0), leader.receive(0.0)] == [b"second", b"third", None]
    assert sum("dropped a message between ranks" in line for line in caplog.messages) == 4


def test_recording_of_an_earlier_start_has_no_effect(
    context: zmq.Context[zmq.Socket[bytes]], frames: list[bytes]
) -> None:
    with inbox() as leader, inbox(leads=False) as rank:
        RankOutbox(context, meet(leader, rank, SECRET)).send(b"a report")
        assert leader.receive(20.0) == b"a report"
    recorded = frames[:]
    with inbox() as leader, inbox(leads=False) as rank:
        replay = context.socket(zmq.PUSH)
        SealedPush(replay, ServerKey(SECRET).public)  # the eavesdropper knows the password
        replay.connect(leader.address)

        def play() -> None:
            for frame in recorded:
                replay.send(frame)

        assert len(recorded) == 3
        assert not arrives(leader, play)
        assert split_key(meet(leader, rank, SECRET))[1] == leader.key, "the new ranks meet all the same"


def test_recordings_of_earlier_starts_do_not_reopen_what_was_opened_in_this_one(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sealed_sockets, "MAX_CHANNELS", 2)

    def sealed(key: bytes, *, lasting: bool = False) -> bytes:
        return bytes(SealedPush(context.socket(zmq.PUSH), key, lasting=lasting).seal(b"text"))

    node_key = ServerKey(SECRET)
    server = SealedServer(node_key)
    reports = [sealed(server.public_key) for _ in range(2)]
    assert [server.open(frame) for frame in reports] == [(b"text", False)] * 2
    for frame in [sealed(node_key.public, lasting=True) for _ in range(3)]:
        assert server.open(frame) == (b"text", True)
    for frame in reports:
        with pytest.raises(ProtocolError, match="before"):
            server.open(frame)


def test_stranger_gets_no_message_in(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with inbox() as leader:

        def in_clear() -> None:
            socket = context.socket(zmq.PUSH)
            socket.connect(leader.address)
            socket.send(b"in clear")

        assert not arrives(leader, in_clear)
        assert not arrives(leader, lambda: RankOutbox(context, with_key(leader.address, ServerKey().public)).send(b"x"))
