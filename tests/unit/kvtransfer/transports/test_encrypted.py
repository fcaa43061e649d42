"""KV over encrypted ZMQ: it arrives whole, nobody on the way can read it, and nobody without the key gets in."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import zmq
from support import single_transport
from support.transfer_harness import Cluster, layout
from support.transports import Transport

from common.security.curve import (
    derived_keys,
    encrypt_client,
    encrypt_server,
    new_keys,
    split_key,
    with_key,
    without_keys,
)
from kvtransfer.receiver import Receiver
from kvtransfer.transports.zmq import ZmqListener


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
def tapped_cluster(*, encrypts: bool) -> Iterator[tuple[Cluster, list[Tap]]]:
    taps: list[Tap] = []

    def receiver(*where, **options) -> Receiver:
        listener = ZmqListener("127.0.0.1", 0, encrypts=encrypts)
        place, key = split_key(listener.offer.endpoint)[0], listener.offer.key
        taps.append(Tap(int(place.rpartition(":")[2])))
        end = Receiver(*where, [listener], **options)
        end._address = with_key(f"zmq+tcp://127.0.0.1:{taps[-1].port}", key)
        return end

    options = {"staging_bytes": 1024, "window": 4, "min_message_bytes": 1}
    transport = Transport(lambda *where, **kw: single_transport.zmq_sender(*where, **options, **kw), receiver)
    cluster = Cluster(transport, layout(tp=2), layout())
    try:
        yield cluster, taps
    finally:
        cluster.close()
        for tap in taps:
            tap.close()


@pytest.mark.parametrize("encrypts", [False, True])
def test_what_travels_is_unreadable_if_and_only_if_it_is_encrypted(encrypts: bool) -> None:
    with tapped_cluster(encrypts=encrypts) as (cluster, taps):
        transfer = cluster.transfer(tokens=40)
        transfer.run()
        seen = b"".join(bytes(tap.seen) for tap in taps)
        kv = bytes(cluster.senders[0].storage.host_bytes)  # type: ignore[arg-type]
        pieces = {kv[at : at + 16] for at in range(0, len(kv), 64)} - {bytes(16)}
        assert len(pieces) > 20
        assert any(piece in seen for piece in pieces) != encrypts


def test_only_who_knows_the_key_gets_in() -> None:
    context = zmq.Context()
    keys = new_keys()
    server = context.socket(zmq.PULL)
    encrypt_server(server, keys)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    for known in (None, new_keys().public, keys.public):
        client = context.socket(zmq.PUSH)
        client.setsockopt(zmq.LINGER, 0)
        encrypt_client(client, known)
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(b"hello")
        assert bool(server.poll(300 if known != keys.public else 5000)) == (known == keys.public)
        client.close()
    context.destroy(linger=0)


def test_keys_of_one_secret_are_equal_and_fit_into_an_address() -> None:
    keys = derived_keys(b"\x01" * 32)
    assert keys == derived_keys(b"\x01" * 32)
    address = with_key("tcp://10.0.0.1:7", keys.public)
    assert split_key(address) == ("tcp://10.0.0.1:7", keys.public)
    assert without_keys(f"zmq+{address}#gpu shm+unix://x/y") == "zmq+tcp://10.0.0.1:7#gpu shm+unix://x/y"
    assert split_key("tcp://10.0.0.1:7") == ("tcp://10.0.0.1:7", None)
    for wrong in ("zz", "00ff"):
        with pytest.raises(ValueError, match=r"hex|32 bytes"):
            split_key(f"tcp://10.0.0.1:7?key={wrong}")
