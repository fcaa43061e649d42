"""Messages that never end are bounded, of one peer and of all."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator

import pytest
from support.zmtp import connected, frame

from common.base import bounded_messages
from kvtransfer.transports.zmq import ZmqListener

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts bytes as only Linux does")
PART = frame(bytes(2**16), more=True)


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[ZmqListener]:
    monkeypatch.setattr(bounded_messages, "MAX_BYTES", 2**20)
    monkeypatch.setattr(bounded_messages, "MAX_BYTES_IN_ALL", 2 * 2**20)
    monkeypatch.setattr(bounded_messages, "_CHECK_S", 0.0)
    made = ZmqListener("127.0.0.1", 0)
    yield made
    made.close()


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        while client.recv(4096):  # the handshake
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def until_closed(listener: ZmqListener, clients: list[socket.socket], count: int) -> None:
    end_s = time.monotonic() + 10
    while sum(map(is_closed, clients)) < count:
        assert listener.receive() is None
        assert time.monotonic() < end_s


def test_a_peer_whose_message_never_ends_is_closed_and_others_are_heard(listener: ZmqListener) -> None:
    with connected(listener.offer.endpoint) as hostile, connected(listener.offer.endpoint) as good:
        hostile.sendall(20 * PART)
        until_closed(listener, [hostile], 1)
        good.sendall(frame(b"header", more=True) + frame(b"payload", more=False))
        end_s = time.monotonic() + 10
        while (arrival := listener.receive()) is None:
            assert time.monotonic() < end_s
        assert bytes(arrival.header) == b"header"


def test_a_peer_of_zmtp_1_whose_messages_name_no_connection_is_heard(listener: ZmqListener) -> None:
    host, _, port = listener.offer.endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(b"\x01\x00" + b"\x07\x01header" + b"\x08\x00payload")
        end_s = time.monotonic() + 10
        while (arrival := listener.receive()) is None:
            assert time.monotonic() < end_s
    assert bytes(arrival.header) == b"header"


def test_many_such_peers_are_bounded_together(listener: ZmqListener) -> None:
    clients = [connected(listener.offer.endpoint) for _ in range(4)]
    for client in clients:
        client.sendall(12 * PART)
    until_closed(listener, clients, 2)
    for _ in range(20):
        assert listener.receive() is None
    assert sum(map(is_closed, clients)) == 2
    for client in clients:
        client.close()


def test_a_peer_that_finishes_its_messages_may_send_without_end(listener: ZmqListener) -> None:
    whole = frame(b"header", more=True) + frame(bytes(2**18), more=False)
    with connected(listener.offer.endpoint) as client:
        for _ in range(40):
            client.sendall(whole)
            end_s = time.monotonic() + 10
            while listener.receive() is None:
                assert time.monotonic() < end_s
            assert listener.receive() is None
        assert not is_closed(client)
